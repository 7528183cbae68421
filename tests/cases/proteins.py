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

CASES = (
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
