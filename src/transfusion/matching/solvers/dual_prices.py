"""Dual prices of units at which each place prefers a different unit, from which a large assignment starts.

Every place spreads its demand over all units by a softmax of gain minus price, and a unit with a demand above
one becomes dearer. The temperature falls step by step, so that prices first find their magnitude. The final
prices are nearly those of the best permutation, so that few pairs remain candidates. A round is one pass over
the gain in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WIDEST, NARROWEST, STEP = 8.0, 0.01, 0.6
"""The temperature in standard deviations of the gain: the first, the last, and the factor of each round."""
HASTE = 1.6
"""Prices move by this factor more than demand implies: half of the rounds suffice."""
FEWEST = 8
"""At high temperatures a sample of places is enough: one block of rows in so many."""
_CELLS = 2**17
"""Numbers that are read at a time: few enough to stay in a cache."""
_LEAST = -60.0
"""The least exponent of demand: denormal numbers would be slow."""

Numbers = NDArray[np.float64]


def blocks(gain: Tensor, first: int = 0, every: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Yield the gain in blocks of rows, or one block in ``every``."""
    height = max(1, _CELLS // len(gain))
    for start in range(first * height, len(gain), every * height):
        rows = slice(start, min(start + height, len(gain)))
        yield rows, gain[rows]


def first_prices(gain: Tensor, spread: float) -> Numbers:
    """Return prices that nearly balance demand; ``spread`` is the standard deviation of the gain."""
    prices = np.zeros(len(gain))
    width, number = WIDEST, 0
    while width >= NARROWEST:
        every = max(1, min(FEWEST, int(FEWEST * width), len(gain) * len(gain) // (_CELLS * FEWEST)))
        demand = _demand(gain, prices, width * spread, number % every, every)
        prices += HASTE * width * spread * np.log(np.maximum(demand, 1e-6))
        width, number = width * STEP, number + 1
    return prices if np.isfinite(prices).all() else np.zeros(len(gain))


def _demand(gain: Tensor, prices: Numbers, width: float, first: int, every: int) -> Numbers:
    """Return the total demand for every unit."""
    asked = torch.from_numpy(prices).float()
    demand, places = torch.zeros(len(gain)), 0
    for rows, block in blocks(gain, first, every):
        share = block - asked
        most = share.amax(1, keepdim=True) * (-1 / width)
        torch.add(most, share, alpha=1 / width, out=share).clamp_min_(_LEAST).exp_()
        share /= share.sum(1, keepdim=True)
        demand += share.sum(0)
        places += rows.stop - rows.start
    return demand.double().numpy() * (len(gain) / places)
