"""Prices of units at which everybody would like to have another one: where a large assignment begins.

Every place spreads its demand over all units, more to those that gain it more after their price, and a unit
that is asked for by more than one place becomes dearer. At first demand is spread widely, so that prices find
their order of size; then it is narrowed down step by step. The prices that come out are nearly those of the
best permutation, so that few pairs remain worth looking at. A round is one pass over the gain in blocks of
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WIDEST, NARROWEST, STEP = 8.0, 0.01, 0.6
"""How widely demand is spread, in standard deviations of the gain: at first, at last, and by which factor
less in every round."""
HASTE = 1.6
"""Prices rise and fall by this much more than demand alone would ask for: half of the rounds suffice."""
FEWEST = 8
"""While demand is spread widely, a share of the places speaks for all: one block of rows in so many."""
_CELLS = 2**17
"""Numbers that are looked at together: they stay close to the processor."""
_LEAST = -60.0
"""Demand below e to this power counts as that; smaller numbers would be slow to compute with."""

Numbers = NDArray[np.float64]


class RowCosts(Protocol):
    """A square gain that is handed out in blocks of rows, such as one that is kept in a file."""

    @property
    def size(self) -> int:
        """The number of rows, and of columns."""

    def rows(self, start: int, stop: int) -> Tensor:
        """These rows, of shape (stop - start, size), in float32."""


class MemoryCosts:
    """A gain of shape (size in B, size in A) that is there as a whole."""

    def __init__(self, gain: Tensor) -> None:
        self.gain = gain
        self.size = len(gain)

    def rows(self, start: int, stop: int) -> Tensor:
        """These rows."""
        return self.gain[start:stop].cpu()


def blocks(gain: RowCosts, first: int = 0, every: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """The gain in blocks of rows, or every so manieth of them."""
    height = max(1, _CELLS // gain.size)
    for start in range(first * height, gain.size, every * height):
        rows = slice(start, min(start + height, gain.size))
        yield rows, gain.rows(rows.start, rows.stop)


def first_prices(gain: RowCosts, spread: float) -> Numbers:
    """Prices that nearly balance demand; ``spread`` is the standard deviation of the gain."""
    prices = np.zeros(gain.size)
    width, number = WIDEST, 0
    while width >= NARROWEST:
        every = max(1, min(FEWEST, int(FEWEST * width), gain.size * gain.size // (_CELLS * FEWEST)))
        demand = _demand(gain, prices, width * spread, number % every, every)
        prices += HASTE * width * spread * np.log(np.maximum(demand, 1e-6))
        width, number = width * STEP, number + 1
    return prices if np.isfinite(prices).all() else np.zeros(gain.size)


def _demand(gain: RowCosts, prices: Numbers, width: float, first: int, every: int) -> Numbers:
    """By how many places every unit is asked for."""
    asked = torch.from_numpy(prices).float()
    demand, places = torch.zeros(gain.size), 0
    for rows, block in blocks(gain, first, every):
        share = block - asked
        most = share.amax(1, keepdim=True) * (-1 / width)
        torch.add(most, share, alpha=1 / width, out=share).clamp_min_(_LEAST).exp_()
        share /= share.sum(1, keepdim=True)
        demand += share.sum(0)
        places += rows.stop - rows.start
    return demand.double().numpy() * (gain.size / places)
