"""Models that see and read."""

from __future__ import annotations

from typing import Any

from cases.decoders import YARN
from cases.hybrid import DELTA, DELTA_MOE
from making import Case, case

CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "image_size": 12,
    "patch_size": 4,
}
PIXTRAL = {**CLIP, "model_type": "pixtral", "num_attention_heads": 3, "image_size": 16}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
TEXT = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 28,
    "vocab_size": 31,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def text(model_type: str, **more: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": model_type, **more}


def seeing(name: str, family: str, model: str, vision: Any, text: Any, **more: Any) -> Case:
    config = model.replace("ForConditionalGeneration", "Config").replace("Model", "Config")
    return case(name, family, model, config, {"vision_config": vision, "text_config": text}, **more)


IDEFICS = {key: CLIP[key] for key in CLIP if key != "model_type"} | {"image_size": 16}
QWEN = {
    "depth": 3,
    "num_heads": 3,
    "hidden_size": 24,
    "intermediate_size": 20,
    "out_hidden_size": 36,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MROPE = {key: TEXT[key] for key in TEXT if key != "head_dim"} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 36,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 3, 2]},
}
MROPE_3 = {
    **TEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
}
M_ROPE_IN_PART = {**DELTA["rope_parameters"], "mrope_section": [1, 1, 1]}
HYBRID = {**DELTA, "max_position_embeddings": 64, "rope_parameters": M_ROPE_IN_PART}
HYBRID_MOE = {**DELTA_MOE, **HYBRID}
QWEN_TOKENS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}


LLAVA = "LlavaForConditionalGeneration"
IMAGE = {"image_token_index": 5}

QWEN2 = {**QWEN, "embed_dim": 24, "mlp_ratio": 2, "hidden_size": 36}
PALIGEMMA = {"model_type": "paligemma", "projection_dim": 36, **IMAGE}
COLQWEN = {"model_type": "qwen2_vl", **QWEN_TOKENS}
LLAMA4 = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 16,
    "patch_size": 4,
    "pixel_shuffle_ratio": 0.5,
    "vision_output_dim": 22,
    "projector_input_dim": 22,
    "projector_output_dim": 22,
}

GRID = {"image_grid_pinpoints": [[12, 24], [12, 12]], **IMAGE}
INTERNVL = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "image_size": [16, 16],
    "patch_size": [4, 4],
}
CASES = (
    seeing("llava-next", "llava_next", "LlavaNextForConditionalGeneration", CLIP, text("mistral"), **GRID),
    seeing(
        "llava-onevision",
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        SIGLIP,
        text("qwen2"),
        video_token_index=6,
        **GRID,
    ),
    case("internvl-vision", "internvl_vision", "InternVLVisionModel", "InternVLVisionConfig", INTERNVL),
    case(
        "internvl-vision-normed",
        "internvl_vision",
        "InternVLVisionModel",
        "InternVLVisionConfig",
        INTERNVL,
        use_qk_norm=True,
        use_mean_pooling=False,
        norm_type="rms_norm",
        attention_bias=True,
        use_mask_token=True,
    ),
    seeing(
        "internvl",
        "internvl",
        "InternVLForConditionalGeneration",
        {**INTERNVL, "model_type": "internvl_vision"},
        text("qwen2"),
        image_token_id=5,
        tie_word_embeddings=False,
    ),
    seeing(
        "internvl-tied",
        "internvl",
        "InternVLModel",
        {**INTERNVL, "model_type": "internvl_vision"},
        text("qwen3"),
        image_token_id=5,
    ),
    seeing(
        "llama4-vision",
        "llama4-vision",
        "Llama4ForConditionalGeneration",
        LLAMA4,
        {
            **TEXT,
            "intermediate_size_mlp": 20,
            "num_local_experts": 5,
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
        },
        **IMAGE,
    ),
    seeing("llava", "llava", LLAVA, CLIP, text("llama"), **IMAGE),
    seeing(
        "llava-siglip",
        "llava",
        LLAVA,
        SIGLIP,
        text("qwen2", tie_word_embeddings=True),
        vision_feature_select_strategy="full",
        vision_feature_layer=[-1, 1],
        **IMAGE,
    ),
    seeing(
        "llava-pixtral",
        "llava",
        LLAVA,
        PIXTRAL,
        text("mistral"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        **IMAGE,
    ),
    seeing(
        "mistral3",
        "mistral3",
        "Mistral3ForConditionalGeneration",
        PIXTRAL,
        text("mistral"),
        spatial_merge_size=2,
        **IMAGE,
    ),
    seeing(
        "mistral3-ministral3",
        "mistral3",
        "Mistral3ForConditionalGeneration",
        PIXTRAL,
        text("ministral3", rope_parameters=YARN),
        spatial_merge_size=2,
        tie_word_embeddings=True,
        **IMAGE,
    ),
    case(
        "colpali",
        "colpali",
        "ColPaliForRetrieval",
        "ColPaliConfig",
        {"vlm_config": {**PALIGEMMA, "vision_config": SIGLIP, "text_config": text("gemma")}},
        embedding_dim=11,
    ),
    case(
        "colqwen2",
        "colqwen2",
        "ColQwen2ForRetrieval",
        "ColQwen2Config",
        {"vlm_config": {**COLQWEN, "vision_config": QWEN2, "text_config": MROPE}},
        embedding_dim=11,
    ),
    seeing("llava-base", "llava", "LlavaModel", CLIP, text("mistral"), **IMAGE),
    seeing(
        "paligemma",
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        SIGLIP,
        text("gemma"),
        projection_dim=36,
        **IMAGE,
    ),
    seeing(
        "paligemma2",
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        SIGLIP,
        text("gemma2"),
        projection_dim=36,
        **IMAGE,
    ),
    seeing(
        "gemma3-vision",
        "gemma3-vision",
        "Gemma3ForConditionalGeneration",
        SIGLIP,
        text("gemma3_text"),
        mm_tokens_per_image=9,
        **IMAGE,
    ),
    seeing(
        "idefics3",
        "idefics3",
        "Idefics3ForConditionalGeneration",
        IDEFICS,
        text("llama"),
        image_token_id=5,
        scale_factor=2,
    ),
    seeing(
        "smolvlm",
        "idefics3",
        "SmolVLMForConditionalGeneration",
        IDEFICS,
        text("llama"),
        image_token_id=5,
        scale_factor=2,
        tie_word_embeddings=True,
    ),
    seeing(
        "qwen2_vl",
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        QWEN2,
        MROPE,
        **QWEN_TOKENS,
    ),
    seeing(
        "qwen2_5_vl",
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {**QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
        MROPE,
        tie_word_embeddings=True,
        **QWEN_TOKENS,
    ),
    seeing(
        "qwen3_5-vision",
        "qwen3_5-vision",
        "Qwen3_5ForConditionalGeneration",
        {**QWEN, "num_position_embeddings": 16},
        HYBRID,
        **QWEN_TOKENS,
    ),
    seeing(
        "qwen3_5_moe-vision",
        "qwen3_5_moe-vision",
        "Qwen3_5MoeForConditionalGeneration",
        {**QWEN, "num_position_embeddings": 16},
        HYBRID_MOE,
        tie_word_embeddings=True,
        **QWEN_TOKENS,
    ),
    seeing(
        "qwen3_vl",
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        MROPE_3,
        **QWEN_TOKENS,
    ),
)
