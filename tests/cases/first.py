"""The first five families."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from making import Case, case

LAYERS = 3
VIT = {
    "hidden_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 3,
    "num_labels": 7,
    "encoder_stride": 2,
}
BERT = {
    "hidden_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 31,
    "max_position_embeddings": 13,
    "type_vocab_size": 3,
    "num_labels": 7,
}
GPT2 = {
    "n_embd": 24,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_inner": 20,
    "vocab_size": 31,
    "n_positions": 13,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_labels": 7,
}
LLAMA = {
    "hidden_size": 36,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "vocab_size": 31,
    "max_position_embeddings": 13,
    "pad_token_id": 0,
    "num_labels": 7,
}
CLIP_VISION = {
    "hidden_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "image_size": 12,
    "patch_size": 4,
    "projection_dim": 11,
}
CLIP_TEXT = {
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 22,
    "vocab_size": 31,
    "max_position_embeddings": 13,
    "bos_token_id": 1,
    "eos_token_id": 30,
    "projection_dim": 11,
}
OPEN_CLIP = {
    "embed_dim": 11,
    "vision_cfg": {
        "layers": LAYERS,
        "width": 24,
        "head_width": 6,
        "patch_size": 4,
        "image_size": 12,
        "mlp_ratio": 1.5,
    },
    "text_cfg": {
        "context_length": 13,
        "vocab_size": 31,
        "width": 15,
        "heads": 3,
        "layers": 2,
        "mlp_ratio": 1.2,
    },
}


def _clip(model_class: str) -> Any:
    import transformers

    config = transformers.CLIPConfig(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=11)
    return getattr(transformers, model_class)(config)


def _open_clip(config: dict[str, Any]) -> Any:
    import open_clip

    made_by = open_clip.CustomTextCLIP if config.get("custom_text") else open_clip.CLIP
    return made_by(**{key: value for key, value in config.items() if key != "custom_text"}, output_dict=False)


def _keep_open_clip(config: dict[str, Any], model: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors", {"format": "pt"})
    whole = {"model_cfg": config, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (folder / "open_clip_config.json").write_text(json.dumps(whole))


# A text tower of its own name, with a class token, a biased projection and LayerScale in both towers.
CUSTOM = {
    **OPEN_CLIP,
    "custom_text": True,
    "vision_cfg": {**OPEN_CLIP["vision_cfg"], "ls_init_value": 0.1, "pool_type": "avg"},
    "text_cfg": {
        **OPEN_CLIP["text_cfg"],
        "ls_init_value": 0.1,
        "embed_cls": True,
        "proj_bias": True,
        "no_causal_mask": True,
        "pool_type": "last",
    },
}


CASES = (
    case("vit", "vit", "ViTModel", "ViTConfig", VIT),
    case("vit-classifier", "vit", "ViTForImageClassification", "ViTConfig", VIT),
    case("vit-masked", "vit", "ViTForMaskedImageModeling", "ViTConfig", {**VIT, "patch_size": 2}),
    Case("clip", partial(_clip, "CLIPModel"), "clip"),
    Case("clip-classifier", partial(_clip, "CLIPForImageClassification"), "clip"),
    case("clip-vision", "clip-vision", "CLIPVisionModel", "CLIPVisionConfig", CLIP_VISION),
    case(
        "clip-vision-projected",
        "clip-vision",
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        CLIP_VISION,
    ),
    case("clip-text", "clip-text", "CLIPTextModel", "CLIPTextConfig", CLIP_TEXT),
    Case("open_clip", partial(_open_clip, OPEN_CLIP), "open_clip", partial(_keep_open_clip, OPEN_CLIP)),
    Case("open_clip-custom", partial(_open_clip, CUSTOM), "open_clip", partial(_keep_open_clip, CUSTOM)),
    case("bert", "bert", "BertModel", "BertConfig", BERT),
    case("bert-pretraining", "bert", "BertForPreTraining", "BertConfig", BERT),
    case("bert-untied", "bert", "BertForMaskedLM", "BertConfig", BERT, tie_word_embeddings=False),
    case("bert-classifier", "bert", "BertForSequenceClassification", "BertConfig", BERT),
    case("bert-tokens", "bert", "BertForTokenClassification", "BertConfig", BERT),
    case(
        "bert-questions",
        "bert",
        "BertForQuestionAnswering",
        "BertConfig",
        {**BERT, "num_labels": 2},
    ),
    case("gpt2", "gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2),
    case("gpt2-untied", "gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2, tie_word_embeddings=False),
    case("gpt2-classifier", "gpt2", "GPT2ForSequenceClassification", "GPT2Config", GPT2),
    case("llama", "llama", "LlamaForCausalLM", "LlamaConfig", LLAMA),
    case(
        "llama-biased",
        "llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        LLAMA,
        attention_bias=True,
        mlp_bias=True,
    ),
    case("llama-classifier", "llama", "LlamaForSequenceClassification", "LlamaConfig", LLAMA),
    case("mistral-tied", "llama", "MistralForCausalLM", "MistralConfig", LLAMA, tie_word_embeddings=True),
)
