"""Encoders of text."""

from __future__ import annotations

from making import case

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
)  # fmt: skip
