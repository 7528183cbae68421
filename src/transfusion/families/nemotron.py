"""Nemotron, Arcee, Jais 2 and Apertus as in transformers: a plain MLP instead of a gated one.

Nemotron rotates a part of each head. Apertus norms queries and keys, and its activation has two parameters.
"""

from __future__ import annotations

from transfusion.architecture.table import Config, Table
from transfusion.families._decoders import (
    EMBEDDING,
    GROUPED_ATTENTION,
    GROUPED_NORMED,
    KNOWN,
    family,
    grouped_decoder,
    grouped_partly,
    head_size,
    lines,
    rotated,
)
from transfusion.families._shared import PLAIN
from transfusion.families.llama import SHORTCUTS
from transfusion.families.qwen3 import QK_NORM

MLP = """
layers.{}.mlp.up_proj.*     ffn <- y
layers.{}.mlp.down_proj.*   x@next <- ffn
"""

ROWS = lines(
    EMBEDDING,
    "layers.{}.input_layernorm.*            scale x",
    GROUPED_ATTENTION,
    "layers.{}.post_attention_layernorm.*   scale y",
    MLP,
    "norm.*                                 scale x@last",
)
PARTLY = ROWS.replace("rep qk)", "rep [rot|qk])").replace("(group qk)", "(group [rot|qk])")
APERTUS = lines(
    EMBEDDING,
    "layers.{}.attention_layernorm.weight     scale x",
    GROUPED_ATTENTION,
    QK_NORM,
    "layers.{}.feedforward_layernorm.weight   scale y",
    MLP,
    """
    layers.{}.mlp.act_fn.alpha_p             _
    layers.{}.mlp.act_fn.alpha_n             _
    layers.{}.mlp.act_fn.beta
    layers.{}.mlp.act_fn.eps
    norm.weight                              scale x@last
    """,
)
APERTUS_SHORTCUTS = """
layers.{}.attention_layernorm     x -> y        layers.{}.self_attn.o_proj
layers.{}.feedforward_layernorm   y -> x@next   layers.{}.mlp.down_proj
"""


def table(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=False)


def nemotron(config: Config, names: frozenset[str]) -> Table:
    head = head_size(config)
    turned = rotated(config, head, 0.5)
    if turned == head:
        return table(config, names)
    sizes = {"rot": turned, "qk": head - turned, "vo": head}
    return grouped_decoder(config, PARTLY, SHORTCUTS, tied=False, axes=grouped_partly(), sizes=sizes)


def apertus(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, APERTUS, APERTUS_SHORTCUTS, tied=False, axes=GROUPED_NORMED)


FAMILIES = (
    family("arcee", ("arcee", "jais2"), table, ""),
    family(
        "nemotron",
        ("nemotron",),
        nemotron,
        "",
        known_keys=KNOWN | {"norm_eps", "partial_rotary_factor", "partial_rotary_percent", "rope_percent"},
    ),
    family(
        "apertus",
        ("apertus",),
        apertus,
        """
        embed_tokens.weight layers.0.attention_layernorm.weight layers.0.self_attn.q_norm.weight
        layers.0.mlp.act_fn.alpha_p norm.weight
        """,
        required={**PLAIN, "post_norm": (False,), "qk_norm": (True,)},
    ),
)
