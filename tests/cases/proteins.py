"""Models of proteins."""

from __future__ import annotations

from making import case

ESM = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 31,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "mask_token_id": 30,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "num_labels": 7,
}
ESMC = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 31,
    "max_position_embeddings": 40,
    "mask_token_id": 30,
    "num_labels": 7,
}
PROT_T5 = {
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 28,
    "num_layers": 3,
    "num_heads": 4,
    "vocab_size": 31,
    "feed_forward_proj": "relu",
    "is_encoder_decoder": True,
    "tie_word_embeddings": False,
}
"""ProtT5, of which the encoder is released alone: heads have more units together than the stream."""

CASES = (
    case("esmc", "esmc", "EsmcForMaskedLM", "EsmcConfig", ESMC),
    case("esmc-base", "esmc", "EsmcModel", "EsmcConfig", ESMC),
    case("esmc-classifier", "esmc", "EsmcForSequenceClassification", "EsmcConfig", ESMC),
    case("esmc-tokens", "esmc", "EsmcForTokenClassification", "EsmcConfig", ESMC, attention_bias=True),
    case("prot-t5", "t5", "T5EncoderModel", "T5Config", PROT_T5),
    case("prot-t5-tokens", "t5", "T5ForTokenClassification", "T5Config", PROT_T5, num_labels=7),
    case("esm", "esm", "EsmModel", "EsmConfig", ESM),
    case("esm-masked", "esm", "EsmForMaskedLM", "EsmConfig", ESM),
    case(
        "esm-absolute",
        "esm",
        "EsmForMaskedLM",
        "EsmConfig",
        ESM,
        position_embedding_type="absolute",
        emb_layer_norm_before=True,
        tie_word_embeddings=False,
    ),
    case("esm-classifier", "esm", "EsmForSequenceClassification", "EsmConfig", ESM),
    case("esm-tokens", "esm", "EsmForTokenClassification", "EsmConfig", ESM),
)
