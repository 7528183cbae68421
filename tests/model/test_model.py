"""Recognition: from a configuration, from names and shapes, and what is refused because it is not known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, FIRST, often
from transfusion import align, apply
from transfusion.architecture.naming import Naming
from transfusion.errors import ArchitectureError, LayoutError
from transfusion.families.functions import timm_settings
from transfusion.model.library_code import _words
from transfusion.model.model import Model, untied_config
from transfusion.model.pair import differing_settings
from transfusion.running.building import build
from transfusion.running.live_model import LiveModel


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_tells_the_family(case, made):
    model = Model.open(made(case))
    assert model.family.name == CASES[case].family
    assert any(f'says {key} "' in model.why for key in ("model_type", "architecture", "_class_name"))


@pytest.mark.parametrize("case", often(CASES, [*FIRST.values(), *(n for n in CASES if "-untied" in n)]))
def test_without_a_configuration_nothing_is_guessed(case, made, tmp_path):
    """Shapes rarely tell how many heads there are: then the configuration is asked for."""
    known = Model.open(made(case))
    (file,) = known.checkpoint.files
    weights = tmp_path / f"alone{file.suffix}"
    weights.write_bytes(file.read_bytes())
    if known.family.from_shapes is None:
        with pytest.raises(ArchitectureError, match="no configuration, and") as caught:
            Model.open(weights)
        assert "`config`" in str(caught.value.hint)
    elif (
        known.family.name == "unet" or known.family.kin == "wan" or case == "sd3"
    ):  # heads are known at the published widths only
        with pytest.raises(ArchitectureError, match="does not follow from the shapes") as caught:
            Model.open(weights)
        assert "`config`" in str(caught.value.hint)
    elif "-untied" in case:
        with pytest.raises(ArchitectureError, match="their values differ"):
            Model.open(weights)
    else:
        alone = Model.open(weights)
        assert alone.why == "the tensors' names and shapes; there is no config.json"
        assert alone.architecture.spaces == known.architecture.spaces


def test_what_shapes_cannot_tell_about_a_timm_model_is_refused(made, tmp_path):
    weights = tmp_path / "alone.safetensors"
    weights.write_bytes((made("timm-vit") / "model.safetensors").read_bytes())
    with pytest.raises(ArchitectureError, match="the number of attention heads does not follow"):
        Model.open(weights)
    config = json.loads((made("timm-vit") / "config.json").read_text())
    (tmp_path / "rotary.json").write_text(json.dumps(config | {"architecture": "vit_pe_spatial_tiny"}))
    with pytest.raises(ArchitectureError, match="rotary positions or norms elsewhere"):
        Model.open(weights, config=tmp_path / "rotary.json")


@pytest.mark.parametrize(
    ("about", "width"),
    [
        ({"architecture": "vit_base_patch16_224"}, 384),
        ({"architecture": "vit_base_patch16_224", "model_args": {"embed_dim": 896}}, 896),
        ({"architecture": "vit_of_tomorrow"}, 768),
    ],
)
def test_a_timm_model_whose_heads_neither_name_nor_arguments_tell_is_refused(about, width):
    shapes = {"blocks.0.norm1.weight": (width,), "blocks.0.mlp.fc1.weight": (4, width), "blocks.0.mlp.fc2.weight": (width, 4)}  # fmt: skip
    with pytest.raises(
        ArchitectureError, match=f"{about['architecture']} of width {width}: neither its name"
    ):
        timm_settings(about, shapes)
    info = {**about, "model_args": {**about.get("model_args", {}), "num_heads": 4}}
    assert timm_settings(info, shapes)["num_heads"] == 4


@pytest.mark.parametrize(
    ("name", "width", "heads"),
    [
        ("vit_tiny_patch16_224", 192, 3),
        ("vit_base_patch16_224", 768, 12),
        ("vit_base_patch16_gap_224", 768, 16),
        ("vit_base_patch16_plus_240", 896, 14),
        ("deit3_huge_patch14_224", 1280, 16),
        ("vit_giant_patch14_dinov2", 1536, 24),
        ("vit_giantopt_patch16_siglip_256", 1536, 16),
    ],
)
def test_timm_names_tell_the_number_of_heads(name, width, heads):
    """As `timm.create_model(name)` has them."""
    shapes = {"blocks.0.norm1.weight": (width,), "blocks.0.mlp.fc1.weight": (4, width), "blocks.0.mlp.fc2.weight": (width, 4)}  # fmt: skip
    assert timm_settings({"architecture": name}, shapes)["num_heads"] == heads


def test_a_timm_architecture_without_a_table_is_refused_by_its_name(made):
    folder = made("timm-vit")
    assert Model.open(folder).why == 'config.json says architecture "vit_tiny_patch16_224"'
    other = json.loads((folder / "config.json").read_text()) | {"architecture": "resnet50"}
    (folder.parent / "resnet.json").write_text(json.dumps(other))
    with pytest.raises(ArchitectureError, match="'resnet50' is not supported"):
        Model.open(folder, config=folder.parent / "resnet.json")


def test_a_config_can_be_given_for_weights_without_one(made, tmp_path):
    weights = tmp_path / "alone.safetensors"
    weights.write_bytes((made("llama") / "model.safetensors").read_bytes())
    with pytest.raises(ArchitectureError, match="the number of attention heads does not follow") as caught:
        Model.open(weights)
    assert "`config`" in str(caught.value.hint)
    given = Model.open(weights, config=made("llama") / "config.json")
    assert given.fingerprint == Model.open(made("llama")).fingerprint


def test_unknown_names_without_a_configuration_are_refused(tmp_path):
    save_file({"encoder.strange": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ArchitectureError, match="belong to no known family") as caught:
        Model.open(tmp_path / "x.safetensors")
    assert "config.json" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("doge", "'doge' is not supported. Nearest: llama. See docs/your-own.md"),
        ("rwkv", "'rwkv' is not supported. See docs/your-own.md"),
        (
            "distilbert2",
            "'distilbert2' is not supported. Nearest: distilbert. See docs/your-own.md",
        ),
    ],
)
def test_an_unknown_model_type_is_told_the_nearest_family(kind, said, made, tmp_path):
    """By the tensors' names, or else by its own name."""
    names = Model.open(made("llama")).checkpoint.tensors if kind == "doge" else ["x"]
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ArchitectureError) as caught:
        Model.open(tmp_path)
    assert caught.value.message.endswith(said)
    assert "inspect MODEL --propose" in str(caught.value.hint)


