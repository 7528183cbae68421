"""Corruptions of inputs: what real inputs suffer, applied to synthetic ones, drawn afresh for every input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.synthetic_texts import text_inputs

LOUDEST = 2.5
"""The largest standard deviation of added noise, in units of the inputs' own."""
SHORTEST, LONGEST = 2, 12
"""The number of tokens of the pieces that a recombined text is made of."""


def corrupted_images(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Corrupt normalised images: noise, negatives, mosaics, covered areas, lost colour; some stay."""
    kinds = torch.randint(len(_IMAGE_CORRUPTIONS), (len(pixels),), generator=generator)
    corrupted = pixels.clone()
    for number, corrupt in enumerate(_IMAGE_CORRUPTIONS):
        chosen = kinds == number
        if chosen.any():
            corrupted[chosen] = corrupt(pixels[chosen], generator)
    return corrupted


def noisy(values: Tensor, generator: torch.Generator) -> Tensor:
    """Add white noise, with a strength of its own for every input."""
    strength = LOUDEST * torch.rand(len(values), *[1] * (values.ndim - 1), generator=generator)
    return values + strength * torch.randn(values.shape, generator=generator)


def _same(images: Tensor, generator: torch.Generator) -> Tensor:
    return images


def _negative(images: Tensor, generator: torch.Generator) -> Tensor:
    return -images


def _mosaic(images: Tensor, generator: torch.Generator) -> Tensor:
    """Replace square cells of one size by their means."""
    rows, columns = images.shape[2:]
    sizes = [size for size in (2, 4, 8, 16, 32) if 2 * size <= min(rows, columns)] or [1]
    size = sizes[int(torch.randint(len(sizes), (), generator=generator))]
    cells = nn.functional.avg_pool2d(images, size, ceil_mode=True)
    enlarged = nn.functional.interpolate(cells, scale_factor=size, mode="nearest")
    return enlarged[:, :, :rows, :columns]


def _covered(images: Tensor, generator: torch.Generator) -> Tensor:
    """Cover a rectangle of every image with one shade."""
    count, _, rows, columns = images.shape
    covered = torch.ones(count, 1, 1, 1, dtype=torch.bool)
    for dim, size in ((2, rows), (3, columns)):
        extent = size * (0.25 + 0.4 * torch.rand(count, 1, generator=generator))
        start = (size - extent) * torch.rand(count, 1, generator=generator)
        steps = torch.arange(size)
        inside = (steps >= start) & (steps < start + extent)
        covered = covered & inside.reshape(count, 1, *((size, 1) if dim == 2 else (1, size)))
    shade = 4 * (torch.rand(count, 1, 1, 1, generator=generator) - 0.5)
    return torch.where(covered, shade, images)


def _grey(images: Tensor, generator: torch.Generator) -> Tensor:
    """Remove the colour, and add some noise."""
    grey = images.mean(1, keepdim=True).expand_as(images)
    strength = torch.rand(len(images), 1, 1, 1, generator=generator)
    return grey + strength * torch.randn(images.shape, generator=generator)


_IMAGE_CORRUPTIONS: tuple[Callable[[Tensor, torch.Generator], Tensor], ...] = (
    _same,
    noisy,
    noisy,
    _negative,
    _mosaic,
    _covered,
    _grey,
)


def recombined_texts(subject: ProbedModel, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Make texts of short pieces of the given ones, each piece at the place that it had.

    The special tokens around a text stay, because they are at the same place in all texts.
    """
    count, length = ids.shape
    pieces = torch.randint(SHORTEST, LONGEST + 1, (count, length), generator=generator).cumsum(1)
    ends = torch.zeros(count, length + LONGEST + 1, dtype=torch.int64)
    ends.scatter_(1, pieces.clamp(max=length), 1)
    piece = ends[:, :length].cumsum(1)
    origin = torch.randint(count, (count, length), generator=generator).gather(1, piece)
    return text_inputs(subject, ids[origin, torch.arange(length)])
