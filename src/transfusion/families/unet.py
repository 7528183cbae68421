"""The UNet of Stable Diffusion 1.5, 2 and XL as in diffusers: convolutions, and attention to text.

A group norm normalises neighbouring channels together, so channels move within their group only. After a
concatenation of two streams the groups are others: the channels of a stream are then divided into cells that
lie in one group of every norm. Between the two convolutions of a residual block, whole groups move as well.
Attention has a stream of its own, from its first to its last projection, with a point after every branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.table import Config, Shapes
from transfusion.errors import ArchitectureError
from transfusion.families.functions import needs_config

HEADS: dict[tuple[int, ...], int | list[int]] = {
    (320, 640, 1280, 1280, 768): 8,
    (320, 640, 1280, 1280, 1024): [5, 10, 20, 20],
    (320, 640, 1280, 2048): [5, 10, 20],
    (384, 768, 1536, 1536, 1280): [6, 12, 24, 24],
}
"""The numbers of heads in the published models, by the widths of their levels and of the text."""
PLAIN_DOWN, DOWN, PLAIN_UP, UP = "DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"


@dataclass
class _Plan:
    """The streams and modules of one UNet, in the order of the forward pass."""

    groups: int
    cells: dict[str, int] = field(default_factory=dict)
    """The size of a stream's cells."""
    sizes: dict[str, int] = field(default_factory=dict)
    blocks: list[tuple[Any, ...]] = field(default_factory=list)
    """Of each block its kind, place and stack, the channels that it reads and writes, its depth and heads."""

    def stream(self, name: str, size: int) -> str:
        self.sizes[name] = self.cells[name] = size
        return name

    def normalise(self, *streams: str) -> None:
        """Divide the cells of streams that one group norm normalises together."""
        group, start = sum(self.sizes[one] for one in streams) // self.groups, 0
        for one in streams:
            self.cells[one] = gcd(self.cells[one], group, start)
            start += self.sizes[one]

    def add(self, kind: str, place: str, sources: tuple[str, ...], target: str, *more: int) -> None:
        parts = "|".join(map(_channels, sources))
        source = parts if len(sources) == 1 else f"[{parts}]"
        self.blocks.append((kind, place, _stack(place), source, _channels(target), *(more or (1,))))

    def resnet(self, place: str, sources: tuple[str, ...], size: int) -> str:
        """Add a residual block; return the stream that it ends in: its own, if its shortcut has weights."""
        plain = sum(self.sizes[one] for one in sources) == size
        if plain and len(sources) > 1:
            raise ArchitectureError(
                f"unet: {place} adds a concatenation of two streams to its output",
                hint="there is no table for it",
            )
        self.normalise(*sources)
        target = sources[0] if plain else self.stream(f"{_stack(place)}_out", size)
        self.add("resnet", place, sources, target)
        return target

    def transformer(self, place: str, stream: str, depth: int, heads: int) -> None:
        """Add the transformer blocks of one place."""
        self.normalise(stream)
        self.add("transformer", place, (stream,), stream, depth, heads)

    def resample(self, place: str, source: str) -> str:
        """Add a convolution between two resolutions."""
        target = self.stream(f"{_stack(place)}_out", self.sizes[source])
        self.add("resample", place, (source,), target)
        return target


def _stack(place: str) -> str:
    return place.replace(".", "_")


def _channels(stream: str) -> str:
    return f"({stream}.cell {stream}.channel)"


