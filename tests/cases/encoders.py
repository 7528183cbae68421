"""Encoders of text, alone and with decoders."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from making import Case, case, transformers_model

ENCODER = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 31,
    "max_position_embeddings": 19,
    "num_labels": 7,
}
QUESTIONS = {"num_labels": 2}
ROBERTA = {**ENCODER, "type_vocab_size": 3}
DISTILBERT = {
    "dim": 24,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 20,
    "vocab_size": 31,
    "max_position_embeddings": 13,
    "num_labels": 7,
}
ELECTRA = {**ENCODER, "type_vocab_size": 3, "embedding_size": 10}
MPNET = {**ENCODER, "relative_attention_num_buckets": 32}
MODERNBERT = {
    **ENCODER,
    "num_hidden_layers": 4,
    "local_attention": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
ALBERT = {**ENCODER, "type_vocab_size": 3, "embedding_size": 10}
DEBERTA_3 = {
    **ENCODER,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 8,
    "position_biased_input": False,
}
DEBERTA_2 = {
    **ENCODER,
    "type_vocab_size": 3,
    "embedding_size": 10,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "conv_kernel_size": 3,
    "conv_act": "gelu",
}
NOMIC = {**ENCODER, "type_vocab_size": 3}
T5 = {
    "d_model": 24,
    "d_kv": 9,
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


def _keep_as_published(model: Any, folder: Path) -> None:
    """With the configuration that was usual before transformers 5."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    config.pop("scale_decoder_outputs", None)
    (folder / "config.json").write_text(json.dumps(config))


def _untied(name: str, model_class: str, config_class: str, **settings: Any) -> Case:
    make = partial(_with_a_matrix_of_its_own, model_class, config_class, **GATED, **settings)
    return Case(name, make, "t5", _keep_as_published)


