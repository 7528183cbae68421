"""Tiny random models of every family, built by their own libraries.

Head size, width, MLP size, group counts and vocabulary all differ, so that no coincidence of sizes can
hide a mistake; biases and norm weights are far from their defaults.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS = 3


@dataclass(frozen=True)
class Case:
    """One class of model: how to make it, and what it is called."""

    name: str
    make: Callable[[], Any]
    family: str
    head: bool = False
    """Whether the class has a head that a base model lacks."""

    def build(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return randomise(self.make(), seed).eval()

    def save(self, folder: Path, seed: int) -> Path:
        return self.store(self.build(seed), folder)

    def store(self, model: Any, folder: Path) -> Path:
        """Save a live model as its own library does."""
        if self.family == "open_clip":
            folder.mkdir(parents=True)
            save_file(model.state_dict(), folder / "open_clip_model.safetensors", {"format": "pt"})
            config = {"model_cfg": OPEN_CLIP, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
            (folder / "open_clip_config.json").write_text(json.dumps(config))
        else:
            model.save_pretrained(folder)
        return folder


def randomise(model: Any, seed: int) -> Any:
    """Draw every parameter anew: matrices that keep signals of order one, norms and biases that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.3 * noise)
    return model


def finetuned(case: Case, base: Path, folder: Path, seed: int = 7) -> Path:
    """A model of this class that continues from a base: every shared tensor a little changed."""
    from transfusion.model import Model
    from transfusion.naming import Naming

    origin = Model.open(base)
    naming = Naming(origin.family)
    model = case.build(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (ours := naming.canonical(name)) in origin.names:
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(origin.read(ours) + noise)
    return case.store(model, folder)


def _transformers(model_class: str, config_class: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))


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


def _case(name: str, family: str, model: str, config: str, settings: dict[str, Any], **more: Any) -> Case:
    head = more.pop("head", False)
    return Case(name, partial(_transformers, model, config, **settings, **more), family, head)


CASES = {
    case.name: case
    for case in (
        _case("vit", "vit", "ViTModel", "ViTConfig", VIT),
        _case("vit-classifier", "vit", "ViTForImageClassification", "ViTConfig", VIT, head=True),
        _case("vit-masked", "vit", "ViTForMaskedImageModeling", "ViTConfig", {**VIT, "patch_size": 2}),
        Case("clip", partial(_clip, "CLIPModel"), "clip"),
        Case("clip-classifier", partial(_clip, "CLIPForImageClassification"), "clip", head=True),
        _case("clip-vision", "clip-vision", "CLIPVisionModel", "CLIPVisionConfig", CLIP_VISION),
        _case(
            "clip-vision-projected",
            "clip-vision",
            "CLIPVisionModelWithProjection",
            "CLIPVisionConfig",
            CLIP_VISION,
        ),
        _case("clip-text", "clip-text", "CLIPTextModel", "CLIPTextConfig", CLIP_TEXT),
        Case("open_clip", _open_clip, "open_clip"),
        _case("bert", "bert", "BertModel", "BertConfig", BERT),
        _case("bert-pretraining", "bert", "BertForPreTraining", "BertConfig", BERT),
        _case("bert-untied", "bert", "BertForMaskedLM", "BertConfig", BERT, tie_word_embeddings=False),
        _case("bert-classifier", "bert", "BertForSequenceClassification", "BertConfig", BERT, head=True),
        _case("bert-tokens", "bert", "BertForTokenClassification", "BertConfig", BERT, head=True),
        _case(
            "bert-questions",
            "bert",
            "BertForQuestionAnswering",
            "BertConfig",
            {**BERT, "num_labels": 2},
            head=True,
        ),
        _case("gpt2", "gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2),
        _case("gpt2-untied", "gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2, tie_word_embeddings=False),
        _case("gpt2-classifier", "gpt2", "GPT2ForSequenceClassification", "GPT2Config", GPT2, head=True),
        _case("llama", "llama", "LlamaForCausalLM", "LlamaConfig", LLAMA),
        _case(
            "llama-biased",
            "llama",
            "LlamaForCausalLM",
            "LlamaConfig",
            LLAMA,
            attention_bias=True,
            mlp_bias=True,
        ),
        _case("llama-classifier", "llama", "LlamaForSequenceClassification", "LlamaConfig", LLAMA, head=True),
        _case(
            "mistral-tied", "llama", "MistralForCausalLM", "MistralConfig", LLAMA, tie_word_embeddings=True
        ),
    )
}

PRINCIPAL = ("vit-classifier", "clip", "open_clip", "bert-pretraining", "gpt2", "llama", "mistral-tied")
"""One case per family, for tests that take longer."""
