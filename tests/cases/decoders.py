"""Decoders beyond the first five families."""

from __future__ import annotations

from cases.first import LAYERS, LLAMA
from making import case

BASE = {**LLAMA, "bos_token_id": 1, "eos_token_id": 2}
NO_HEAD_DIM = {key: value for key, value in BASE.items() if key != "head_dim"}
TOKENS = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_labels": 7}
NEOX = {"hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 20, "num_hidden_layers": LAYERS}
FALCON = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": LAYERS, "ffn_hidden_size": 20}
OPT = {"hidden_size": 24, "num_attention_heads": 4, "ffn_dim": 20, "num_hidden_layers": LAYERS}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""Queries grow with their position, too."""

CASES = (
    case("qwen2", "llama", "Qwen2ForCausalLM", "Qwen2Config", BASE),
    case("ministral3", "llama", "Ministral3ForCausalLM", "Ministral3Config", BASE, rope_parameters=YARN),
    case("qwen3", "qwen3", "Qwen3ForCausalLM", "Qwen3Config", BASE),
    case("qwen3-classifier", "qwen3", "Qwen3ForSequenceClassification", "Qwen3Config", BASE),
    case("gemma", "gemma", "GemmaForCausalLM", "GemmaConfig", BASE),
    case("gemma2", "gemma2", "Gemma2ForCausalLM", "Gemma2Config", BASE),
    case("gemma3", "gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", BASE),
    case("phi3", "phi3", "Phi3ForCausalLM", "Phi3Config", BASE),
    case("olmo2", "olmo2", "Olmo2ForCausalLM", "Olmo2Config", NO_HEAD_DIM),
    case("starcoder2", "starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", BASE),
    case("phi", "phi", "PhiForCausalLM", "PhiConfig", {**NEOX, **TOKENS}, max_position_embeddings=13),
    case("gpt_neox", "gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {**NEOX, **TOKENS}, rotary_pct=0.5),
    case(
        "gpt_neox-in-turn",
        "gpt_neox",
        "GPTNeoXForSequenceClassification",
        "GPTNeoXConfig",
        {**NEOX, **TOKENS},
        rotary_pct=1.0,
        use_parallel_residual=False,
    ),
    case(
        "gptj",
        "gptj",
        "GPTJForCausalLM",
        "GPTJConfig",
        {"n_embd": 36, "n_layer": LAYERS, "n_head": 3, "n_inner": 20, "rotary_dim": 4, "n_positions": 13},
        **TOKENS,
    ),
    case("opt", "opt", "OPTForCausalLM", "OPTConfig", {**OPT, **TOKENS}, max_position_embeddings=13),
    case(
        "opt-350m",
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {**OPT, **TOKENS},
        word_embed_proj_dim=15,
        do_layer_norm_before=False,
        max_position_embeddings=13,
    ),
    case(
        "bloom",
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 24, "n_layer": LAYERS, "n_head": 4},
        **TOKENS,
    ),
    case("falcon-7b", "falcon", "FalconForCausalLM", "FalconConfig", {**FALCON, **TOKENS}),
    case(
        "falcon-40b",
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, **TOKENS},
        new_decoder_architecture=True,
        num_kv_heads=2,
        multi_query=False,
    ),
    case(
        "falcon-rw",
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, **TOKENS},
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
)
