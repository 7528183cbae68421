"""Compressed attention, and routers with a bias."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cases.decoders import BASE
from making import Case, transformers_model

SPARSE = {
    **BASE,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 14,
    "n_group": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "topk_group": 1,
}
LATENT = {
    **{key: value for key, value in SPARSE.items() if key not in ("head_dim", "num_key_value_heads")},
    "kv_lora_rank": 12,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
}
MINIMAX = {
    **BASE,
    "head_dim": 12,
    "num_experts_per_tok": 3,
    "num_local_experts": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
GROUPED = {**LATENT, "n_group": 2, "n_routed_experts": 8, "topk_group": 1}


V4 = {
    "vocab_size": 31,
    "hidden_size": 36,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "head_dim": 12,
    "q_lora_rank": 10,
    "num_experts_per_tok": 3,
    "n_routed_experts": 5,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "hc_mult": 3,
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "sliding_window": 5,
    "o_groups": 2,
    "o_lora_rank": 7,
    "index_n_heads": 4,
    "index_head_dim": 14,
    "index_topk": 3,
    "partial_rotary_factor": 1 / 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def corrected(model: str, config: str, settings: dict[str, Any]) -> Any:
    """A model whose routers' biases are far from zero, and whose tokens choose experts that differ."""
    made = transformers_model(model, config, **settings)
    generator = torch.Generator().manual_seed(9)
    for name, buffer in made.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("tid2eid"):
            buffer.copy_(
                torch.rand(len(buffer), made.config.n_routed_experts, generator=generator).argsort()[
                    :, : buffer.shape[1]
                ]
            )
    return made


def sparse(name: str, family: str, kind: str, settings: dict[str, Any], **more: Any) -> Case:
    return Case(name, partial(corrected, f"{kind}ForCausalLM", f"{kind}Config", {**settings, **more}), family)


CASES = (
    sparse("deepseek_v3", "deepseek_v3", "DeepseekV3", LATENT),
    sparse("deepseek_v3-groups", "deepseek_v3", "DeepseekV3", GROUPED, q_lora_rank=None, attention_bias=True),
    sparse("deepseek_v3-halves", "deepseek_v3", "DeepseekV3", LATENT, rope_interleave=False),
    sparse(
        "deepseek_v2", "deepseek_v3", "DeepseekV2", LATENT, n_group=2, topk_method="greedy", mlp_bias=True
    ),
    sparse("deepseek_v2-groups", "deepseek_v3", "DeepseekV2", GROUPED, topk_method="group_limited_greedy"),
    sparse("deepseek_v4", "deepseek_v4", "DeepseekV4", V4),
    sparse("deepseek_v4-tied", "deepseek_v4", "DeepseekV4", V4, o_groups=3, tie_word_embeddings=True),
    sparse("glm4_moe_lite", "deepseek_v3", "Glm4MoeLite", LATENT),
    sparse("glm4_moe", "glm4_moe", "Glm4Moe", SPARSE, attention_bias=True, head_dim=12),
    sparse("glm4_moe-normed", "glm4_moe", "Glm4Moe", SPARSE, use_qk_norm=True, head_dim=12),
    sparse("minimax_m2", "minimax_m2", "MiniMaxM2", MINIMAX),
)
