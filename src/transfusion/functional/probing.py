"""Probes that look a little like what models are made for, and are made of nothing but noise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from transfusion.model import Model
from transfusion.probes import probes

BATCH = 32
GRIDS = (3, 5, 9, 14)
"""Images are noise on grids of so many cells, smoothly enlarged: blobs of several sizes."""


def made_up(model: Model, module: nn.Module, count: int, seed: int) -> list[dict[str, Tensor]]:
    """So many inputs, in batches, for every model of this architecture."""
    config = getattr(module, "config", None)  # the library's knows the defaults, too
    settings = config.to_dict() if config is not None else model.config
    sizes = [min(BATCH, count - start) for start in range(0, count, BATCH)]
    return [
        _in_pictures(
            probes(model.family, settings, batch=size, seed=seed * 1000 + number), seed * 1000 + number
        )
        for number, size in enumerate(sizes)
    ]


def _in_pictures(inputs: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same inputs, in float32, with smooth noise in the place of images."""
    result = {name: one.float() if one.is_floating_point() else one for name, one in inputs.items()}
    pixels = result.get("pixel_values")
    if pixels is not None and pixels.ndim == 4:
        generator = torch.Generator().manual_seed(seed)
        result["pixel_values"] = torch.cat(
            [smooth_noise(pixels.shape[1:], GRIDS[i % len(GRIDS)], generator) for i in range(len(pixels))]
        )
    return result


def smooth_noise(shape: torch.Size, cells: int, generator: torch.Generator) -> Tensor:
    """One image of unit variance: noise on a grid, enlarged."""
    channels, *extents = shape
    grid = torch.randn(1, channels, cells, cells, generator=generator)
    image = nn.functional.interpolate(grid, size=extents, mode="bicubic", align_corners=False)
    return image / image.std()
