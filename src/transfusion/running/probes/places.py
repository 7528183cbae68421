"""Places: which activations of two models are about the same thing.

Two models may divide an input differently: a text into other tokens, an image into other patches. Activations
are paired by what they are about: the end of the same word, the same area of an image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Places(ABC):
    """The places of one model on one batch that have a counterpart in another model."""

    @abstractmethod
    def rows(self, values: Tensor) -> Tensor | None:
        """Return activations (batch, tokens, units) as rows, one for each place; None if they do not fit."""


class EveryPlace(Places):
    """All tokens: both models divide the input alike."""

    def rows(self, values: Tensor) -> Tensor | None:
        return values.reshape(-1, values.shape[-1])


@dataclass(frozen=True)
class GridPlaces(Places):
    """The patches of images, averaged over the cells of a coarser grid, and a class token."""

    patches: tuple[int, int]
    """The rows and columns of this model's patches."""
    cells: tuple[int, int]
    """The rows and columns of the common grid."""
    class_token: bool
    """Whether both models have a class token, which is the first."""

    def rows(self, values: Tensor) -> Tensor | None:
        if values.ndim == 2:  # a value for every image
            return values
        if values.ndim == 4:  # a convolution
            return self._cells(values) if tuple(values.shape[1:3]) == self.patches else None
        count = self.patches[0] * self.patches[1]
        if values.ndim != 3 or values.shape[1] < count:
            return None
        before, grid = values[:, : values.shape[1] - count], values[:, values.shape[1] - count :]
        rows = self._cells(grid.reshape(len(grid), *self.patches, grid.shape[-1]))
        if not self.class_token:
            return rows
        if not before.shape[1]:
            return None
        return torch.cat([before[:, 0], rows])

    def _cells(self, grid: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(grid.movedim(-1, 1), self.cells)
        return pooled.movedim(1, -1).reshape(-1, grid.shape[-1])


@dataclass(frozen=True)
class TokenPlaces(Places):
    """Chosen tokens of every text."""

    tokens: tuple[tuple[int, ...], ...]

    def rows(self, values: Tensor) -> Tensor | None:
        if values.ndim == 2 and len(values) == len(self.tokens):
            return values
        if values.ndim != 3 or len(values) != len(self.tokens):
            return None
        return torch.cat([one[list(chosen)] for one, chosen in zip(values, self.tokens, strict=True)])