# ── what a table does not know ───────────────────────────────────────────────────────────────


@pytest.fixture
def folder(made, tmp_path) -> Path:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in made("bert").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def configure(folder: Path, **settings: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def rewrite(folder: Path, change) -> Path:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"is_decoder": True, "trained_by": "someone"}, "is_decoder=True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads={'0': \\[1\\]}"),
    ],
)
def test_settings_that_may_change_the_symmetries_are_refused_and_listed(settings, shown, folder):
    with pytest.raises(ArchitectureError, match=f"settings that the bert table does not know: {shown}"):
        Model.open(configure(folder, **settings))


def test_settings_of_the_towers_are_looked_at_too(made, tmp_path):
    for file in made("clip").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["trained_by"] = "someone"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Model.open(tmp_path).unread_settings == ["text_config.trained_by"]
    config["vision_config"]["is_causal"] = True  # a word in the library's code
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArchitectureError, match=r"does not know: vision_config\.is_causal=True"):
        Model.open(tmp_path)


OF_OTHERS = {"condition_on_chain": True, "uniem_embedding_strategy": "last_mean", "unsloth_version": "2026.1"}


def test_settings_that_the_library_never_reads_are_noted(folder, cli):
    """Keys of real checkpoints, by authors and trainers, which no code of transformers has."""
    model = Model.open(configure(folder, **OF_OTHERS))
    assert model.unread_settings == list(OF_OTHERS)
    code, _, err = cli("align", folder, folder, "--method", "naive", "-o", folder.parent / "pi")
    assert code == 0
    assert f"transformers reads no {', '.join(OF_OTHERS)}" in " ".join(err.split())
    assert "condition_on_chain" in cli("inspect", folder)[1]


