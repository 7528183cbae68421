"""Models that see and read are made of the tables of their parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from transfusion.errors import ArchitectureError
from transfusion.families import all_families
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.inputs import run_model
from transfusion.transport.apply import apply
from transfusion.verification.certify import certify


def written(folder: Path, tensors: dict[str, torch.Tensor], config: dict) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


DEFAULTS = {kind: given for family in all_families() for kind, given in family.class_defaults.items()}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_sections_are_completed_as_the_library_does(kind):
    import transformers

    config = transformers.CONFIG_MAPPING[kind]().to_dict()
    assert {key: config[key] for key in DEFAULTS[kind]} == DEFAULTS[kind]


NEWER = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
OLDEST = {"vision_tower.": "vision_tower.vision_model."}


@pytest.mark.parametrize("renamed", [NEWER, OLDEST], ids=["newer", "oldest"])
def test_names_of_all_releases_are_those_of_one_tensor(renamed, made, tmp_path):
    tensors, config = read(made("llava"))
    others = {}
    for name, value in tensors.items():
        old = next((old for old in renamed if name.startswith(old)), "")
        others[name.replace(old, renamed.get(old, ""), 1)] = value
    assert others.keys() != tensors.keys()
    model = Model.open(written(tmp_path / "other", others, config))
    assert model.names.keys() == Model.open(made("llava")).names.keys()
    assert LiveModel.of(model).outputs().keys()


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_the_text_may_be_described_outside_of_a_section(kind, made, tmp_path):
    """As in the released files of Qwen2-VL and Qwen2.5-VL."""
    tensors, config = read(made(kind))
    text = config.pop("text_config")
    del text["model_type"]
    model = Model.open(written(tmp_path / "flat", tensors, {**text, **config}))
    assert model.architecture == Model.open(made(kind)).architecture


def test_embeddings_are_not_tied_where_a_file_has_both(made, tmp_path):
    """As in the released files of Mistral Small 3.1, whose configuration does not say that they are not."""
    tensors, config = read(made("mistral3"))
    embedding = tensors["language_model.model.embed_tokens.weight"]
    tensors["language_model.lm_head.weight"] = embedding.flip(0).clone()
    config.pop("tie_word_embeddings")
    live = LiveModel.of(Model.open(written(tmp_path / "both", tensors, config)))
    assert not torch.equal(live.module.lm_head.weight, live.module.get_input_embeddings().weight)
    assert certify(live).passed


def test_an_unknown_setting_of_a_part_is_refused_by_name(made, tmp_path):
    tensors, config = read(made("llava"))
    config["vision_config"] |= {"is_causal": True, "twist": 3}  # a word in the code of CLIP, and in none
    with pytest.raises(
        ArchitectureError, match=r"llava table does not know: vision_config\.is_causal=True\n"
    ):
        Model.open(written(tmp_path / "odd", tensors, config))
    del config["vision_config"]["is_causal"]
    assert Model.open(written(tmp_path / "fine", tensors, config)).unread_settings == ["vision_config.twist"]


def test_a_part_of_an_unknown_kind_is_refused(made, tmp_path):
    tensors, config = read(made("llava"))
    config["text_config"]["model_type"] = "rwkv"
    with pytest.raises(ArchitectureError, match=r"text_config is of the kind 'rwkv', which is not supp"):
        Model.open(written(tmp_path / "odd", tensors, config))


def test_a_part_of_a_wrong_kind_is_refused(made, tmp_path):
    tensors, config = read(made("llava"))
    config["vision_config"] = {**config["text_config"], "model_type": "llama"}
    with pytest.raises(ArchitectureError, match="vision_config describes a model that cannot be a part"):
        Model.open(written(tmp_path / "odd", tensors, config))


def test_a_text_without_an_image_is_taken_as_it_is(made):
    live = LiveModel.of(Model.open(made("llava")))
    ids = live.inputs["input_ids"]
    alone = run_model(live.module, live.family, {"input_ids": ids})
    both = run_model(live.module, live.family, live.inputs)
    assert alone["logits"].shape[:2] == ids.shape
    assert both["logits"].shape[1] == ids.shape[1] + 9, "an image of 9 patches"


@pytest.mark.parametrize(
    "case",
    ["qwen3_vl", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llava", "gemma3-vision", "idefics3"))],
)
def test_what_units_compute_tells_where_they_went(case, made, tmp_path):
    """The functional method, on images and texts together."""
    a = made(case)
    moved = apply(align(a, a, method="random", residual="tied", seed=3), a).save(tmp_path / "b")
    pi = align(a, moved, method="functional", advice=False)
    ours, b = Model.open(a).under(pi.provenance.policy), Model.open(moved)
    for name, layout in ours.architecture.tensors.items():
        assert torch.allclose(pi.move(ours.read(name), layout), b.read(name), atol=1e-4), name
