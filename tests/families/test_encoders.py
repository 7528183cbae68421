"""Encoders that are named alike: what tells them apart when there is no configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from small_models import Case, transformers_model
from transfusion.errors import ArchitectureError
from transfusion.model.model import Model

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 31,
}

T5 = {"d_model": 128, "d_kv": 20, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 5}
BART = {
    "d_model": 128,
    **{f"{stack}_layers": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_ffn_dim": 96 for stack in ("encoder", "decoder")},
    "vocab_size": 31,
}


def alone(folder: Path, model: str, **settings: object) -> tuple[Model, Path]:
    """A model with its configuration, and the file of its weights without."""
    config = model.partition("For")[0].removesuffix("Model").removesuffix("MT") + "Config"
    made = Case("", partial(transformers_model, model, config, **settings), "")
    known = Model.open(made.save(folder / "model", 1))
    return known, (folder / "model" / "model.safetensors").rename(folder / "alone.safetensors")


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("BertModel", SIZES),
        ("RobertaModel", {**SIZES, "type_vocab_size": 1}),
        ("RobertaForMaskedLM", {**SIZES, "type_vocab_size": 1}),
        ("XLMRobertaForSequenceClassification", {**SIZES, "type_vocab_size": 1}),
        ("DistilBertForMaskedLM", {"dim": 128, "n_layers": 2, "n_heads": 2, "hidden_dim": 96}),
        ("ElectraModel", {**SIZES, "embedding_size": 48}),
        ("ElectraForPreTraining", {**SIZES, "embedding_size": 128}),
        ("MPNetModel", SIZES),
        ("DebertaV2Model", {**SIZES, "relative_attention": True, "share_att_key": True}),
        ("DebertaV2ForMaskedLM", {**SIZES, "relative_attention": True, "pos_att_type": ["c2p"]}),
        ("NomicBertModel", SIZES),
        ("T5ForConditionalGeneration", {**T5, "vocab_size": 31}),
        ("UMT5ForConditionalGeneration", {**T5, "vocab_size": 31}),
        ("BartForConditionalGeneration", BART),
        ("MBartForSequenceClassification", BART),
        ("MarianMTModel", {**BART, "pad_token_id": 0, "decoder_start_token_id": 0}),
        ("ModernBertModel", {**SIZES, "pad_token_id": 0}),
    ],
)
def test_weights_alone_tell_everything_about_an_encoder_or_its_configuration_is_asked_for(
    model, settings, tmp_path
):
    known, weights = alone(tmp_path, model, **settings)
    if known.family.from_shapes is None:
        with pytest.raises(ArchitectureError, match="no configuration, and"):
            Model.open(weights)
        return
    found = Model.open(weights)
    assert found.family == known.family
    assert found.architecture.tensors == known.architecture.tensors
    assert found.architecture.spaces == known.architecture.spaces


def test_encoders_that_nothing_tells_apart_need_a_configuration(tmp_path):
    _, weights = alone(tmp_path, "ElectraModel", **SIZES, embedding_size=128)
    with pytest.raises(ArchitectureError, match="belong to several families: bert, electra"):
        Model.open(weights)
