"""Encoders of texts and images that came later."""

from __future__ import annotations

from cases.first import BERT, VIT
from making import case

MAE = {
    **{key: value for key, value in VIT.items() if key != "encoder_stride"},
    "decoder_hidden_size": 36,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 3,
    "decoder_intermediate_size": 22,
    "mask_ratio": 0.5,
}
SAM = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "mlp_dim": 20,
    "image_size": 32,
    "patch_size": 4,
    "window_size": 3,
    "global_attn_indexes": [1],
    "output_channels": 16,
    "num_pos_feats": 8,
}
PROMPTS = {"hidden_size": 16, "image_size": 32, "patch_size": 4, "mask_input_channels": 4}
MASKS = {
    "hidden_size": 16,
    "mlp_dim": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attention_downsample_rate": 2,
    "iou_head_hidden_dim": 10,
}

PIXTRAL = {key: VIT[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "patch_size")}
PIXTRAL |= {"num_attention_heads": 3, "image_size": 12}

CASES = (
    case("vit_mae", "vit_mae", "ViTMAEForPreTraining", "ViTMAEConfig", MAE),
    case("vit_mae-base", "vit_mae", "ViTMAEModel", "ViTMAEConfig", MAE),
    case(
        "sam",
        "sam",
        "SamModel",
        "SamConfig",
        {"vision_config": SAM, "prompt_encoder_config": PROMPTS, "mask_decoder_config": MASKS},
    ),
    case("pixtral", "pixtral", "PixtralVisionModel", "PixtralVisionConfig", PIXTRAL),
    case("sam-vision", "sam-vision", "SamVisionModel", "SamVisionConfig", SAM),
    case("gte", "gte", "GteForMaskedLM", "GteConfig", BERT),
    case("gte-classifier", "gte", "GteForSequenceClassification", "GteConfig", BERT),
    case("jina", "jina_embeddings_v3", "JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3Config", BERT),
    case("jina-base", "jina_embeddings_v3", "JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", BERT),
)
