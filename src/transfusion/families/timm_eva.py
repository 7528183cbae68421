"""EVA and EVA-02 as in timm: a ViT whose second release has rotary positions and gated MLPs.

Projections of queries, keys and values are one matrix in small models and three in large ones.
"""

from __future__ import annotations

from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.table import Axis, Config, Family, Shapes, Stack, Table, rotary
from transfusion.errors import ArchitectureError
from transfusion.families._shared import ATTENTION, LABEL, PATCH, POSITION
from transfusion.families.timm_vit import ABOUT, ARGUMENTS, HEADS, heads_of

ROWS = """
cls_token                   _ _ x@first
pos_embed                   _ position x@first
patch_embed.proj.*          x@first <- channel row column
blocks.{{}}.norm1.*           scale x
blocks.{{}}.attn.qkv.weight?  [(head qk)|(head qk)|(head vo)] <- x
blocks.{{}}.attn.q_bias?      (head qk)
blocks.{{}}.attn.v_bias?      (head vo)
blocks.{{}}.attn.q_proj.*?    (head qk) <- x
blocks.{{}}.attn.k_proj.*?    (head qk) <- x
blocks.{{}}.attn.v_proj.*?    (head vo) <- x
blocks.{{}}.attn.norm.*?      scale (head vo)
blocks.{{}}.attn.proj.*       y <- (head vo)
blocks.{{}}.gamma_1?          scale y
blocks.{{}}.norm2.*           scale y
blocks.{{}}.mlp.fc1.*?        {fc1} <- y
blocks.{{}}.mlp.fc1_g.*?      ffn <- y
blocks.{{}}.mlp.fc1_x.*?      ffn <- y
blocks.{{}}.mlp.norm.*?       scale ffn
blocks.{{}}.gamma_2?          scale x@next
blocks.{{}}.mlp.fc2.*         x@next <- ffn
"""

SHORTCUTS = """
blocks.{}.norm1   x -> y        blocks.{}.drop_path1
blocks.{}.norm2   y -> x@next   blocks.{}.drop_path2
"""


def table(config: Config, names: frozenset[str]) -> Table:
    name = config["architecture"]
    if name.startswith("eva02_enormous"):
        raise ArchitectureError(
            f"timm-eva: {name} norms behind its branches", hint="there is no table for this size"
        )
    axes: tuple[Axis, ...] = ATTENTION
    if name.startswith("eva02"):
        qk = rotary("qk", "head", interleaved=True)
        axes = tuple(qk if axis.name == "qk" else axis for axis in axes)
    stack = Stack(
        "layer",
        depth(names, "blocks.{}."),
        ROWS.format(fc1="[ffn|ffn]" if config["packed"] else "ffn"),
        (*axes, POSITION, *PATCH),
        sizes={"head": config["num_heads"]},
        shortcuts=SHORTCUTS,
    )
    return Table(
        stacks=(stack,),
        axes=(LABEL,),
        heads=HEADS.format(pooled="layer.x@last"),
        outputs={} if "head.weight" in names else {"output": "layer.x@last"},
    )


def complete(config: Config, shapes: Shapes) -> dict[str, Any]:
    """With the number of heads, which timm's names imply, and the kind of MLP."""
    first = shapes.get("blocks.0.mlp.fc1.weight", (0,))[0]
    packed = first == 2 * shapes["blocks.0.mlp.fc2.weight"][1]
    heads = heads_of(config, shapes["blocks.0.norm1.weight"][0])
    return {**config, "num_heads": heads, "packed": packed}


FAMILIES = (
    Family(
        name="timm-eva",
        library="timm",
        table=table,
        complete=complete,
        model_types=("eva02_*", "eva_giant_*"),
        inputs=("image",),
        known_keys=ABOUT | ARGUMENTS,
    ),
)
