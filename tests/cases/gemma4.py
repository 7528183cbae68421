"""Gemma 4."""

from __future__ import annotations

from functools import partial
from typing import Any

from cases.decoders import BASE
from making import Case, case, transformers_model

KINDS = ["sliding_attention", "full_attention"]
TEXT = {
    **BASE,
    "num_hidden_layers": 6,
    "layer_types": KINDS * 3,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 5,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 31,
    "use_double_wide_mlp": True,
}
LARGE = {
    **TEXT,
    "num_hidden_layers": 3,
    "layer_types": [*KINDS, "full_attention"],
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 3,
}

VISION = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 4,
    "standardize": True,
}
LIMITED = {**VISION, "use_clipped_linears": True, "standardize": False}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [12, 5],
    "attention_chunk_size": 3,
    "attention_context_left": 4,
    "output_proj_dims": 14,
}
TOKENS = {"image_token_id": 5, "video_token_id": 6, "audio_token_id": 7}
SEEING = {**TOKENS, "pad_token_id": 0}


def limited(settings: dict[str, Any]) -> Any:
    """A model whose linear maps of towers have limits that single numbers reach."""
    model = transformers_model("Gemma4ForConditionalGeneration", "Gemma4Config", **settings)
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(-0.8 if name.endswith("_min") else 0.7)
    return model


CASES = (
    case(
        "gemma4-vision",
        "gemma4-vision",
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        {"text_config": LARGE, "vision_config": VISION},
        **SEEING,
    ),
    Case(
        "gemma4-hearing",
        partial(limited, {"text_config": TEXT, "vision_config": LIMITED, "audio_config": AUDIO, **SEEING}),
        "gemma4-vision",
    ),
    case("gemma4", "gemma4", "Gemma4ForCausalLM", "Gemma4TextConfig", TEXT),
    case("gemma4-large", "gemma4", "Gemma4ForCausalLM", "Gemma4TextConfig", LARGE, tie_word_embeddings=False),
    case(
        "gemma4-experts",
        "gemma4",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        LARGE,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=3,
        moe_intermediate_size=14,
    ),
)
