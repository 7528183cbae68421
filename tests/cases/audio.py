"""Models that hear."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from making import Case, case, transformers_model

WHISPER = {
    "d_model": 40,
    "encoder_layers": 2,
    "encoder_attention_heads": 5,
    "encoder_ffn_dim": 20,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 22,
    "num_mel_bins": 9,
    "max_source_positions": 17,
    "max_target_positions": 13,
    "classifier_proj_size": 15,
    "vocab_size": 31,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_labels": 7,
}
WAV2VEC2 = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "conv_dim": [11, 14, 9],
    "conv_kernel": [8, 5, 2],
    "conv_stride": [3, 2, 1],
    "num_conv_pos_embeddings": 10,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 15,
    "vocab_size": 31,
    "num_labels": 7,
}
MOONSHINE = {
    "hidden_size": 40,
    "intermediate_size": 22,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 3,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "vocab_size": 31,
    "pad_token_id": 0,
}
PARAKEET = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "subsampling_factor": 8,
    "subsampling_conv_channels": 7,
    "num_mel_bins": 16,
}
LARGE = {**WAV2VEC2, "feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
CODES = {
    "num_codevector_groups": 3,
    "num_codevectors_per_group": 13,
    "codevector_dim": 21,
    "proj_codevector_dim": 17,
}
# What the first published configurations say beside what the library says today.
OF_WHISPER = {"forced_decoder_ids": [[1, 3], [2, 4]], "max_length": 13, "torch_dtype": "float32"}
OF_WAV2VEC2 = {
    "feat_extract_dropout": 0.0,
    "freeze_feat_extract_train": True,
    "gradient_checkpointing": False,
    "hidden_dropout_prob": 0.1,
    "mask_channel_length": 10,
    "mask_channel_min_space": 1,
    "mask_channel_other": 0.0,
    "mask_channel_prob": 0.0,
    "mask_channel_selection": "static",
    "mask_time_min_space": 1,
    "mask_time_other": 0.0,
    "mask_time_selection": "static",
    "no_mask_channel_overlap": False,
    "no_mask_time_overlap": False,
}


def _keep_as_published(older: dict[str, Any], model: Any, folder: Path) -> None:
    """With the names and the configuration that were usual at first."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    names = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    tensors = load_file(file)
    for name in list(tensors):
        for new, old in names.items():
            if name.endswith(new):
                tensors[name.replace(new, old)] = tensors.pop(name)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | older
    (folder / "config.json").write_text(json.dumps(config))


def _published(
    name: str, family: str, model: str, config: str, older: dict[str, Any], **settings: Any
) -> Case:
    make = partial(transformers_model, model, config, **settings)
    return Case(name, make, family, partial(_keep_as_published, older))


def _parakeet(name: str, head: str = "", **more: Any) -> Case:
    """A conformer whose means and variances are those of some training, and perhaps its head."""
    config = {**PARAKEET, **more}
    if not head:
        return Case(
            name, partial(_normed, "ParakeetEncoder", "ParakeetEncoderConfig", config), "parakeet_encoder"
        )
    settings = {"encoder_config": config, "vocab_size": 31, "pad_token_id": 30}
    if head != "CTC":
        settings |= {"decoder_hidden_size": 18, "blank_token_id": 29}
    family = "parakeet" if head == "CTC" else "parakeet_transducer"
    return Case(name, partial(_normed, f"ParakeetFor{head}", f"Parakeet{head}Config", settings), family)


def _normed(model: str, kind: str, settings: dict[str, Any]) -> Any:
    made = transformers_model(model, kind, **settings)
    generator = torch.Generator().manual_seed(9)
    for name, buffer in made.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return made


CASES = (
    _parakeet("parakeet_encoder"),
    _parakeet("parakeet_encoder-plain", subsampling_factor=4, attention_bias=False, convolution_bias=False,
              scale_input=False),
    _parakeet("parakeet", "CTC"),
    _parakeet("parakeet-early", "CTC", subsampling_factor=2),
    _parakeet("parakeet_transducer", "TDT"),
    _parakeet("parakeet_transducer-plain", "RNNT"),
    case("whisper", "whisper", "WhisperModel", "WhisperConfig", WHISPER),
    case("whisper-generation", "whisper", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    case("whisper-untied", "whisper", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, tie_word_embeddings=False),
    case("whisper-classifier", "whisper", "WhisperForAudioClassification", "WhisperConfig", WHISPER),
    _published("whisper-as-published", "whisper", "WhisperForConditionalGeneration", "WhisperConfig", OF_WHISPER, **WHISPER),
    case("moonshine", "moonshine", "MoonshineForConditionalGeneration", "MoonshineConfig", MOONSHINE),
    case("moonshine-bare", "moonshine", "MoonshineModel", "MoonshineConfig", MOONSHINE, attention_bias=True),
    case("moonshine-untied", "moonshine", "MoonshineForConditionalGeneration", "MoonshineConfig", MOONSHINE,
         tie_word_embeddings=False, pad_head_dim_to_multiple_of=8,
         rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}),
    case("wav2vec2", "wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", WAV2VEC2),
    case("wav2vec2-letters", "wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2),
    case("wav2vec2-unmasked", "wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2, mask_time_prob=0.0),
    case("wav2vec2-classifier", "wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAV2VEC2),
    case("wav2vec2-frames", "wav2vec2", "Wav2Vec2ForAudioFrameClassification", "Wav2Vec2Config", WAV2VEC2),
    case("wav2vec2-pretraining", "wav2vec2", "Wav2Vec2ForPreTraining", "Wav2Vec2Config", WAV2VEC2, **CODES),
    case("wav2vec2-large", "wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", LARGE),
    case("wav2vec2-large-letters", "wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", LARGE),
    case("wav2vec2-large-classifier", "wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", LARGE),
    case("wav2vec2-large-pretraining", "wav2vec2", "Wav2Vec2ForPreTraining", "Wav2Vec2Config", LARGE, **CODES),
    case("hubert", "wav2vec2", "HubertModel", "HubertConfig", WAV2VEC2),
    case("hubert-letters", "wav2vec2", "HubertForCTC", "HubertConfig", WAV2VEC2),
    case("hubert-classifier", "wav2vec2", "HubertForSequenceClassification", "HubertConfig", WAV2VEC2),
    case("hubert-plain", "wav2vec2", "HubertModel", "HubertConfig", WAV2VEC2, feat_proj_layer_norm=False),
    case("hubert-large", "wav2vec2", "HubertModel", "HubertConfig", LARGE),
    case("hubert-large-letters", "wav2vec2", "HubertForCTC", "HubertConfig", LARGE),
    _published("wav2vec2-as-published", "wav2vec2", "Wav2Vec2ForPreTraining", "Wav2Vec2Config", OF_WAV2VEC2, **WAV2VEC2, **CODES),
    _published("hubert-as-published", "wav2vec2", "HubertForCTC", "HubertConfig", OF_WAV2VEC2, **WAV2VEC2),
)  # fmt: skip
