"""Diffusion transformers of diffusers."""

from __future__ import annotations

from functools import partial
from typing import Any

from making import Case

FLUX = {
    "in_channels": 7,
    "out_channels": 9,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 10,
    "num_attention_heads": 3,
    "joint_attention_dim": 11,
    "pooled_projection_dim": 13,
    "axes_dims_rope": [2, 4, 4],
}

WAN = {
    "patch_size": [2, 3, 2],
    "num_attention_heads": 3,
    "attention_head_dim": 10,
    "in_channels": 5,
    "out_channels": 4,
    "text_dim": 11,
    "freq_dim": 14,
    "ffn_dim": 22,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
SEEING = {"image_dim": 9, "added_kv_proj_dim": 30}


def diffusers_model(model_class: str, **settings: Any) -> Any:
    import diffusers

    return getattr(diffusers, model_class)(**settings)


def case(name: str, family: str, model: str, settings: dict[str, Any], **more: Any) -> Case:
    """A class of diffusers with a configuration."""
    return Case(name, partial(diffusers_model, model, **{**settings, **more}), family)


CASES = (
    case("flux", "flux", "FluxTransformer2DModel", FLUX, guidance_embeds=True),
    case("flux-schnell", "flux", "FluxTransformer2DModel", FLUX),
    case("wan", "wan", "WanTransformer3DModel", WAN),
    case("wan-plain", "wan", "WanTransformer3DModel", WAN, cross_attn_norm=False),
    case("wan-first-and-last", "wan", "WanTransformer3DModel", WAN, **SEEING, pos_embed_seq_len=6),
    case("wan-image", "wan", "WanTransformer3DModel", WAN, **SEEING),
)