def test_a_class_of_the_models_own_may_read_any_setting(folder):
    configure(folder, **OF_OTHERS, auto_map={"AutoModel": "modeling.Mine"})
    with pytest.raises(ArchitectureError, match="condition_on_chain=True"):
        Model.open(folder)


def test_without_the_library_no_unknown_setting_passes(folder, monkeypatch):
    monkeypatch.setattr("transfusion.model.library_code.find_spec", lambda name: None)
    monkeypatch.setattr("transfusion.model.recognition.find_spec", lambda name: None)
    _words.cache_clear()
    with pytest.raises(ArchitectureError, match="condition_on_chain=True") as caught:
        Model.open(configure(folder, **OF_OTHERS))
    assert "keys that transformers never reads pass once it is installed" in str(caught.value.hint)
    _words.cache_clear()


def test_a_configuration_without_a_model_type_is_told_by_the_tensors(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["model_type"]
    path.write_text(json.dumps(config))
    found = Model.open(folder)
    assert (found.family.name, found.why) == ("bert", "the tensors' names; config.json has no model_type")
    assert LiveModel.of(found).outputs(), "its library builds it, too"
    moved = apply(align(folder, folder, method="random", residual="tied"), folder).save(
        folder.parent / "moved"
    )
    assert json.loads((moved / "config.json").read_text())["model_type"] == "bert"


def test_settings_that_diffusers_never_reads_are_noted(made, tmp_path):
    for file in made("flux").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert Model.open(configure(tmp_path, trained_by="someone")).unread_settings == ["trained_by"]
    with pytest.raises(ArchitectureError, match=r"does not know: hidden_states=1"):  # a word in its code
        Model.open(configure(tmp_path, hidden_states=1))


def test_settings_of_older_releases_are_known(folder):
    old = {"gradient_checkpointing": False, "position_embedding_type": "absolute", "pruned_heads": {}, "torch_dtype": "float32", "top_k": 50, "tf_legacy_loss": False, "use_bfloat16": False}  # fmt: skip
    assert Model.open(configure(folder, **old)).family.name == "bert"


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: input should be a valid integer"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers: input should be a valid integer"),
        ({"num_attention_heads": 0}, "num_attention_heads: input should be greater than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, shown, folder):
    with pytest.raises(ArchitectureError, match=f"config.json: {shown}"):
        Model.open(configure(folder, **setting))


def test_a_missing_setting_is_named(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ArchitectureError, match=r"config\.json lacks 'num_hidden_layers', which the bert table needs"
    ):
        Model.open(folder)


def test_settings_that_differ_between_two_bases_are_listed(folder, made):
    other = Model.open(
        configure(folder, hidden_act="relu", layer_norm_eps=1e-3, attention_probs_dropout_prob=0.5)
    )
    assert differing_settings(Model.open(made("bert")), other) == [
        "hidden_act (gelu, relu)",
        "layer_norm_eps (1e-12, 0.001)",
    ]


def test_an_unknown_tensor_is_refused_and_listed(folder):
    rewrite(folder, lambda state: state.update({"encoder.layer.0.attention.gate": torch.zeros(2)}))
    with pytest.raises(
        ArchitectureError,
        match=r"1 tensor\(s\) that the table does not know: encoder\.layer\.0\.attention\.gate",
    ):
        Model.open(folder)


def test_a_missing_tensor_is_refused_and_listed(folder):
    rewrite(folder, lambda state: state.pop("encoder.layer.1.output.dense.weight"))
    with pytest.raises(
        ArchitectureError, match=r"missing from the checkpoint: encoder\.layer\.1\.output\.dense\.weight"
    ):
        Model.open(folder)


def test_a_bias_that_only_some_blocks_have_is_missing_from_the_others(folder):
    rewrite(folder, lambda state: state.pop("encoder.layer.1.output.dense.bias"))
    with pytest.raises(
        ArchitectureError, match=r"missing from the checkpoint: encoder\.layer\.1\.output\.dense\.bias"
    ):
        Model.open(folder)


def test_a_config_with_more_blocks_than_the_weights_is_refused(folder):
    with pytest.raises(ArchitectureError, match=r"missing from the checkpoint: encoder\.layer\.3\."):
        Model.open(configure(folder, num_hidden_layers=4))


def test_a_config_with_fewer_blocks_than_the_weights_is_refused(folder):
    with pytest.raises(ArchitectureError, match=r"the table does not know: encoder\.layer\.2\."):
        Model.open(configure(folder, num_hidden_layers=2))


def test_a_wrong_shape_is_refused_with_the_layout(folder):
    rewrite(folder, lambda state: state.update({"pooler.dense.weight": torch.zeros(24, 25)}))
    with pytest.raises(
        LayoutError,
        match=r"pooler\.dense\.weight of shape \(24, 25\) does not fit its layout 'pool <- layer\.3\.x'",
    ):
        Model.open(folder)


def test_two_names_of_one_tensor_are_refused(folder):
    rewrite(folder, lambda state: state.update({"bert.pooler.dense.weight": torch.zeros(24, 24)}))
    with pytest.raises(ArchitectureError, match="are two names of one tensor, and the checkpoint has both"):
        Model.open(folder)


def test_ties_that_are_not_equal_are_refused(made, tmp_path):
    state = load_file(made("gpt2") / "model.safetensors")
    state["lm_head.weight"] = state["transformer.wte.weight"] + 1
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made("gpt2") / "config.json").read_text())
    with pytest.raises(ArchitectureError, match=r"ties lm_head\.weight to transformer\.wte\.weight, but"):
        Model.open(tmp_path)