def _each(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * count


def unet_plan(config: Config) -> tuple[str, str, list[tuple[Any, ...]], list[tuple[str, int]]]:
    """Return the channels of the first and of the last stream, all blocks, and the size of all cells."""
    channels = config["block_out_channels"]
    levels = len(channels)
    layers = _each(config["layers_per_block"], levels)
    depths = _each(config.get("transformer_layers_per_block") or 1, levels)
    heads = _each(config.get("num_attention_heads") or config["attention_head_dim"], levels)
    plan = _Plan(config["norm_num_groups"])
    x = first = plan.stream("conv_in", channels[0])
    skips = [x]
    for level, kind in enumerate(config["down_block_types"]):
        name = f"down_blocks.{level}"
        for layer in range(layers[level]):
            x = plan.resnet(f"{name}.resnets.{layer}", (x,), channels[level])
            if kind == DOWN:
                plan.transformer(f"{name}.attentions.{layer}", x, depths[level], heads[level])
            skips.append(x)
        if level < levels - 1:
            x = plan.resample(f"{name}.downsamplers.0", x)
            skips.append(x)
    x = plan.resnet("mid_block.resnets.0", (x,), channels[-1])
    plan.transformer("mid_block.attentions.0", x, depths[-1], heads[-1])
    x = plan.resnet("mid_block.resnets.1", (x,), channels[-1])
    for up, kind in enumerate(config["up_block_types"]):
        name, level = f"up_blocks.{up}", levels - 1 - up
        for layer in range(layers[level] + 1):
            x = plan.resnet(f"{name}.resnets.{layer}", (x, skips.pop()), channels[level])
            if kind == UP:
                plan.transformer(f"{name}.attentions.{layer}", x, depths[level], heads[level])
        if level:
            x = plan.resample(f"{name}.upsamplers.0", x)
    plan.normalise(x)
    return _channels(first), _channels(x), plan.blocks, list(plan.cells.items())


def unet_from_shapes(shapes: Shapes) -> dict[str, Any]:
    """The configuration; the numbers of heads are those of the published model of these sizes."""
    levels = range(depth(shapes, "down_blocks.{}."))
    channels = [shapes[f"down_blocks.{level}.resnets.0.conv1.weight"][0] for level in levels]
    text = shapes["mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight"][1]
    if (known := (*channels, text)) not in HEADS:
        raise needs_config("unet", f"the number of attention heads, at widths {channels},")
    depths = [
        max(1, depth(shapes, f"{place}.attentions.0.transformer_blocks.{{}}."))
        for place in (*(f"down_blocks.{level}" for level in levels[:-1]), "mid_block")
    ]

    def kinds(side: str, attending: str, plain: str) -> list[str]:
        norms = (f"{side}_blocks.{level}.attentions.0.norm.weight" for level in levels)
        return [attending if norm in shapes else plain for norm in norms]

    told = shapes.get("add_embedding.linear_1.weight")
    wish = shapes.get("time_embedding.cond_proj.weight")
    return {
        "_class_name": "UNet2DConditionModel",
        "in_channels": shapes["conv_in.weight"][1],
        "out_channels": shapes["conv_out.weight"][0],
        "block_out_channels": channels,
        "layers_per_block": depth(shapes, "down_blocks.0.resnets.{}."),
        "down_block_types": kinds("down", DOWN, PLAIN_DOWN),
        "up_block_types": kinds("up", UP, PLAIN_UP),
        "norm_num_groups": 32,
        "cross_attention_dim": text,
        "attention_head_dim": HEADS[known],
        "transformer_layers_per_block": depths,
        "use_linear_projection": len(shapes["mid_block.attentions.0.proj_in.weight"]) == 2,
        "addition_embed_type": told and "text_time",
        "addition_time_embed_dim": told and 256,
        "projection_class_embeddings_input_dim": told and told[1],
        "time_cond_proj_dim": wish and wish[1],
    }


# ── the names in files of Stable Diffusion as their authors distribute them ──────────────────

# Their blocks are numbered through: two layers and a change of resolution at a time, or three layers.
RESNET_THERE = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
PLACES = {
    **{f"input_blocks.{1 + 3 * i + j}": f"down_blocks.{i} {j}" for i in range(4) for j in range(2)},
    **{f"output_blocks.{3 * i + j}": f"up_blocks.{i} {j}" for i in range(4) for j in range(3)},
}
TRANSFORMER_THERE = """
norm proj_in proj_out
transformer_blocks.{}.norm1 transformer_blocks.{}.norm2 transformer_blocks.{}.norm3
transformer_blocks.{}.attn1.to_q transformer_blocks.{}.attn1.to_k transformer_blocks.{}.attn1.to_v
transformer_blocks.{}.attn2.to_q transformer_blocks.{}.attn2.to_k transformer_blocks.{}.attn2.to_v
transformer_blocks.{}.attn1.to_out.0 transformer_blocks.{}.attn2.to_out.0
transformer_blocks.{}.ff.net.0.proj transformer_blocks.{}.ff.net.2
"""
ENDS_THERE = """
input_blocks.0.0   conv_in
time_embed.0       time_embedding.linear_1
time_embed.2       time_embedding.linear_2
label_emb.0.0      add_embedding.linear_1
label_emb.0.2      add_embedding.linear_2
out.0              conv_norm_out
out.2              conv_out
"""


def _original_names() -> Iterator[str]:
    """Yield the authors' name of every module, and ours."""
    resnets = {"middle_block.0": "mid_block.resnets.0", "middle_block.2": "mid_block.resnets.1"}
    attentions = {"middle_block.1": "mid_block.attentions.0"}
    for there, here in PLACES.items():
        block, layer = here.split()
        resnets[f"{there}.0"] = f"{block}.resnets.{layer}"
        attentions[f"{there}.1"] = f"{block}.attentions.{layer}"
    for there, here in resnets.items():
        yield from (f"{there}.{theirs}   {here}.{ours}" for theirs, ours in RESNET_THERE.items())
    for there, here in attentions.items():
        yield from (f"{there}.{name}   {here}.{name}" for name in TRANSFORMER_THERE.split())
    for level in range(3):
        yield f"input_blocks.{3 * level + 3}.0.op   down_blocks.{level}.downsamplers.0.conv"
        for place in (1, 2):
            yield f"output_blocks.{3 * level + 2}.{place}.conv   up_blocks.{level}.upsamplers.0.conv"
    yield from ENDS_THERE.strip().splitlines()


def unet_names() -> str:
    """Return the authors' names of all modules, and ours."""
    return "\n".join(_original_names())
