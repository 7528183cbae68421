"""OLMo 2 as in transformers: norms after the branches only, and over all heads of queries and keys."""

from __future__ import annotations

from transfusion.architecture.families._decoders import (
    EMBEDDING,
    GATED_MLP,
    GROUPED_ATTENTION,
    GROUPED_NORMED,
    family,
    grouped_decoder,
    lines,
)
from transfusion.architecture.table import Config, Table

ROWS = lines(
    EMBEDDING,
    GROUPED_ATTENTION,
    """
    layers.{}.self_attn.q_norm.weight             scale (group rep qk)
    layers.{}.self_attn.k_norm.weight             scale (group qk)
    layers.{}.post_attention_layernorm.weight     scale y
    """,
    GATED_MLP,
    """
    layers.{}.post_feedforward_layernorm.weight   scale x@next
    norm.weight                                   scale x@last
    """,
)

SHORTCUTS = """
layers.{}.self_attn.q_proj   x -> y        layers.{}.post_attention_layernorm
layers.{}.mlp.gate_proj      y -> x@next   layers.{}.post_feedforward_layernorm
"""


def table(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=False, axes=GROUPED_NORMED)


FAMILIES = (
    family(
        "olmo2",
        ("olmo2",),
        table,
        """
        embed_tokens.weight layers.0.self_attn.q_norm.weight layers.0.post_feedforward_layernorm.weight
        layers.0.post_attention_layernorm.weight norm.weight
        """,
    ),
)
