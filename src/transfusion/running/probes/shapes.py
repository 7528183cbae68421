"""Images of overlapping shapes: edges, corners, flat and shaded areas of all sizes."""

from __future__ import annotations

from collections.abc import Callable
from math import pi

import torch
from torch import Tensor

FEWEST, MOST = 6, 30
"""The number of shapes in an image."""
SMALLEST, LARGEST = 0.08, 0.9
"""Radii as shares of half an image; small ones are more frequent."""


def overlapping_shapes(
    count: int, channels: int, rows: int, columns: int, generator: torch.Generator
) -> Tensor:
    """Draw ``count`` images with values between 0 and 1."""

    def draw(values: int) -> Tensor:
        return torch.rand(count, values, 1, 1, generator=generator)

    images = _colour(draw, channels).expand(-1, -1, rows, columns)
    shapes = FEWEST + (MOST - FEWEST) * draw(1)
    down, across = (torch.linspace(-1, 1, size) for size in (rows, columns))
    for number in range(MOST):
        radius = SMALLEST / (1 - draw(1) * (1 - SMALLEST / LARGEST))
        stretch, angle = torch.exp(1.6 * draw(1) - 0.8), pi * draw(1)
        right, below = across - (2.4 * draw(1) - 1.2), down[:, None] - (2.4 * draw(1) - 1.2)
        along = (right * angle.cos() + below * angle.sin()) / (radius * stretch)
        beside = (below * angle.cos() - right * angle.sin()) / (radius / stretch)
        inside = torch.sigmoid((1 - _distance(along, beside, draw(1))) * radius * min(rows, columns))
        inside = inside * (number < shapes)
        shade = 1 + 0.5 * (draw(1) - 0.5) * along
        stripes = 0.3 * (draw(1) - 0.5) * torch.sin(12 * draw(1) * along + 2 * pi * draw(1))
        images = images * (1 - inside) + inside * _colour(draw, channels) * (shade + stripes)
    return images.clamp(0, 1)


def _colour(draw: Callable[[int], Tensor], channels: int) -> Tensor:
    """Draw a colour for every image; its channels are similar."""
    grey = draw(1)
    return grey if channels == 1 else (grey + 0.5 * (draw(channels) - 0.5)).clamp(0, 1)


def _distance(along: Tensor, beside: Tensor, kind: Tensor) -> Tensor:
    """Return the distance from the centre, 1 at the edge, of an ellipse, a rectangle or a rhombus."""
    round_ = torch.sqrt(along.square() + beside.square())
    square = torch.maximum(along.abs(), beside.abs())
    return torch.where(kind < 1 / 3, round_, torch.where(kind < 2 / 3, square, along.abs() + beside.abs()))
