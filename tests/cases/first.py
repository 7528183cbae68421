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


def _open_clip(**vision: Any) -> Any:
    import open_clip

    config = {**OPEN_CLIP, "vision_cfg": {**OPEN_CLIP["vision_cfg"], **vision}}
    return open_clip.CLIP(**config, output_dict=False)


def _keep_open_clip(model: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors", {"format": "pt"})
    config = {"model_cfg": OPEN_CLIP, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))


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
    Case("open_clip", _open_clip, "open_clip", _keep_open_clip),
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
