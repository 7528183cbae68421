"""Changes of position embeddings and of patch kernels, for another grid or another number of positions."""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor, nn

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import Layout, size_of
from transfusion.model.part_roles import is_place


def resample(value: Tensor, layout: Layout, b: Architecture, *, grid: bool) -> Tensor:
    """Return a change for as many positions, or pixels of a patch, as B has; other changes stay.

    ``layout`` is the one in B. ``grid`` if positions are those of patches.
    """
    places = [dim for dim, item in enumerate(layout.items) if is_place(item)]
    if not places:
        return value
    sizes = [size_of(layout.items[dim], b.sizes) for dim in places]
    if len(places) == 2:  # the pixels of a patch
        return resampled_kernel(value, *sizes)
    by_place = value.movedim(places[0], 0)
    table = resampled_positions(by_place.reshape(len(by_place), -1), sizes[0], grid=grid)
    return table.reshape(sizes[0], *by_place.shape[1:]).movedim(0, places[0])


def resampled_kernel(kernel: Tensor, rows: int, columns: int) -> Tensor:
    """Return kernels (outputs, channels, rows, columns) for patches of another size.

    A patch that shows the same thing in another size gets the same answer.
    """
    before = kernel.shape[-2:]
    if tuple(before) == (rows, columns):
        return kernel
    made = nn.functional.interpolate(
        kernel, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True
    )
    return made * (before[0] * before[1] / (rows * columns))


def resampled_positions(table: Tensor, count: int, *, grid: bool) -> Tensor:
    """Return position embeddings (positions, units) for another number of positions.

    Those of a grid of patches are resampled in two dimensions; the rows before the grid belong to other
    tokens and stay. Positions in a text stay in their places, and further ones get 0.
    """
    if len(table) == count:
        return table
    if not grid:
        made = table.new_zeros(count, *table.shape[1:])
        kept = min(count, len(table))
        made[:kept] = table[:kept]
        return made
    ours, theirs = isqrt(len(table)), isqrt(count)
    before, room = len(table) - ours**2, count - theirs**2
    square = table[before:].reshape(1, ours, ours, -1).movedim(-1, 1)
    resized = nn.functional.interpolate(
        square, size=(theirs, theirs), mode="bilinear", align_corners=False, antialias=True
    )
    rows = resized.movedim(1, -1).reshape(theirs**2, -1)
    others = table.new_zeros(room, table.shape[-1])
    others[: min(before, room)] = table[: min(before, room)]
    return torch.cat([others, rows])
