"""Decoders with the parts of older ones in other arrangements."""

from __future__ import annotations

from cases.decoders import BASE, NO_HEAD_DIM
from making import case

WIDE = {**NO_HEAD_DIM, "hidden_size": 48}
"""For classes whose heads share the width."""
EXPERTS = {**BASE, "num_local_experts": 5, "num_experts_per_tok": 3}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}

CASES = (
    case("seed_oss", "llama", "SeedOssForCausalLM", "SeedOssConfig", BASE),
    case("ministral", "llama", "MinistralForCausalLM", "MinistralConfig", BASE),
    case("cwm", "llama", "CwmForCausalLM", "CwmConfig", BASE, tie_word_embeddings=True),
    case("helium", "helium", "HeliumForCausalLM", "HeliumConfig", WIDE, head_dim=8),
    case("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", "Ernie4_5Config", BASE),
    case("smollm3", "smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", BASE, no_rope_layers=[1, 0, 1]),
    case(
        "granite",
        "granite",
        "GraniteForCausalLM",
        "GraniteConfig",
        BASE,
        residual_multiplier=0.22,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        logits_scaling=2.0,
    ),
    case("olmo", "olmo", "OlmoForCausalLM", "OlmoConfig", BASE),
    case("olmo-clipped", "olmo", "OlmoForCausalLM", "OlmoConfig", BASE, clip_qkv=0.8),
    case("olmo3", "olmo2", "Olmo3ForCausalLM", "Olmo3Config", BASE, **SLIDING),
    case("exaone4", "exaone4", "Exaone4ForCausalLM", "Exaone4Config", BASE, **SLIDING),
    case("hunyuan", "hunyuan", "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", BASE),
    case("cohere", "cohere", "CohereForCausalLM", "CohereConfig", WIDE),
    case("cohere-normed", "cohere", "CohereForCausalLM", "CohereConfig", WIDE, use_qk_norm=True),
    case("cohere2", "cohere2", "Cohere2ForCausalLM", "Cohere2Config", WIDE, **SLIDING),
    case("glm", "glm", "GlmForCausalLM", "GlmConfig", BASE, attention_bias=True),
    case("glm4", "glm4", "Glm4ForCausalLM", "Glm4Config", BASE),
    case(
        "llama4",
        "llama4",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        EXPERTS,
        intermediate_size_mlp=28,
        no_rope_layers=[1, 0, 1],
        moe_layers=[1, 2],
        attention_chunk_size=64,
    ),
    case("arcee", "arcee", "ArceeForCausalLM", "ArceeConfig", BASE),
    case("jais2", "arcee", "Jais2ForCausalLM", "Jais2Config", BASE),
    case("nemotron", "nemotron", "NemotronForCausalLM", "NemotronConfig", BASE),
    case("apertus", "apertus", "ApertusForCausalLM", "ApertusConfig", BASE),
    case(
        "stablelm",
        "stablelm",
        "StableLmForCausalLM",
        "StableLmConfig",
        WIDE,
        partial_rotary_factor=0.5,
        use_qkv_bias=True,
    ),
    case("gpt_oss", "gpt_oss", "GptOssForCausalLM", "GptOssConfig", EXPERTS),
)
