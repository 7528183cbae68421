"""Swin and Swin v2 as in transformers: every stage has its own residual stream and its own heads."""

from __future__ import annotations

from functools import partial
from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.table import Axis, Config, Family, Shapes, Stack, Table, fixed
from transfusion.families._shared import (
    ATTENTION,
    BACKBONE,
    HARMLESS,
    LABEL,
    PATCH,
    PLAIN,
    POSITION,
    below,
    both_ends_below,
)

START = """
embeddings.position_embeddings?            _ position x@first
embeddings.patch_embeddings.projection.*   x@first <- channel row column
embeddings.norm.*                          scale x@first
"""

BLOCKS = """
blocks.{}.layernorm_before.*                            scale x
blocks.{}.attention.self.query.*                        (head qk) <- x
blocks.{}.attention.self.key.*                          (head qk) <- x
blocks.{}.attention.self.relative_position_bias_table   distance head
blocks.{}.attention.self.value.*                        (head vo) <- x
blocks.{}.attention.output.dense.*                      y <- (head vo)
blocks.{}.layernorm_after.*                             scale y
blocks.{}.intermediate.dense.*                          ffn <- y
blocks.{}.output.dense.*                                x@next <- ffn
"""

# The attention's output is in the order of the windows; drop_path has it in the stream's.
SHORTCUTS = """
blocks.{}.layernorm_before   x -> y        blocks.{}.drop_path
blocks.{}.layernorm_after    y -> x@next   blocks.{}.output.dense
"""

MERGING = """
downsample.norm.*        scale [x@last|x@last|x@last|x@last]
downsample.reduction.*   {next}.x@first <- [x@last|x@last|x@last|x@last]
"""

# Norms at the ends of the branches; a small MLP makes the biases of the heads from coordinates.
BLOCKS_2 = """
blocks.{}.attention.self.query.*                            (head qk) <- x
blocks.{}.attention.self.key.*                              (head qk) <- x
blocks.{}.attention.self.logit_scale                        head _ _
blocks.{}.attention.self.continuous_position_bias_mlp.0.*   cpb <- coordinate
blocks.{}.attention.self.continuous_position_bias_mlp.2.*   head <- cpb
blocks.{}.attention.self.value.*                            (head vo) <- x
blocks.{}.attention.output.dense.*                          y <- (head vo)
blocks.{}.layernorm_before.*                                scale y
blocks.{}.intermediate.dense.*                              ffn <- y
blocks.{}.output.dense.*                                    x@next <- ffn
blocks.{}.layernorm_after.*                                 scale x@next
"""

SHORTCUTS_2 = """
blocks.{}                      x -> y        blocks.{}.layernorm_before
blocks.{}.intermediate.dense   y -> x@next   blocks.{}.layernorm_after
"""

MERGING_2 = """
downsample.reduction.*   {next}.x@first <- [x@last|x@last|x@last|x@last]
downsample.norm.*        scale {next}.x@first
"""

HEADS = """
layernorm.*             scale {last}.x@last
classifier.*            label <- {last}.x@last
embeddings.mask_token   _ _ stage0.x@first
decoder.0.*             pixel <- {last}.x@last _ _
"""

BUFFERS = """
blocks.{}.attention.self.relative_position_index
blocks.{}.attention.self.relative_coords_table
"""

AXES = (
    *ATTENTION,
    Axis("cpb"),
    POSITION,
    *PATCH,
    fixed("distance", "relative positions select its rows", scope="stack"),
    fixed("coordinate", "rows and columns, in this order"),
)


def table(second: bool, config: Config, names: frozenset[str]) -> Table:
    blocks, merging, shortcuts = (
        (BLOCKS_2, MERGING_2, SHORTCUTS_2) if second else (BLOCKS, MERGING, SHORTCUTS)
    )
    stages, heads = range(len(config["depths"])), config.get("num_heads")
    last = f"stage{stages[-1]}"

    def stage(i: int) -> Stack:
        rows = blocks if i == stages[-1] else blocks + merging.strip().replace("{next}", f"stage{i + 1}")
        rows = below(f"encoder.layers.{i}.", rows)
        return Stack(
            f"stage{i}",
            config["depths"][i],
            START.strip() + "\n" + rows if i == 0 else rows,
            AXES,
            sizes={"x": config["embed_dim"] * 2**i, **({"head": heads[i]} if heads else {})},
            shortcuts=both_ends_below(f"encoder.layers.{i}.", shortcuts),
        )

    return Table(
        stacks=tuple(stage(i) for i in stages),
        axes=(LABEL, fixed("pixel", "reconstructed pixels come in this order")),
        heads=HEADS.format(last=last),
        buffers="\n".join(below(f"encoder.layers.{i}.", BUFFERS) for i in stages),
        outputs={"last_hidden_state": f"{last}.x@last", "pooler_output": f"{last}.x@last"},
    )


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    """The configuration: the position biases count the heads."""
    stages = range(depth(shapes, "encoder.layers.{}."))
    return {
        "depths": [depth(shapes, f"encoder.layers.{i}.blocks.{{}}.") for i in stages],
        "embed_dim": shapes["embeddings.norm.weight"][0],
    }


KNOWN = (
    HARMLESS
    | BACKBONE
    | {"embed_dim", "depths", "num_heads", "num_layers", "hidden_size", "mlp_ratio", "window_size"}
    | {"image_size", "patch_size", "num_channels", "qkv_bias", "use_absolute_embeddings", "path_norm"}
    | {"pretrained_window_sizes"}
)
SIGNATURE = ("embeddings.norm.weight", "encoder.layers.0.blocks.0.intermediate.dense.weight")
BLOCK = "encoder.layers.{}.blocks.{}"

FAMILIES = (
    Family(
        name="swin",
        library="transformers",
        table=partial(table, False),
        from_shapes=from_shapes,
        signature=(
            *SIGNATURE,
            "encoder.layers.0.blocks.0.attention.self.relative_position_bias_table",
        ),
        model_types=("swin",),
        inputs=("image",),
        prefixes=("swin.",),
        aliases=(
            (f"{BLOCK}.attention.q_proj", f"{BLOCK}.attention.self.query"),
            (f"{BLOCK}.attention.k_proj", f"{BLOCK}.attention.self.key"),
            (f"{BLOCK}.attention.v_proj", f"{BLOCK}.attention.self.value"),
            (f"{BLOCK}.attention.o_proj", f"{BLOCK}.attention.output.dense"),
            (f"{BLOCK}.attention.relative_position_bias", f"{BLOCK}.attention.self"),
            (f"{BLOCK}.mlp.fc1", f"{BLOCK}.intermediate.dense"),
            (f"{BLOCK}.mlp.fc2", f"{BLOCK}.output.dense"),
        ),
        known_keys=KNOWN,
        required=PLAIN,
    ),
    Family(
        name="swinv2",
        library="transformers",
        table=partial(table, True),
        from_shapes=from_shapes,
        signature=(*SIGNATURE, "encoder.layers.0.blocks.0.attention.self.logit_scale"),
        model_types=("swinv2",),
        inputs=("image",),
        prefixes=("swinv2.",),
        known_keys=KNOWN,
        required=PLAIN,
    ),
)
