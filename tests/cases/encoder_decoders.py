"""Encoders with decoders."""

from __future__ import annotations

from functools import partial
from typing import Any

from making import Case, case, transformers_model

QUESTIONS = {"num_labels": 2}
T5 = {
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 20,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 31,
    "decoder_start_token_id": 0,
    "num_labels": 7,
}
BART = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_layers": 3,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 22,
    "vocab_size": 31,
    "max_position_embeddings": 13,
    "num_labels": 7,
}
MARIAN = {**BART, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
GATED = {**T5, "feed_forward_proj": "gated-gelu"}


def _with_a_matrix_of_its_own(model_class: str, config_class: str, **settings: Any) -> Any:
    """The library ties the two matrices of words unless a file has both."""
    from torch import nn

    model = transformers_model(model_class, config_class, **settings)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


CASES = (
    case("t5", "t5", "T5Model", "T5Config", T5),
    case("t5-generation", "t5", "T5ForConditionalGeneration", "T5Config", T5),
    case("t5-gated", "t5", "T5ForConditionalGeneration", "T5Config", GATED),
    case("t5-still-tied", "t5", "T5ForConditionalGeneration", "T5Config", GATED, tie_word_embeddings=False),
    Case("t5-untied", partial(_with_a_matrix_of_its_own, "T5ForConditionalGeneration", "T5Config", **GATED, tie_word_embeddings=False), "t5"),
    case("t5-classifier", "t5", "T5ForSequenceClassification", "T5Config", T5),
    case("t5-questions", "t5", "T5ForQuestionAnswering", "T5Config", T5, **QUESTIONS),
    case("t5-encoder", "t5", "T5EncoderModel", "T5Config", T5),
    case("t5-tokens", "t5", "T5ForTokenClassification", "T5Config", T5),
    case("mt5", "t5", "MT5ForConditionalGeneration", "MT5Config", GATED),
    case("umt5", "t5", "UMT5ForConditionalGeneration", "UMT5Config", GATED),
    case("umt5-encoder", "t5", "UMT5EncoderModel", "UMT5Config", GATED),
    case("umt5-classifier", "t5", "UMT5ForSequenceClassification", "UMT5Config", GATED),
    case("bart", "bart", "BartModel", "BartConfig", BART),
    case("bart-generation", "bart", "BartForConditionalGeneration", "BartConfig", BART),
    case("bart-classifier", "bart", "BartForSequenceClassification", "BartConfig", BART),
    case("bart-questions", "bart", "BartForQuestionAnswering", "BartConfig", BART, **QUESTIONS),
    case("mbart", "mbart", "MBartModel", "MBartConfig", BART),
    case("mbart-generation", "mbart", "MBartForConditionalGeneration", "MBartConfig", BART),
    case("mbart-classifier", "mbart", "MBartForSequenceClassification", "MBartConfig", BART),
    case("mbart-questions", "mbart", "MBartForQuestionAnswering", "MBartConfig", BART, **QUESTIONS),
    case("marian", "marian", "MarianMTModel", "MarianConfig", MARIAN),
)  # fmt: skip