TIED = """
whisper-generation gemma gemma2 gemma3 starcoder2 opt bloom falcon-7b roberta-masked distilbert-masked
electra-wide mpnet-masked modernbert-masked albert-pretraining nomic-bert-masked bert-pretraining gpt2
mistral-tied mixtral-tied ernie4_5 smollm3 cohere cohere2 gte jina llava-siglip mistral3 paligemma
gemma3-vision smolvlm qwen2_5_vl
"""


@pytest.mark.parametrize("case", often(TIED.split(), ["gemma", "bloom", "roberta-masked"]))
def test_the_library_loads_a_model_that_was_untied(case, made, tmp_path):
    """With both matrices, under the same names and axes."""
    model = Model.open(made(case))
    untied = model.untied()
    assert untied.architecture.digest() == model.architecture.digest()
    assert untied.fingerprint == model.fingerprint
    state = {name: model.checkpoint.read(name).clone() for name in model.checkpoint.tensors}
    state |= {head: 1.3 * model.read(first) for head, first in model.ties.items()}
    shutil.copytree(made(case), tmp_path / "untied", ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(state, tmp_path / "untied" / "model.safetensors", {"format": "pt"})
    config = untied_config(untied, model.checkpoint.config)
    (tmp_path / "untied" / "config.json").write_text(json.dumps(config))
    module = build(Model.open(tmp_path / "untied"), torch.float32)
    naming = Naming(model.family, live=True)
    live = {naming.canonical(name): one for name, one in module.named_parameters(remove_duplicate=False)}
    for head, first in model.ties.items():
        assert torch.equal(live[head], 1.3 * model.read(first))
        assert torch.equal(live[first], model.read(first))


def test_norms_called_gamma_and_beta_are_weight_and_bias(folder):
    known = Model.open(folder).fingerprint

    def rename(state):
        for name in [n for n in state if "LayerNorm" in n]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            state[old] = state.pop(name)

    assert Model.open(rewrite(folder, rename)).fingerprint == known


def test_buffers_that_older_releases_stored_are_known_and_kept(made, tmp_path):
    state = load_file(made("gpt2") / "model.safetensors")
    for i in range(3):
        state[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 13, 13)
        state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made("gpt2") / "config.json").read_text())
    model = Model.open(tmp_path)
    assert len(model.architecture.buffers) == 6
    assert model.fingerprint == Model.open(made("gpt2")).fingerprint
