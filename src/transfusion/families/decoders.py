"""What the tables of decoders ask for that a line cannot say: which blocks and units are rotated."""

from __future__ import annotations

from transfusion.architecture.table import Config
from transfusion.errors import ArchitectureError


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


def rotated(config: Config, head_size: int, default: float) -> int:
    """Return the number of units of a head that rotary positions rotate."""
    parameters = config.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor")
    for key in ("partial_rotary_factor", "rotary_pct"):
        share = config.get(key) if share is None else share
    return int(head_size * (default if share is None else share))
