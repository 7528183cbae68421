"""Functions that texts of families call: which blocks and units are rotated, and how many heads there are."""

from __future__ import annotations

from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.table import Config, Shapes
from transfusion.errors import ArchitectureError

NO_CONFIG = (
    "put the model's config.json (open_clip_config.json of an open_clip model) beside the weights, or give it"
    " with `config`"
)
PUBLISHED = {"sd3": {1536: 24}, "wan": {1536: 12, 3072: 24, 5120: 40}}
"""The number of heads in published models whose shapes do not tell it, by width."""


def rope_blocks(config: Config) -> list[int]:
    """Return the blocks with rotary positions, as ``no_rope_layers`` (1: rotary) or its interval says."""
    depth, every = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    listed = config.get("no_rope_layers") or [(i + 1) % every for i in range(depth)]
    return [i for i, rotates in enumerate(listed) if rotates]


def sliding_blocks(config: Config) -> list[int]:
    """Return the blocks whose attention slides, as ``layer_types`` or the pattern of older files says."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 4
    if not isinstance(every, int):
        raise ArchitectureError(
            f"sliding_window_pattern = {every!r:.40} does not tell which blocks slide without layer_types",
            hint="save the model again with the installed transformers, which writes layer_types",
        )
    return [i for i in range(config["num_hidden_layers"]) if (i + 1) % every]


def full_blocks(config: Config) -> list[int]:
    """Return the blocks with full attention, as ``layer_types`` or the interval of older files says."""
    kinds, depth = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is not None:
        return [i for i, kind in enumerate(kinds[:depth]) if kind == "full_attention"]
    every = config.get("full_attention_interval") or 4
    return [i for i in range(depth) if (i + 1) % every == 0]


def rotated(config: Config, head_size: int, default: float) -> int:
    """Return the number of units of a head that rotary positions rotate."""
    parameters = config.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor")
    for key in ("partial_rotary_factor", "rotary_pct"):
        share = config.get(key) if share is None else share
    return int(head_size * (default if share is None else share))


def kv_blocks(config: Config, kind: str, role: str) -> list[int]:
    """Return the blocks of a kind whose keys and values are only their ``own``, or ``given`` to later blocks.

    The block that gives, and those that have none, are the ones that a third role, ``reads``, stands for.
    """
    kinds, count = config["layer_types"], config.get("num_kv_shared_layers") or 0
    first = config["num_hidden_layers"] - count
    have = [i for i, one in enumerate(kinds[:first]) if one == kind]
    read = [i for i, one in enumerate(kinds) if one == kind and i >= first]
    given = have[-1:] if read else []
    return {"own": have[: len(have) - len(given)], "given": given, "reads": [*given, *read]}[role]


RECURRENT = ("linear_attention", "mamba", "mamba2")
"""What configurations call a block with a state."""
NEMOTRON = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The letters of Nemotron-H's older files."""


def block_kinds(config: Config) -> list[str]:
    """Return what every block is, under the names of today."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None and isinstance(pattern := config.get("hybrid_override_pattern"), str):
        kinds = [NEMOTRON.get(letter, letter) for letter in pattern]
    names = {**dict.fromkeys(RECURRENT, "linear_attention"), "attention": "full_attention"}
    return [names.get(kind, kind) for kind in kinds or ()]


def blocks_of_kind(config: Config, kind: str) -> list[int]:
    """Return the blocks of a kind."""
    return [i for i, one in enumerate(block_kinds(config)) if one == kind]


def recurrent_blocks(config: Config) -> list[int]:
    """Return the blocks with a state: all, if the configuration does not say which."""
    return (
        blocks_of_kind(config, "linear_attention")
        if block_kinds(config)
        else list(range(config["num_hidden_layers"]))
    )


def full_attention_blocks(config: Config) -> list[int]:
    """Return the blocks of LFM2 with attention, as ``layer_types`` or the numbers of older files say."""
    if (kinds := block_kinds(config)) or (numbers := config.get("full_attn_idxs")) is None:
        return [i for i in range(config["num_hidden_layers"]) if not kinds or kinds[i] == "full_attention"]
    return list(numbers)


def sparse_blocks(config: Config) -> list[int]:
    """Return the blocks with routers that learn: ``mlp_layer_types``, or what follows the dense ones."""
    kinds, depth = config.get("mlp_layer_types"), config["num_hidden_layers"]
    if kinds is not None:
        return [i for i, kind in enumerate(kinds) if kind in ("sparse", "moe")]
    return list(range(config.get("first_k_dense_replace") or 0, depth))


def far_head_size(config: Config) -> int:
    """Return the size of heads of Gemma 4 that attend to the whole text."""
    own = config.get("per_layer_config") or {}  # the blocks of other sizes than head_dim
    sizes = [one["head_dim"] for one in own.values() if isinstance(one, dict) and "head_dim" in one]
    return int(sizes[0] if sizes else config.get("global_head_dim") or 512)


def far_pairs(config: Config) -> int:
    """Return the number of pairs of units of such a head that are rotated."""
    size = far_head_size(config)
    parameters = (config.get("rope_parameters") or {}).get("full_attention") or {}
    if parameters.get("rope_type", "proportional") != "proportional":
        return size // 2
    share = parameters.get("partial_rotary_factor")
    return int((0.25 if share is None else share) * size // 2)


def stage_depths(shapes: Shapes) -> list[int]:
    """Return the number of blocks of each stage of a Swin."""
    stages = range(depth(shapes, "encoder.layers.{}."))
    return [depth(shapes, f"encoder.layers.{i}.blocks.{{}}.") for i in stages]


def hiera_blocks(depths: list[int]) -> list[tuple[int, int, int]]:
    """Return the number of every block of a Hiera, and the stages that it reads and that it ends in."""
    stages = [stage for stage, count in enumerate(depths) for _ in range(count)]
    return [(number, stages[max(number - 1, 0)], stage) for number, stage in enumerate(stages)]


def convnext_sizes(shapes: Shapes) -> tuple[list[int], list[int]]:
    """Return the number of blocks of each stage of a ConvNeXt, and its channels."""
    stages = range(depth(shapes, "stages.{}."))
    depths = [depth(shapes, f"stages.{i}.layers.{{}}.") for i in stages]
    return depths, [shapes[f"stages.{i}.layers.0.gamma"][0] for i in stages]


def points_read(layers: int | list[int], depth: int) -> str:
    """Return the points of a tower that LLaVA's projection reads, side by side."""
    several = layers if isinstance(layers, list) else [layers]
    points = [f"vision.x@{layer % (depth + 1)}" for layer in several]
    return points[0] if len(points) == 1 else f"[{'|'.join(points)}]"


