"""MPNet as in transformers: BERT's blocks with one table of relative positions for all of them."""

from __future__ import annotations

from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.table import Axis, Config, Family, Shapes, Stack, Table, fixed
from transfusion.families import bert, roberta
from transfusion.families._shared import ATTENTION, HARMLESS, PLAIN, POSITION, usual_sizes

ROWS = """
embeddings.word_embeddings.weight         vocab -> x@first
embeddings.position_embeddings.weight     position -> x@first
embeddings.LayerNorm.*                    scale x@first
encoder.relative_attention_bias.weight    distance -> head
encoder.layer.{}.attention.attn.q.*       (head qk) <- x
encoder.layer.{}.attention.attn.k.*       (head qk) <- x
encoder.layer.{}.attention.attn.v.*       (head vo) <- x
encoder.layer.{}.attention.attn.o.*       y <- (head vo)
encoder.layer.{}.attention.LayerNorm.*    scale y
encoder.layer.{}.intermediate.dense.*     ffn <- y
encoder.layer.{}.output.dense.*           x@next <- ffn
encoder.layer.{}.output.LayerNorm.*       scale x@next
"""

SHORTCUTS = """
encoder.layer.{}.attention.attn.q     x -> y        encoder.layer.{}.attention.attn.o
encoder.layer.{}.intermediate.dense   y -> x@next   encoder.layer.{}.output.dense
"""

# Each head adds its column of the one table to its scores in every block: heads move as one.
AXES = (
    Axis("head", scope="stack"),
    *ATTENTION[1:],
    POSITION,
    fixed("distance", "distances select its rows", scope="stack"),
)


def table(config: Config, names: frozenset[str]) -> Table:
    layers = config["num_hidden_layers"]
    stack = Stack("layer", layers, ROWS, AXES, usual_sizes(config), SHORTCUTS)
    return roberta.with_heads(stack, config, names)


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    """The configuration: the table of relative positions has a column for every head."""
    ffn, width = shapes["encoder.layer.0.intermediate.dense.weight"]
    return {
        "num_hidden_layers": depth(shapes, "encoder.layer.{}."),
        "hidden_size": width,
        "num_attention_heads": shapes["encoder.relative_attention_bias.weight"][1],
        "intermediate_size": ffn,
    }


FAMILIES = (
    Family(
        name="mpnet",
        library="transformers",
        table=table,
        from_shapes=from_shapes,
        signature=(
            "embeddings.word_embeddings.weight",
            "encoder.relative_attention_bias.weight",
            "encoder.layer.0.attention.attn.q.weight",
            "encoder.layer.0.intermediate.dense.weight",
        ),
        model_types=("mpnet",),
        inputs=("tokens",),
        positions_after_padding=True,
        prefixes=("mpnet.",),
        known_keys=HARMLESS | bert.SIZES | {"max_position_embeddings", "relative_attention_num_buckets"},
        required=PLAIN,
    ),
)
