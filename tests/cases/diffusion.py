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
QWEN = {
    "patch_size": 3,
    "in_channels": 7,
    "out_channels": 2,
    "num_layers": 2,
    "attention_head_dim": 10,
    "num_attention_heads": 3,
    "joint_attention_dim": 11,
    "axes_dims_rope": [2, 4, 4],
}
SD3 = {
    "sample_size": 12,
    "patch_size": 2,
    "in_channels": 5,
    "out_channels": 3,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 11,
    "caption_projection_dim": 24,
    "pooled_projection_dim": 13,
    "pos_embed_max_size": 7,
}
Z_IMAGE = {
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "in_channels": 5,
    "dim": 30,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 11,
    "axes_dims": [2, 4, 4],
    "axes_lens": [64, 32, 32],
}
SANA = {
    "in_channels": 5,
    "out_channels": 3,
    "num_attention_heads": 4,
    "attention_head_dim": 6,
    "num_layers": 2,
    "num_cross_attention_heads": 3,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 24,
    "caption_channels": 11,
    "mlp_ratio": 1.5,
    "patch_size": 2,
}
PIXART = {
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "in_channels": 5,
    "out_channels": 4,
    "num_layers": 2,
    "cross_attention_dim": 24,
    "sample_size": 12,
    "patch_size": 2,
    "caption_channels": 11,
}
UNET = {
    "in_channels": 5,
    "out_channels": 3,
    "block_out_channels": [12, 24],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 11,
    "norm_num_groups": 3,
    "attention_head_dim": 4,
}
XL = {
    "block_out_channels": [12, 24, 24],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 3],
    "attention_head_dim": [2, 4, 6],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 6,
    "projection_class_embeddings_input_dim": 46,
}


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
    case("qwen-image", "qwen_image", "QwenImageTransformer2DModel", QWEN),
    case(
        "qwen-image-layered",
        "qwen_image",
        "QwenImageTransformer2DModel",
        QWEN,
        use_additional_t_cond=True,
        use_layer3d_rope=True,
    ),
    case("qwen-image-edit", "qwen_image", "QwenImageTransformer2DModel", QWEN, zero_cond_t=True),
    case("sd3", "sd3", "SD3Transformer2DModel", SD3),
    case("sd3.5-large", "sd3", "SD3Transformer2DModel", SD3, qk_norm="rms_norm"),
    case(
        "sd3.5-medium",
        "sd3",
        "SD3Transformer2DModel",
        SD3,
        qk_norm="rms_norm",
        dual_attention_layers=[0, 1],
    ),
    case("z-image", "z_image", "ZImageTransformer2DModel", Z_IMAGE),
    case("z-image-videos", "z_image", "ZImageTransformer2DModel", Z_IMAGE, all_f_patch_size=[3]),
    case("sana", "sana", "SanaTransformer2DModel", SANA),
    case("sana-positions", "sana", "SanaTransformer2DModel", SANA, interpolation_scale=1, sample_size=8),
    case(
        "sana-sprint",
        "sana",
        "SanaTransformer2DModel",
        SANA,
        guidance_embeds=True,
        qk_norm="rms_norm_across_heads",
        attention_bias=True,
    ),
    case("pixart", "pixart", "PixArtTransformer2DModel", PIXART),
    case("pixart-told-sizes", "pixart", "PixArtTransformer2DModel", PIXART, use_additional_conditions=True),
    case("unet", "unet", "UNet2DConditionModel", UNET),
    case("unet-xl", "unet", "UNet2DConditionModel", {**UNET, **XL}),
    case("unet-lcm", "unet", "UNet2DConditionModel", UNET, time_cond_proj_dim=7),
)
