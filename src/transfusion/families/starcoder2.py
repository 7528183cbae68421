"""StarCoder2 as in transformers: rotary positions and grouped queries with biases, LayerNorm, a plain MLP."""

from __future__ import annotations

from transfusion.architecture.table import Config, Table
from transfusion.families._decoders import (
    EMBEDDING,
    GROUPED_ATTENTION,
    KNOWN,
    family,
    grouped_decoder,
    lines,
)

ROWS = lines(
    EMBEDDING,
    "layers.{}.input_layernorm.*   scale x",
    GROUPED_ATTENTION,
    """
    layers.{}.post_attention_layernorm.*   scale y
    layers.{}.mlp.c_fc.*                   ffn <- y
    layers.{}.mlp.c_proj.*                 x@next <- ffn
    norm.*                                 scale x@last
    """,
)

SHORTCUTS = """
layers.{}.input_layernorm            x -> y        layers.{}.self_attn.o_proj
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.mlp.c_proj
"""


def table(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=True)


FAMILIES = (
    family(
        "starcoder2",
        ("starcoder2",),
        table,
        "embed_tokens.weight layers.0.self_attn.q_proj.weight layers.0.mlp.c_fc.weight norm.bias",
        known_keys=KNOWN
        | {"use_bias", "norm_epsilon", "embedding_dropout", "residual_dropout", "mlp_type"}
        | {"norm_type"},
    ),
)
