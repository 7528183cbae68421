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

CHROMA = {
    **{key: value for key, value in FLUX.items() if key != "pooled_projection_dim"},
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 18,
    "approximator_layers": 2,
}
FLUX2 = {
    "in_channels": 7,
    "out_channels": 9,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 11,
    "timestep_guidance_channels": 14,
    "axes_dims_rope": [2, 2, 2, 2],
}
KREA2 = {
    "in_channels": 7,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 22,
    "timestep_embed_dim": 14,
    "text_hidden_dim": 24,
    "num_text_layers": 5,
    "text_num_attention_heads": 8,
    "text_num_key_value_heads": 4,
    "text_intermediate_size": 26,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 2,
    "axes_dims_rope": [2, 2, 4],
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
ANIMATE = {
    **{key: value for key, value in WAN.items() if key != "out_channels"},
    "patch_size": [1, 3, 2],
    "in_channels": 12,
    "latent_channels": 4,
    "motion_encoder_channel_sizes": {"4": 5, "8": 6, "16": 7},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 9,
    "face_encoder_hidden_dim": 13,
    "face_encoder_num_heads": 3,
    "inject_face_latents_blocks": 1,
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
QWEN21 = {
    "in_channels": 7,
    "out_channels": 9,
    "num_layers": 2,
    "attention_head_dim": 10,
    "num_attention_heads": 3,
    "context_in_dim": 11,
    "axes_dims_rope": [2, 4, 4],
}
LTX2 = {
    "in_channels": 7,
    "out_channels": 9,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "cross_attention_dim": 36,
    "audio_in_channels": 5,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 10,
    "audio_cross_attention_dim": 40,
    "num_layers": 2,
    "caption_channels": 11,
}
LTX23 = {
    **LTX2,
    "rope_type": "split",
    "audio_num_attention_heads": 3,
    "audio_attention_head_dim": 14,
    "audio_cross_attention_dim": 42,
    "use_prompt_embeddings": False,
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
}
HUNYUAN15 = {
    "in_channels": 7,
    "out_channels": 6,
    "num_attention_heads": 3,
    "attention_head_dim": 10,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "patch_size": 3,
    "patch_size_t": 2,
    "text_embed_dim": 11,
    "text_embed_2_dim": 9,
    "image_embed_dim": 8,
    "rope_axes_dim": [2, 4, 4],
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
    case("chroma", "chroma", "ChromaTransformer2DModel", CHROMA),
    case("flux2", "flux2", "Flux2Transformer2DModel", FLUX2),
    case("flux2-klein", "flux2", "Flux2Transformer2DModel", FLUX2, guidance_embeds=False),
    case("krea2", "krea2", "Krea2Transformer2DModel", KREA2),
    case("wan", "wan", "WanTransformer3DModel", WAN),
    case("wan-plain", "wan", "WanTransformer3DModel", WAN, cross_attn_norm=False),
    case("wan-first-and-last", "wan", "WanTransformer3DModel", WAN, **SEEING, pos_embed_seq_len=6),
    case("wan-image", "wan", "WanTransformer3DModel", WAN, **SEEING),
    case("wan-vace", "wan_vace", "WanVACETransformer3DModel", WAN, vace_layers=[0, 1], vace_in_channels=6),
    case(
        "wan-vace-image",
        "wan_vace",
        "WanVACETransformer3DModel",
        WAN,
        **SEEING,
        num_layers=3,
        vace_layers=[0, 2],
        vace_in_channels=6,
    ),
    case("wan-animate", "wan_animate", "WanAnimateTransformer3DModel", ANIMATE, **SEEING),
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
    case("qwen-image-2.1", "qwen_image21", "QwenImage21Transformer2DModel", QWEN21),
    case(
        "qwen-image-2.1-without-cause",
        "qwen_image21",
        "QwenImage21Transformer2DModel",
        QWEN21,
        causal_condition=False,
        patch_size=2,
    ),
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
    case("ltx2", "ltx2", "LTX2VideoTransformer3DModel", LTX2),
    case("ltx2.3", "ltx2", "LTX2VideoTransformer3DModel", LTX23),
    case(
        "ltx2.5",
        "ltx2",
        "LTX2VideoTransformer3DModel",
        LTX23,
        use_prompt_adaln_single=False,
        use_keyframes_abs_pos_embedding=True,
        ff_bias=False,
    ),
    case("hunyuan-video-1.5", "hunyuan_video15", "HunyuanVideo15Transformer3DModel", HUNYUAN15),
    case(
        "hunyuan-video-1.5-mean",
        "hunyuan_video15",
        "HunyuanVideo15Transformer3DModel",
        HUNYUAN15,
        use_meanflow=True,
    ),
    case("z-image", "z_image", "ZImageTransformer2DModel", Z_IMAGE),
    case("z-image-omni", "z_image", "ZImageTransformer2DModel", Z_IMAGE, siglip_feat_dim=9),
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