CASES = (
    case("roberta", "roberta", "RobertaModel", "RobertaConfig", ROBERTA),
    case("roberta-masked", "roberta", "RobertaForMaskedLM", "RobertaConfig", ROBERTA),
    case("roberta-untied", "roberta", "RobertaForMaskedLM", "RobertaConfig", ROBERTA, tie_word_embeddings=False),
    case("roberta-classifier", "roberta", "RobertaForSequenceClassification", "RobertaConfig", ROBERTA),
    case("roberta-tokens", "roberta", "RobertaForTokenClassification", "RobertaConfig", ROBERTA),
    case("roberta-questions", "roberta", "RobertaForQuestionAnswering", "RobertaConfig", ROBERTA, **QUESTIONS),
    case("xlm-roberta", "roberta", "XLMRobertaForMaskedLM", "XLMRobertaConfig", ROBERTA),
    case("camembert", "roberta", "CamembertForMaskedLM", "CamembertConfig", ROBERTA),
    case("distilbert", "distilbert", "DistilBertModel", "DistilBertConfig", DISTILBERT),
    case("distilbert-masked", "distilbert", "DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT),
    case("distilbert-untied", "distilbert", "DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT, tie_word_embeddings=False),
    case("distilbert-classifier", "distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", DISTILBERT),
    case("distilbert-tokens", "distilbert", "DistilBertForTokenClassification", "DistilBertConfig", DISTILBERT),
    case("distilbert-questions", "distilbert", "DistilBertForQuestionAnswering", "DistilBertConfig", DISTILBERT, **QUESTIONS),
    case("electra", "electra", "ElectraModel", "ElectraConfig", ELECTRA),
    case("electra-wide", "electra", "ElectraForMaskedLM", "ElectraConfig", ELECTRA, embedding_size=24),
    case("electra-discriminator", "electra", "ElectraForPreTraining", "ElectraConfig", ELECTRA),
    case("electra-generator", "electra", "ElectraForMaskedLM", "ElectraConfig", ELECTRA),
    case("electra-untied", "electra", "ElectraForMaskedLM", "ElectraConfig", ELECTRA, tie_word_embeddings=False),
    case("electra-classifier", "electra", "ElectraForSequenceClassification", "ElectraConfig", ELECTRA),
    case("electra-tokens", "electra", "ElectraForTokenClassification", "ElectraConfig", ELECTRA),
    case("electra-questions", "electra", "ElectraForQuestionAnswering", "ElectraConfig", ELECTRA, **QUESTIONS),
    case("mpnet", "mpnet", "MPNetModel", "MPNetConfig", MPNET),
    case("mpnet-masked", "mpnet", "MPNetForMaskedLM", "MPNetConfig", MPNET),
    case("mpnet-untied", "mpnet", "MPNetForMaskedLM", "MPNetConfig", MPNET, tie_word_embeddings=False),
    case("mpnet-classifier", "mpnet", "MPNetForSequenceClassification", "MPNetConfig", MPNET),
    case("mpnet-tokens", "mpnet", "MPNetForTokenClassification", "MPNetConfig", MPNET),
    case("mpnet-questions", "mpnet", "MPNetForQuestionAnswering", "MPNetConfig", MPNET, **QUESTIONS),
    case("modernbert", "modernbert", "ModernBertModel", "ModernBertConfig", MODERNBERT),
    case("modernbert-masked", "modernbert", "ModernBertForMaskedLM", "ModernBertConfig", MODERNBERT),
    case("modernbert-biased", "modernbert", "ModernBertForMaskedLM", "ModernBertConfig", MODERNBERT, **BIASES),
    case("modernbert-untied", "modernbert", "ModernBertForMaskedLM", "ModernBertConfig", MODERNBERT, tie_word_embeddings=False),
    case("modernbert-classifier", "modernbert", "ModernBertForSequenceClassification", "ModernBertConfig", MODERNBERT),
    case("modernbert-tokens", "modernbert", "ModernBertForTokenClassification", "ModernBertConfig", MODERNBERT),
    case("modernbert-questions", "modernbert", "ModernBertForQuestionAnswering", "ModernBertConfig", MODERNBERT, **QUESTIONS),
    case("albert", "albert", "AlbertModel", "AlbertConfig", ALBERT),
    case("albert-pretraining", "albert", "AlbertForPreTraining", "AlbertConfig", ALBERT),
    case("albert-masked", "albert", "AlbertForMaskedLM", "AlbertConfig", ALBERT),
    case("albert-untied", "albert", "AlbertForMaskedLM", "AlbertConfig", ALBERT, tie_word_embeddings=False),
    case("albert-classifier", "albert", "AlbertForSequenceClassification", "AlbertConfig", ALBERT),
    case("albert-tokens", "albert", "AlbertForTokenClassification", "AlbertConfig", ALBERT),
    case("albert-questions", "albert", "AlbertForQuestionAnswering", "AlbertConfig", ALBERT, **QUESTIONS),
    case("deberta", "deberta", "DebertaV2Model", "DebertaV2Config", DEBERTA_3),
    case("deberta-masked", "deberta", "DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA_3, legacy=False),
    case("deberta-legacy", "deberta", "DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA_3),
    case("deberta-untied", "deberta", "DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA_3, tie_word_embeddings=False),
    case("deberta-classifier", "deberta", "DebertaV2ForSequenceClassification", "DebertaV2Config", DEBERTA_3),
    case("deberta-tokens", "deberta", "DebertaV2ForTokenClassification", "DebertaV2Config", DEBERTA_3),
    case("deberta-questions", "deberta", "DebertaV2ForQuestionAnswering", "DebertaV2Config", DEBERTA_3, **QUESTIONS),
    case("deberta-convolution", "deberta", "DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA_2),
    case("deberta-shared-convolution", "deberta", "DebertaV2Model", "DebertaV2Config", DEBERTA_2, share_att_key=True),
    case("deberta-absolute", "deberta", "DebertaV2Model", "DebertaV2Config", {**ENCODER, "type_vocab_size": 3}),
    case("nomic-bert", "nomic_bert", "NomicBertModel", "NomicBertConfig", NOMIC),
    case("nomic-bert-masked", "nomic_bert", "NomicBertForMaskedLM", "NomicBertConfig", NOMIC),
    case("nomic-bert-classifier", "nomic_bert", "NomicBertForSequenceClassification", "NomicBertConfig", NOMIC),
    case("nomic-bert-tokens", "nomic_bert", "NomicBertForTokenClassification", "NomicBertConfig", NOMIC),
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
    _untied("t5-untied-as-published", "T5ForConditionalGeneration", "T5Config", tie_word_embeddings=False),
    _untied("mt5-untied", "MT5ForConditionalGeneration", "MT5Config"),
    _untied("umt5-untied", "UMT5ForConditionalGeneration", "UMT5Config"),
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
