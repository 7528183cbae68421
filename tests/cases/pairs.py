"""Pairs of a whole encoder and a whole decoder."""

from __future__ import annotations

from functools import partial
from typing import Any

from making import Case, case, transformers_model

VIT = {
    "model_type": "vit",
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 22,
    "image_size": 12,
    "patch_size": 4,
}
DEIT = {**VIT, "model_type": "deit"}
BEIT = {**VIT, "model_type": "beit", "use_relative_position_bias": True}
READS = {"is_decoder": True, "add_cross_attention": True}
TROCR = {
    **READS,
    "model_type": "trocr",
    "vocab_size": 31,
    "d_model": 20,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 28,
    "max_position_embeddings": 24,
}
HEARS = {"cross_attention_hidden_size": 24}


def pair(name: str, family: str, model: str, encoder: dict[str, Any], decoder: dict[str, Any]) -> Case:
    config = model.replace("Model", "Config")
    return Case(name, partial(transformers_model, model, config, encoder=encoder, decoder=decoder), family)


SWIN = {
    "model_type": "donut-swin",
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "mlp_ratio": 2.5,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 29,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 28,
    "max_position_embeddings": 24,
}
BERT_DECODER = {**BERT, **READS, "vocab_size": 31, "intermediate_size": 26}
ROBERTA = {**BERT, "model_type": "roberta", "hidden_size": 24, "num_attention_heads": 3}
ROBERTA |= {"type_vocab_size": 1, "max_position_embeddings": 24}
GPT2 = {
    **READS,
    "model_type": "gpt2",
    "vocab_size": 31,
    "n_embd": 20,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 28,
    "n_positions": 24,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MBART = {
    **READS,
    "model_type": "mbart",
    "vocab_size": 31,
    "d_model": 20,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 28,
    "max_position_embeddings": 24,
}
WAV2VEC2 = {
    "model_type": "wav2vec2",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 22,
    "conv_dim": [10, 14],
    "conv_kernel": [4, 3],
    "conv_stride": [3, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 5,
    "num_conv_pos_embedding_groups": 3,
}
WAV2VEC2_LARGE = {**WAV2VEC2, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}
SEEING, READING = "VisionEncoderDecoderModel", "EncoderDecoderModel"
HEARING = "SpeechEncoderDecoderModel"
CASES = (
    pair("trocr", "vision_pair", SEEING, DEIT, {**TROCR, **HEARS}),
    pair(
        "trocr-projected",
        "vision_pair",
        SEEING,
        {**VIT, "qkv_bias": False},
        {**TROCR, "tie_word_embeddings": False},
    ),
    pair(
        "trocr-computed",
        "vision_pair",
        SEEING,
        BEIT,
        {**TROCR, **HEARS, "use_learned_position_embeddings": False, "layernorm_embedding": False},
    ),
    pair("donut", "vision_pair", SEEING, SWIN, MBART),
    case("donut-swin", "donut_swin", "DonutSwinModel", "DonutSwinConfig", SWIN),
    pair("bert2bert", "text_pair", READING, BERT, BERT_DECODER),
    pair("roberta2gpt2", "text_pair", READING, ROBERTA, GPT2),
    pair("bert2roberta", "text_pair", READING, BERT, {**ROBERTA, **READS, "tie_word_embeddings": False}),
    pair("vit-gpt2", "vision_pair", SEEING, VIT, GPT2),
    pair("vit-bert", "vision_pair", SEEING, VIT, BERT_DECODER),
    pair("wav2vec2-mbart", "speech_pair", HEARING, WAV2VEC2, MBART),
    pair("wav2vec2-gpt2", "speech_pair", HEARING, WAV2VEC2_LARGE, {**GPT2, "n_embd": 24, "n_head": 6}),
    pair("wav2vec2-bart", "speech_pair", HEARING, WAV2VEC2, {**MBART, "model_type": "bart"}),
)
