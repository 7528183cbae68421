"""Pairs of a whole encoder and a whole decoder, as people save and load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned, often
from transfusion.errors import ArchitectureError
from transfusion.model.model import Model
from transfusion.running.probes.inputs import in_dtype, random_inputs, run_model
from transfusion.transport.transport import transport

PAIRS = [
    name
    for name, case in CASES.items()
    if case.family in ("vision_pair", "text_pair", "speech_pair") and name != "trocr-computed"
]
"""All but the one that `from_pretrained` of transformers 5 leaves without the positions that it computes."""
OLD: dict[str, Any] = {
    "_name_or_path": "",
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "is_encoder_decoder": False,
    "length_penalty": 1.0,
    "max_length": 20,
    "num_beams": 1,
    "output_scores": False,
    "prefix": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "task_specific_params": None,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "torch_dtype": None,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
}
"""What transformers 4 wrote into every section."""


def changed(folder: Path, to: Path, change: dict[str, Any], **sections: dict[str, Any]) -> Path:
    """The same model with other settings, at the top and in sections."""
    config = json.loads((folder / "config.json").read_text()) | change
    for section, settings in sections.items():
        config[section] |= settings
    to.mkdir()
    save_file(load_file(folder / "model.safetensors"), to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("name", often(PAIRS, ["trocr", "bert2bert", "vit-gpt2", "wav2vec2-mbart"]))
def test_a_moved_fine_tune_says_what_it_said(name, shuffled, aligned, tmp_path):
    """B is A in another order, so the library must find in the moved fine-tune what it found in the original."""
    a, b = shuffled(name)
    tuned = finetuned(CASES[name], a, tmp_path / "tuned")
    moved = transport(tuned, base=a, onto=b, via=aligned(a, b, residual="tied")).save(tmp_path / "moved")
    model = Model.open(tuned)
    inputs = in_dtype(random_inputs(model.family, model.config), torch.float64)
    made_by = getattr(transformers, model.config["architectures"][0])
    said = [
        run_model(made_by.from_pretrained(folder, dtype=torch.float64).eval(), model.family, inputs)["logits"]
        for folder in (tuned, moved, b)
    ]
    assert torch.allclose(said[0], said[1], atol=1e-5, rtol=0)
    assert (said[0] - said[2]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["trocr-computed", "bert2bert", "vit-gpt2", "wav2vec2-mbart", "donut"])
def test_sections_may_have_what_transformers_4_wrote(name, made, tmp_path):
    encoder, decoder = {**OLD, "add_cross_attention": False, "is_decoder": False}, dict(OLD)
    del decoder["cross_attention_hidden_size"]
    old = changed(made(name), tmp_path / "old", {}, encoder=encoder, decoder=decoder)
    assert Model.open(old).architecture == Model.open(made(name)).architecture


@pytest.mark.parametrize(
    ("top", "sections", "message"),
    [
        ({"tie_encoder_decoder": True}, {}, "tie_encoder_decoder=True"),
        ({}, {"decoder": {"add_cross_attention": False}}, "decoder.add_cross_attention=False"),
        ({}, {"decoder": {"is_decoder": False}}, "decoder.is_decoder=False"),
        ({}, {"encoder": {"add_cross_attention": True}}, "encoder.add_cross_attention=True"),
        ({}, {"encoder": {"is_decoder": True}}, "encoder.is_decoder=True"),
        ({}, {"encoder": {"position_embedding_type": "relative_key"}}, "encoder.position_embedding_type"),
        ({}, {"encoder": {"model_type": "sphinx"}}, "encoder is of the kind 'sphinx'"),
        ({"decoder": 5}, {}, "decoder"),
    ],
)
def test_a_pair_with_other_settings_is_refused(top, sections, message, made, tmp_path):
    with pytest.raises(ArchitectureError, match=message):
        Model.open(changed(made("bert2bert"), tmp_path / "other", top, **sections))


def test_an_encoder_with_a_decoder_of_its_own_is_refused(made, tmp_path):
    bart = transformers.BartConfig().to_dict()
    with pytest.raises(ArchitectureError, match="a model that cannot be a part of it"):
        Model.open(changed(made("bert2bert"), tmp_path / "other", {"encoder": bart}))


def test_a_decoder_alone_is_refused(tmp_path):
    """Its keys and values would read nothing."""
    config = transformers.BertConfig(**{**CASES["bert"].make().config.to_dict(), "is_decoder": True})
    config.add_cross_attention = True
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "alone")
    with pytest.raises(ArchitectureError, match="add_cross_attention=True"):
        Model.open(tmp_path / "alone")


def test_both_vocabularies_keep_their_sizes(made):
    spaces = Model.open(made("bert2bert")).architecture.spaces
    assert (spaces["encoder_vocab"].size, spaces["vocab"].size) == (29, 31)
