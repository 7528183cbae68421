"""The number of heads of a timm model, which its name implies, and the kind of its MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfusion.architecture.table import Config, Shapes
from transfusion.errors import ArchitectureError

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
    heads = arguments.get("num_heads")
    if heads is None and "embed_dim" not in arguments:
        heads = 16 if name == "vit_base_patch16_gap_224" else _named(name).get(width)
    if heads is None:
        raise ArchitectureError(
            f"timm-vit: {name} of width {width}: neither its name nor its arguments tell the number of"
            " attention heads",
            hint='say it in config.json: "model_args": {"num_heads": …}',
        )
    return int(heads)


def _named(name: str) -> Mapping[int, int]:
    """The widths that a name of timm's stands for, and their numbers of heads."""
    words = name.split("_")
    return next((widths for sizes, widths in SIZES.items() if not {*sizes.split()}.isdisjoint(words)), {})
