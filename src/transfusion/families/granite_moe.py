"""Mixtures of experts of Granite, OLMoE and Phi-3.5 as in transformers."""

from __future__ import annotations

from transfusion.architecture.table import Config, Table
from transfusion.families._decoders import GROUPED_NORMED, family, lines
from transfusion.families.llama import MULTIPLIERS
from transfusion.families.mixtral import (
    ATTENTION,
    KNOWN_OF_EXPERTS,
    MIXTURE,
    NORM,
    OF_QWEN,
    SIGNATURE,
    mixture,
    stacked,
)

SHARED_MLP = """
layers.{}.shared_mlp.input_linear.weight    [shared|shared] <- y
layers.{}.shared_mlp.output_linear.weight   x@next <- shared
"""
WIDE_NORM = """
layers.{}.self_attn.q_norm.weight   scale (group rep qk)
layers.{}.self_attn.k_norm.weight   scale (group qk)
"""


def granite(config: Config, names: frozenset[str]) -> Table:
    factor, sizes = config.get("residual_multiplier", 1.0), {"expert": config["num_local_experts"]}
    if not (shared := config.get("shared_intermediate_size")):
        return mixture(config, lines(ATTENTION, MIXTURE, NORM), branch_factor=factor, **sizes)
    rows = lines(ATTENTION, MIXTURE, SHARED_MLP, NORM)
    return mixture(config, rows, branch_factor=factor, shared=shared, **sizes)


def olmoe(config: Config, names: frozenset[str]) -> Table:
    """Norms over all heads of queries and keys, as in OLMo 2, but before the branches as well."""
    rows = lines(ATTENTION, WIDE_NORM, MIXTURE, NORM)
    return mixture(config, rows, GROUPED_NORMED, expert=config["num_experts"])


def phimoe(config: Config, names: frozenset[str]) -> Table:
    rows = lines(ATTENTION, MIXTURE, NORM).replace("norm.weight ", "norm.* ")
    return mixture(config, rows, expert=config["num_local_experts"])


BLOCK = "layers.{}.block_sparse_moe"
FAMILIES = (
    family(
        "granitemoe",
        ("granitemoe", "granitemoeshared"),
        granite,
        "",
        aliases=(
            (f"{BLOCK}.input_linear.weight", "layers.{}.mlp.experts.gate_up_proj"),
            (f"{BLOCK}.output_linear.weight", "layers.{}.mlp.experts.down_proj"),
            (f"{BLOCK}.router.layer", "layers.{}.mlp.gate"),
            (f"{BLOCK}.router", "layers.{}.mlp.gate"),
            (BLOCK, "layers.{}.mlp"),
        ),
        known_keys=KNOWN_OF_EXPERTS | MULTIPLIERS | {"shared_intermediate_size"},
    ),
    family(
        "olmoe",
        ("olmoe",),
        olmoe,
        f"{SIGNATURE} layers.0.self_attn.q_norm.weight",
        aliases=OF_QWEN,
        known_keys=KNOWN_OF_EXPERTS | {"clip_qkv", "norm_topk_prob"},
    ),
    family(
        "phimoe",
        ("phimoe",),
        phimoe,
        f"{SIGNATURE} layers.0.input_layernorm.bias",
        aliases=(
            *stacked(BLOCK, "w1", "w3", "w2"),
            ("layers.{}.mlp.router", "layers.{}.mlp.gate"),
            (BLOCK, "layers.{}.mlp"),
        ),
        known_keys=KNOWN_OF_EXPERTS
        | {"input_jitter_noise", "lm_head_bias", "auto_map", "original_max_position_embeddings"},
    ),
)
