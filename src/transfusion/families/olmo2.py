"""OLMo 2 and 3 and EXAONE 4 as in transformers: norms after the branches only.

OLMo norms all heads of queries, and of keys, together. EXAONE norms each head by one weight, and some of its
blocks have no rotary positions.
"""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Table, fixed
from transfusion.families._decoders import (
    EMBEDDING,
    GATED_MLP,
    GROUPED_ATTENTION,
    GROUPED_NORMED,
    KNOWN,
    NORMED,
    family,
    grouped,
    grouped_decoder,
    lines,
    rotary_kinds,
    rotary_sizes,
    sliding_blocks,
)

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

# Without rotary positions one order of units serves all heads, as they share the norm's weight.
EXAONE4 = lines(
    EMBEDDING,
    """
    layers.{rotary}.self_attn.q_proj.*            (group rep rot) <- x
    layers.{rotary}.self_attn.k_proj.*            (group rot) <- x
    layers.{rotary}.self_attn.q_norm.weight       scale rot
    layers.{rotary}.self_attn.k_norm.weight       scale rot
    layers.{plain}.self_attn.q_proj.*             (group rep qk) <- x
    layers.{plain}.self_attn.k_proj.*             (group qk) <- x
    layers.{plain}.self_attn.q_norm.weight        scale qk
    layers.{plain}.self_attn.k_norm.weight        scale qk
    layers.{}.self_attn.v_proj.*                  (group vo) <- x
    layers.{}.self_attn.o_proj.*                  y <- (group rep vo)
    layers.{}.post_attention_layernorm.weight     scale y
    """,
    GATED_MLP,
    """
    layers.{}.post_feedforward_layernorm.weight   scale x@next
    norm.weight                                   scale x@last
    """,
)
EXAONE4_AXES = grouped(fixed("rot", NORMED, scope="layer"), Axis("qk"))

SHORTCUTS = """
layers.{}.self_attn.q_proj   x -> y        layers.{}.post_attention_layernorm
layers.{}.mlp.gate_proj      y -> x@next   layers.{}.post_feedforward_layernorm
"""


def table(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=False, axes=GROUPED_NORMED)


def exaone4(config: Config, names: frozenset[str]) -> Table:
    hybrid = config.get("sliding_window", 4096) is not None
    rotates = sliding_blocks(config) if hybrid else range(config["num_hidden_layers"])
    return grouped_decoder(
        config,
        EXAONE4,
        SHORTCUTS,
        tied=False,
        axes=EXAONE4_AXES,
        kinds=rotary_kinds(config, rotates),
        sizes=rotary_sizes(config),
    )


FAMILIES = (
    family(
        "olmo2",
        ("olmo2", "olmo3"),
        table,
        """
        embed_tokens.weight layers.0.self_attn.q_norm.weight layers.0.post_feedforward_layernorm.weight
        layers.0.post_attention_layernorm.weight norm.weight
        """,
    ),
    family("exaone4", ("exaone4",), exaone4, "", known_keys=KNOWN),
)
