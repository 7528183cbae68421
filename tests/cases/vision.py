"""Models that see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases.first import VIT
from making import Case, case

SIGLIP_TEXT = {
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 22,
    "vocab_size": 31,
    "max_position_embeddings": 13,
    "projection_size": 24,
}
SIGLIP = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "image_size": 12,
    "patch_size": 4,
}
SIGLIP_2 = {**SIGLIP, "num_patches": 9}

DINO = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "mlp_ratio": 2,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 7,
}

DINO_3 = {**VIT, "num_attention_heads": 3, "num_register_tokens": 2}

BEIT = {**VIT, "vocab_size": 31, "use_relative_position_bias": True}
BEIT_SHARED = {
    **VIT,
    "vocab_size": 31,
    "use_shared_relative_position_bias": True,
    "use_absolute_position_embeddings": True,
}

TIMM = {
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 4,
    "mlp_ratio": 0.84,
    "img_size": 12,
    "patch_size": 4,
    "num_classes": 7,
}

SWIN = {
    "embed_dim": 12,
    "depths": [2, 3],
    "num_heads": [2, 3],
    "window_size": 3,
    "mlp_ratio": 1.5,
    "image_size": 24,
    "patch_size": 4,
    "num_labels": 7,
    "encoder_stride": 2,
}


def siglip(name: str, family: str, model: str, config: str, vision: dict[str, Any]) -> Case:
    return case(
        name, family, model, config, {"vision_config": vision, "text_config": SIGLIP_TEXT, "num_labels": 7}
    )


def timm_vit(
    name: str, architecture: str = "vit_tiny_patch16_224", family: str = "timm-vit", **more: Any
) -> Case:
    arguments = {**TIMM, **more}

    def make() -> Any:
        import timm

        return timm.create_model(architecture, **arguments)

    def keep(model: Any, folder: Path) -> None:
        import timm

        timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)

    return Case(name, make, family, keep)


def timm_eva(name: str, architecture: str) -> Case:
    return timm_vit(name, architecture, "timm-eva", num_heads=3)


CONVNEXT = {"hidden_sizes": [6, 9, 13, 10], "depths": [1, 2, 1, 2], "image_size": 64}
SAM2 = {
    "vision_config": {
        "backbone_config": {
            "model_type": "sam2_hiera_det_model",
            "hidden_size": 12,
            "image_size": [64, 64],
            "blocks_per_stage": [1, 2, 1, 1],
            "embed_dim_per_stage": [12, 18, 20, 30],
            "num_attention_heads_per_stage": [3, 3, 4, 5],
            "window_size_per_stage": [4, 2, 2, 2],
            "global_attention_blocks": [2],
            "window_positional_embedding_background_size": [5, 5],
            "mlp_ratio": 1.5,
        },
        "backbone_channel_list": [30, 20, 18, 12],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": 24,
    },
    "prompt_encoder_config": {
        "hidden_size": 24,
        "image_size": 64,
        "patch_size": 16,
        "mask_input_channels": 8,
    },
    "mask_decoder_config": {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "mlp_dim": 22,
        "iou_head_hidden_dim": 10,
    },
}
_DETR = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 22, "num_layers": 2}
SAM3 = {
    "vision_config": {
        "backbone_config": {
            "model_type": "sam3_vit_model",
            "hidden_size": 36,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "intermediate_size": 20,
            "image_size": 32,
            "patch_size": 4,
            "window_size": 4,
            "global_attn_indexes": [1],
            "pretrain_image_size": 16,
        },
        "fpn_hidden_size": 24,
    },
    "text_config": {
        "model_type": "clip_text_model",
        "hidden_size": 18,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 26,
        "vocab_size": 31,
        "max_position_embeddings": 64,
        "projection_dim": 14,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "geometry_encoder_config": {**_DETR, "roi_size": 2},
    "detr_encoder_config": _DETR,
    "detr_decoder_config": {**_DETR, "num_queries": 5},
    "mask_decoder_config": {"hidden_size": 24, "num_attention_heads": 4},
}
CASES = (
    timm_eva("timm-eva02", "eva02_base_patch14_224"),
    timm_eva("timm-eva02-clip", "eva02_base_patch16_clip_224"),
    timm_eva("timm-eva02-tiny", "eva02_tiny_patch14_224"),
    timm_eva("timm-eva-giant", "eva_giant_patch14_224"),
    case("deit", "deit", "DeiTModel", "DeiTConfig", VIT),
    case("deit-classifier", "deit", "DeiTForImageClassification", "DeiTConfig", VIT),
    case("deit-teacher", "deit", "DeiTForImageClassificationWithTeacher", "DeiTConfig", VIT),
    case("deit-masked", "deit", "DeiTForMaskedImageModeling", "DeiTConfig", {**VIT, "patch_size": 2}),
    siglip("siglip", "siglip", "SiglipModel", "SiglipConfig", SIGLIP),
    siglip("siglip-classifier", "siglip", "SiglipForImageClassification", "SiglipConfig", SIGLIP),
    case("siglip-vision", "siglip-vision", "SiglipVisionModel", "SiglipVisionConfig", SIGLIP),
    case(
        "siglip-vision-headless",
        "siglip-vision",
        "SiglipVisionModel",
        "SiglipVisionConfig",
        SIGLIP,
        vision_use_head=False,
    ),
    case("siglip-text", "siglip-text", "SiglipTextModel", "SiglipTextConfig", SIGLIP_TEXT),
    siglip("siglip2", "siglip2", "Siglip2Model", "Siglip2Config", SIGLIP_2),
    siglip("siglip2-classifier", "siglip2", "Siglip2ForImageClassification", "Siglip2Config", SIGLIP_2),
    case("siglip2-vision", "siglip2-vision", "Siglip2VisionModel", "Siglip2VisionConfig", SIGLIP_2),
    case("siglip2-text", "siglip-text", "Siglip2TextModel", "Siglip2TextConfig", SIGLIP_TEXT),
    case("dinov2", "dinov2", "Dinov2Model", "Dinov2Config", DINO),
    case("dinov2-gated", "dinov2", "Dinov2Model", "Dinov2Config", DINO, use_swiglu_ffn=True),
    case("dinov2-classifier", "dinov2", "Dinov2ForImageClassification", "Dinov2Config", DINO),
    case("dinov2-registers", "dinov2", "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", DINO),
    case(
        "dinov2-registers-classifier",
        "dinov2",
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        DINO,
        use_swiglu_ffn=True,
    ),
    case("dinov3", "dinov3", "DINOv3ViTModel", "DINOv3ViTConfig", DINO_3),
    case(
        "dinov3-gated",
        "dinov3",
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        DINO_3,
        use_gated_mlp=True,
        key_bias=True,
    ),
    case("dinov3-convnext", "dinov3_convnext", "DINOv3ConvNextModel", "DINOv3ConvNextConfig", CONVNEXT),
    case("sam2", "sam2", "Sam2Model", "Sam2Config", SAM2),
    case("sam3", "sam3", "Sam3Model", "Sam3Config", SAM3),
    case("beit", "beit", "BeitModel", "BeitConfig", BEIT, use_mask_token=True),
    case("beit-shared", "beit", "BeitModel", "BeitConfig", BEIT_SHARED, use_mean_pooling=False),
    case("beit-masked", "beit", "BeitForMaskedImageModeling", "BeitConfig", BEIT_SHARED),
    case("beit-classifier", "beit", "BeitForImageClassification", "BeitConfig", BEIT),
    case(
        "beit-unscaled", "beit", "BeitForImageClassification", "BeitConfig", BEIT, layer_scale_init_value=0.0
    ),
    case("data2vec-vision", "beit", "Data2VecVisionForImageClassification", "Data2VecVisionConfig", BEIT),
    timm_vit("timm-vit"),
    timm_vit("timm-vit-scaled", qkv_bias=False, init_values=0.1, qk_norm=True, pre_norm=True),
    timm_vit("timm-vit-bare", class_token=False, global_pool="avg", num_classes=0, reg_tokens=2),
    timm_vit("timm-vit-pooling", class_token=False, global_pool="map"),
    timm_vit("timm-vit-pooled", class_token=False, global_pool="map", num_classes=0),
    timm_vit("timm-vit-normed", scale_attn_norm=True, scale_mlp_norm=True),
    timm_vit("timm-vit-gated", "vit_giant_patch14_dinov2", num_classes=7, mlp_ratio=1.67),
    timm_vit("timm-deit", "deit_tiny_distilled_patch16_224"),
    case("swin", "swin", "SwinModel", "SwinConfig", SWIN, use_absolute_embeddings=True),
    case("swin-classifier", "swin", "SwinForImageClassification", "SwinConfig", SWIN),
    case("swin-masked", "swin", "SwinForMaskedImageModeling", "SwinConfig", SWIN),
    case("swinv2", "swinv2", "Swinv2Model", "Swinv2Config", SWIN),
    case("swinv2-classifier", "swinv2", "Swinv2ForImageClassification", "Swinv2Config", SWIN),
    case("swinv2-masked", "swinv2", "Swinv2ForMaskedImageModeling", "Swinv2Config", SWIN),
)