def heads_of_all(config: Config) -> str:
    """Return the heads of all blocks, side by side."""
    heads = [f"layer.head@{i}" for i in range(config["num_hidden_layers"])]
    return heads[0] if len(heads) == 1 else f"[{'|'.join(heads)}]"


def from_block(first: int) -> str:
    """Return the mark of the blocks from a number on, in the name of a row."""
    return f"{{{first}+}}" if first else "{}"


def dual_blocks(shapes: Shapes) -> list[int]:
    """Return the blocks of a Stable Diffusion 3 that attend to the image a second time."""
    blocks = range(depth(shapes, "transformer_blocks.{}."))
    return [block for block in blocks if f"transformer_blocks.{block}.attn2.to_q.weight" in shapes]


def patch_sizes(shapes: Shapes) -> tuple[int, int, int]:
    """Return the side and the frames of Z-Image's patches, which stand in a name, and their inputs."""
    first = next((name for name in shapes if name.startswith("all_x_embedder.")), "")
    side, frames = (int(size) for size in first.split(".")[1].split("-"))
    return side, frames, shapes[f"all_x_embedder.{side}-{frames}.weight"][1]


def places(rows: int, columns: int) -> list[list[float]]:
    """Return Flux's numbers for the places of patches: an image, a row and a column."""
    return [[0.0, 1.0 + row, 1.0 + column] for row in range(rows) for column in range(columns)]


def motion_channels(shapes: Shapes) -> dict[str, int]:
    """Return the channels of a motion encoder, by the side of the pictures that it makes of a face's."""
    blocks = depth(shapes, "motion_encoder.res_blocks.{}.")
    names = ["conv_in", *(f"res_blocks.{i}.conv2" for i in range(blocks))]
    sides = [str(2 ** (blocks + 2 - i)) for i in range(blocks + 1)]
    return {side: shapes[f"motion_encoder.{name}.weight"][0] for side, name in zip(sides, names, strict=True)}


def published_heads(family: str, width: int) -> int:
    """Return the number of heads of the published model of a width."""
    if width not in PUBLISHED[family]:
        raise needs_config(family, f"the number of attention heads, at width {width},")
    return PUBLISHED[family][width]


def needs_config(family: str, what: str) -> ArchitectureError:
    """Return the error for a model whose shapes leave something open."""
    return ArchitectureError(f"{family}: {what} does not follow from the shapes", hint=NO_CONFIG)


# ── timm ──────────────────────────────────────────────────────────────────────────────────

SIZES = {
    "tiny": {192: 3},
    "xsmall wee pwee dwee dpwee": {256: 4},
    "little dlittle": {320: 5},
    "small": {384: 6},
    "medium mediumd": {512: 8},
    "betwixt": {640: 10},
    "base": {768: 12, 896: 14},
    "so150m2": {832: 13},
    "so150m": {896: 14},
    "large intern300m": {1024: 16},
    "so400m": {1152: 16},
    "huge": {1280: 16},
    "giant": {1408: 16, 1536: 24},
    "giantopt": {1536: 16},
    "gigantic": {1664: 16},
}
"""What timm's names say: of each size, the widths and their numbers of heads."""


def timm_settings(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Return the configuration with the number of heads, and with whether the MLP is packed."""
    first = shapes.get("blocks.0.mlp.fc1.weight", (0,))[0]
    packed = first == 2 * shapes["blocks.0.mlp.fc2.weight"][1]
    heads = heads_of(config, shapes["blocks.0.norm1.weight"][0])
    return {**config, "num_heads": heads, "packed": packed}


def heads_of(config: Config, width: int) -> int:
    """The number of heads, as its name and its arguments say; a width alone does not tell it."""
    arguments, name = config.get("model_args") or {}, config.get("architecture", "")
    heads, words = arguments.get("num_heads"), name.split("_")
    if heads is None and "embed_dim" not in arguments:
        named = (widths for sizes, widths in SIZES.items() if not {*sizes.split()}.isdisjoint(words))
        heads = 16 if name == "vit_base_patch16_gap_224" else next(named, {}).get(width)
    if heads is None:
        raise ArchitectureError(
            f"timm-vit: {name} of width {width}: neither its name nor its arguments tell the number of"
            " attention heads",
            hint='say it in config.json: "model_args": {"num_heads": …}',
        )
    return int(heads)
