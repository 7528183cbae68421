"""Models that hear."""

from __future__ import annotations

from making import case

WHISPER = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_layers": 3,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 22,
    "num_mel_bins": 10,
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

CASES = (
    case("whisper", "whisper", "WhisperModel", "WhisperConfig", WHISPER),
    case("whisper-generation", "whisper", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    case("whisper-untied", "whisper", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, tie_word_embeddings=False),
    case("whisper-classifier", "whisper", "WhisperForAudioClassification", "WhisperConfig", WHISPER),
)  # fmt: skip
