"""Mixtral and the mixtures of experts of Qwen2 and Qwen3: a router chooses among gated MLPs.

Experts are permuted together with the router's rows, and the units of each expert within it. Files store
each expert's matrices apart; live modules of transformers 5 stack them, with gate and up in one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from transfusion.architecture.table import Axis, Config, Table
from transfusion.families._decoders import (
    EMBEDDING,
    GROUPED,
    GROUPED_ATTENTION,
    GROUPED_NORMED,
    KNOWN,
    family,
    grouped_decoder,
    lines,
)
from transfusion.families._shared import PLAIN
from transfusion.families.qwen3 import QK_NORM


def with_experts(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes of a decoder whose MLPs are those of experts."""
    others = (axis for axis in axes if axis.name != "ffn")
    return (*others, Axis("expert"), Axis("ffn", within="expert"), Axis("shared"))


ATTENTION = lines(
    EMBEDDING,
    "layers.{}.input_layernorm.weight            scale x",
    GROUPED_ATTENTION,
    "layers.{}.post_attention_layernorm.weight   scale y",
)
MIXTURE = """
layers.{}.mlp.gate.weight            expert <- y
layers.{}.mlp.experts.gate_up_proj   expert [ffn|ffn] <- y
layers.{}.mlp.experts.down_proj      expert x@next <- ffn
"""
SHARED_EXPERT = """
layers.{}.mlp.shared_expert.gate_proj.*   shared <- y
layers.{}.mlp.shared_expert.up_proj.*     shared <- y
layers.{}.mlp.shared_expert.down_proj.*   x@next <- shared
layers.{}.mlp.shared_expert_gate.*        _ <- y
"""
NORM = "norm.weight   scale x@last"

SHORTCUTS = """
layers.{}.input_layernorm            x -> y        layers.{}.self_attn.o_proj
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.mlp
"""


def mixture(
    config: Config,
    rows: str,
    axes: tuple[Axis, ...] = GROUPED,
    *,
    branch_factor: float = 1.0,
    **sizes: int,
) -> Table:
    table = grouped_decoder(
        config,
        rows,
        SHORTCUTS,
        tied=False,
        axes=with_experts(axes),
        branch_factor=branch_factor,
        sizes=sizes,
    )
    # Only for training: each block's logits are in its own order of experts, and the loss that balances
    # them adds up the experts of one number over all blocks.
    logits = {f"router_logits.{i}": None for i in range(config["num_hidden_layers"])}
    return replace(table, outputs={**table.outputs, **logits, "aux_loss": None})


def mixtral(config: Config, names: frozenset[str]) -> Table:
    return mixture(config, lines(ATTENTION, MIXTURE, NORM), expert=config["num_local_experts"])


def _qwen_sizes(config: Config) -> dict[str, int]:
    experts = config.get("num_experts") or config["num_local_experts"]
    return {"expert": experts, "ffn": config["moe_intermediate_size"]}


def qwen2_moe(config: Config, names: frozenset[str]) -> Table:
    rows = lines(ATTENTION, MIXTURE, SHARED_EXPERT, NORM)
    sizes = {**_qwen_sizes(config), "shared": config["shared_expert_intermediate_size"]}
    return mixture(config, rows, **sizes)


def qwen3_moe(config: Config, names: frozenset[str]) -> Table:
    rows = lines(ATTENTION, QK_NORM, MIXTURE, NORM)
    return mixture(config, rows, GROUPED_NORMED, **_qwen_sizes(config))


KNOWN_OF_EXPERTS = KNOWN | {
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
}
KNOWN_OF_QWEN = KNOWN_OF_EXPERTS | {
    "moe_intermediate_size",
    "norm_topk_prob",
    "qkv_bias",
    "shared_expert_intermediate_size",
}
ALL_SPARSE = {**PLAIN, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
"""Blocks without experts among those with them are not described."""


def stacked(block: str, gate: str, up: str, down: str) -> tuple[tuple[str, str], ...]:
    """How files call the pieces of the experts' matrices, below ``block``."""
    experts, ours = f"{block}.experts.{{}}", "layers.{}.mlp.experts"
    return (
        (f"{experts}.{gate}.weight", f"{ours}.gate_up_proj#{{}}[0]"),
        (f"{experts}.{up}.weight", f"{ours}.gate_up_proj#{{}}[1]"),
        (f"{experts}.{down}.weight", f"{ours}.down_proj#{{}}"),
    )


OF_MIXTRAL = (
    *stacked("layers.{}.block_sparse_moe", "w1", "w3", "w2"),
    ("layers.{}.block_sparse_moe", "layers.{}.mlp"),
)
OF_QWEN = stacked("layers.{}.mlp", "gate_proj", "up_proj", "down_proj")

SIGNATURE = """
embed_tokens.weight layers.0.input_layernorm.weight layers.0.self_attn.q_proj.weight
layers.0.post_attention_layernorm.weight layers.0.mlp.gate.weight layers.0.mlp.experts.down_proj#0 norm.weight
"""

FAMILIES = (
    family(
        "mixtral",
        ("mixtral",),
        mixtral,
        SIGNATURE,
        aliases=OF_MIXTRAL,
        known_keys=KNOWN_OF_EXPERTS,
    ),
    family(
        "qwen2_moe",
        ("qwen2_moe",),
        qwen2_moe,
        f"{SIGNATURE} layers.0.mlp.shared_expert_gate.weight",
        aliases=OF_QWEN,
        known_keys=KNOWN_OF_QWEN,
        required=ALL_SPARSE,
    ),
    family(
        "qwen3_moe",
        ("qwen3_moe",),
        qwen3_moe,
        f"{SIGNATURE} layers.0.self_attn.q_norm.weight",
        aliases=OF_QWEN,
        known_keys=KNOWN_OF_QWEN,
        required=ALL_SPARSE,
    ),
)
