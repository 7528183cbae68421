"""Mixtures of experts."""

from __future__ import annotations

from cases.decoders import BASE, NO_HEAD_DIM
from making import case

MIXTRAL = {**BASE, "num_local_experts": 5, "num_experts_per_tok": 3}
QWEN = {**BASE, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 28}

CASES = (
    case("mixtral", "mixtral", "MixtralForCausalLM", "MixtralConfig", MIXTRAL),
    case(
        "mixtral-classifier",
        "mixtral",
        "MixtralForSequenceClassification",
        "MixtralConfig",
        MIXTRAL,
    ),
    case(
        "mixtral-tied",
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        MIXTRAL,
        tie_word_embeddings=True,
        output_router_logits=True,
    ),
    case(
        "qwen2_moe",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        QWEN,
        shared_expert_intermediate_size=14,
    ),
    case(
        "granitemoe",
        "granitemoe",
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        MIXTRAL,
        residual_multiplier=0.3,
    ),
    case(
        "granitemoeshared",
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        MIXTRAL,
        shared_intermediate_size=14,
    ),
    case(
        "olmoe",
        "olmoe",
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**NO_HEAD_DIM, "num_experts": 5},
        num_experts_per_tok=3,
    ),
    case(
        "phimoe",
        "phimoe",
        "PhimoeForCausalLM",
        "PhimoeConfig",
        {**MIXTRAL, "num_experts_per_tok": 2},
        attention_bias=True,
        lm_head_bias=True,
    ),
    case("qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN, norm_topk_prob=True),
)
