"""Linear assignment: the permutation that collects the largest total gain.

A small gain is solved directly; a large one among candidate pairs, with a proof that no other pair does
better, or, of huge ones, with a bound on what may be missing. Dual prices of the units select the candidates.
The best permutation among them gives better prices, and any prices bound the total of every permutation: the
sum of all prices, and of the best gain minus price of every place. Other pairs that beat the bound join the
candidates, and the assignment is solved again until it is reached.

The first prices come from demand. Every place spreads its demand over all units by a softmax of gain minus
price, and a unit with a demand above one becomes dearer. The temperature falls step by step, so that prices
first find their magnitude. A round is one pass over the gain in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import lap
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.errors import AlignmentError
from transfusion.runtime.scratch import scratch

LARGE, HUGE = 4096, 12288
"""Sizes from which a gain is solved among candidates: where many places have the same best unit, which is
faster then (docs/benchmarks.md), and always."""
CROWDED = 0.5
"""A gain is crowded if fewer than this share of all units are the best for some place."""


@dataclass(frozen=True)
class Solution:
    """A permutation, and a bound on its distance from the best."""

    permutation: Map
    gap: float
    """The share of the bound that is missing, (bound - total) / |bound|: the largest over the rows."""
    exact: bool
    """Whether it is the best one, up to rounding."""


def solve(gain: Tensor, *, known: Map | None = None) -> Solution:
    """Return the best permutation for each row of a gain of shape (rows, size in B, size in A).

    ``known`` is the current permutation of the axis, which may speed up the solver.
    """
    gain = gain.cpu()
    if wants_candidates(gain):
        solution = _among_candidates(gain, known)
        if solution.exact or gain.shape[1] >= HUGE:
            return solution
    return Solution(_among_all(gain), 0.0, exact=True)


def assign(gain: Tensor) -> Map:
    """Return the best permutation for each row of a gain of shape (rows, size in B, size in A)."""
    return solve(gain).permutation


def best_totals(gain: Tensor) -> tuple[Map, Tensor]:
    """Return the best permutation for each row, and its total gain."""
    best = assign(gain)
    index = torch.from_numpy(best.index).to(gain.device).unsqueeze(2)
    return best, gain.gather(2, index).sum((1, 2), dtype=torch.float64)


def wants_candidates(gain: Tensor) -> bool:
    """Return whether a gain in memory is solved among candidates."""
    size = gain.shape[1]
    crowded = LARGE <= size < HUGE and min(map(_wanted, gain)) < CROWDED * size
    return crowded or size >= HUGE


def _wanted(gain: Tensor) -> int:
    """Return how many units are the best for some place."""
    best = [block.numpy().argmax(1) for _, block in row_chunks(gain)]
    return len(np.unique(np.concatenate(best)))


def _among_candidates(gain: Tensor, known: Map | None) -> Solution:
    found = [
        assign_among_candidates(one, known=known.index[row] if known is not None else None)
        for row, one in enumerate(gain)
    ]
    gap = max(one.gap for one in found)
    return Solution(Map.permutation(np.stack([one.index for one in found])), gap, exact=gap <= EXACT)


def _among_all(gain: Tensor) -> Map:
    costs = _costs(gain)
    if len(costs) == 1:
        return Map.permutation(lap.lapjvr(costs[0], return_cost=False)[1])
    return Map.permutation(np.stack(lap.lapjvr_batch(costs, return_cost=False, n_threads=1)[1]))


def _costs(gain: Tensor) -> NDArray[np.floating[Any]]:
    """Return for each place of B the loss with each unit of A against its best unit.

    The assignment is the same as for the negative gain, and takes half the time when rows start at zero.
    """
    costs = torch.sub(gain.amax(2, keepdim=True), gain, out=scratch("costs", gain.shape, gain))
    return cast("NDArray[np.floating[Any]]", costs.cpu().numpy())


# ── large assignments, among candidate pairs ─────────────────────────────────────────────


CANDIDATES = 48
"""About how many candidates every place and every unit has."""
JOINING = 32
"""The most pairs that join for every place in a round."""
ROUNDS = 40
EXACT = 1e-7
"""The share of the bound that may be missing: less than the rounding of the gain in float32."""
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
_SAMPLE = 512
"""About how many rows the standard deviation is computed from."""
_NEGLIGIBLE = 1e-12
"""Changes of prices below this share of the largest gain do not count."""
_DIGITS = 18
"""Losses are scaled to this power of two: the solver needs them below a million."""
_STEPS = 10_000
_TINY = 1e-35
_ROUNDING = 4 * float(np.finfo(np.float32).eps)

Index = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class SparseSolution:
    """A permutation, its total gain, and an upper bound of all permutations."""

    index: Index
    """The unit of A for each place of B."""
    total: float
    bound: float

    @property
    def gap(self) -> float:
        """The share of the bound that is missing."""
        missing = max(0.0, self.bound - self.total)
        return missing / abs(self.bound) if self.bound else float(missing > 0)


@dataclass(frozen=True)
class _Pairs:
    """Candidate pairs, sorted by place and then by unit."""

    keys: Index
    """place · size + unit"""
    gains: Numbers
    size: int

    @classmethod
    def of(cls, gain: Tensor, keys: Index) -> _Pairs:
        keys = np.unique(keys)
        return cls(keys, gain.numpy().reshape(-1)[keys].astype(np.float64), len(gain))

    def gain_of(self, index: Index) -> Numbers:
        """Return the gain of every place with its unit; these pairs must be candidates."""
        return self.gains[np.searchsorted(self.keys, np.arange(self.size) * self.size + index)]


def assign_among_candidates(
    gain: Tensor, *, known: Index | None = None, tolerance: float = EXACT
) -> SparseSolution:
    """Return the best permutation for a gain, with an upper bound as its proof.

    ``known`` is a permutation that is always among the candidates, such as that of an earlier sweep. The
    solver ends when the share of the bound that is missing is at most ``tolerance``.
    """
    size = len(gain)
    most, units = (one.numpy() for one in gain.max(1))
    if not np.isfinite(most).all():
        raise AlignmentError(
            "a gain is not a finite number", hint="look for weights that are infinite or not a number"
        )
    if len(np.unique(units)) == size:  # all places have different best units
        total = float(most.sum(dtype=np.float64))
        return SparseSolution(units, total, total)
    spread = gain[:: max(1, size // _SAMPLE)].numpy().std(dtype=np.float64)
    prices = first_prices(gain, max(float(spread), 1e-7 * float(np.abs(most).max()), _TINY))
    known = np.arange(size) if known is None else known
    pairs, prices = _first_candidates(gain, prices, np.arange(size) * size + known)
    best = None
    for _ in range(ROUNDS):
        index = _best(pairs, prices)
        prices = _dual_prices(pairs, index, prices)
        bound, joining = _bound_and_missing(gain, pairs.gain_of(index) - prices[index], prices)
        total = float(pairs.gain_of(index).sum())
        best = SparseSolution(index, total, min(bound, best.bound) if best else bound)
        if best.gap <= tolerance or not len(joining):
            break
        pairs = _Pairs.of(gain, np.concatenate([pairs.keys, joining]))
    assert best is not None
    return best


def _first_candidates(gain: Tensor, prices: Numbers, known: Index) -> tuple[_Pairs, Numbers]:
    """Return the best pairs at these prices for every place and every unit, and prices that are lowered until
    every unit is the best of some place.
    """
    size, count = len(gain), min(CANDIDATES, len(gain))
    asked, keys = torch.from_numpy(prices).float(), [known]
    left, tight = torch.empty(size), torch.empty(size)
    for rows, block in row_chunks(gain):
        best = (block - asked).topk(count)
        left[rows] = best.values[:, 0].float()
        places = np.arange(rows.start, rows.stop)[:, None]
        keys.append((places * size + best.indices.numpy()).reshape(-1))
    for some, block in row_chunks(gain.T):
        best = (block - left).topk(count)
        tight[some] = best.values[:, 0].float()
        keys.append((best.indices.numpy() * size + np.arange(some.start, some.stop)[:, None]).reshape(-1))
    return _Pairs.of(gain, np.concatenate(keys)), tight.double().numpy()


def _best(pairs: _Pairs, prices: Numbers) -> Index:
    """Return the best permutation among the candidates. Prices only make the solver faster."""
    places, units = np.divmod(pairs.keys, pairs.size)
    starts = np.searchsorted(places, np.arange(pairs.size + 1))
    after = pairs.gains - prices[units]
    losses = np.maximum.reduceat(after, starts[:-1])[places] - after
    losses = np.ldexp(losses, _DIGITS - np.frexp(losses.max())[1])
    found = lap.lapmod(
        pairs.size, losses, starts.astype(np.int32), units.astype(np.int32), return_cost=False
    )[0]
    return np.asarray(found, dtype=np.int64)


def _dual_prices(pairs: _Pairs, index: Index, prices: Numbers) -> Numbers:
    """Return prices at which every place prefers its own unit among its candidates: the middle between the
    lowest feasible prices above the given ones and the highest below.

    The pairs with the smallest losses are relaxed first, so that little is left to do with all of them.
    """
    places, units = np.divmod(pairs.keys, pairs.size)
    own = pairs.gain_of(index)
    slack = _NEGLIGIBLE * max(float(np.abs(own).max()), float(np.abs(prices).max()))
    held, lead = index[places], own[places] - pairs.gains
    loss = lead - prices[held] + prices[units]
    near = np.flatnonzero(loss <= np.partition(loss, len(loss) // 8)[len(loss) // 8])
    high, low = prices, -prices
    for some in (near, np.arange(len(loss))):
        high = _raised(high, held[some], units[some], lead[some], slack)
        low = _raised(low, units[some], held[some], lead[some], slack)
    return (high - low) / 2


def _raised(prices: Numbers, begin: Index, to: Index, lead: Numbers, slack: float) -> Numbers:
    """Return the lowest prices above the given ones with price[to] ≥ price[begin] − lead for every edge."""
    size, prices = len(prices), prices.copy()
    order = np.argsort(begin.astype(np.uint16 if size <= 2**16 else np.int64), kind="stable")
    begin, to, lead = begin[order], to[order], lead[order]
    starts = np.searchsorted(begin, np.arange(size + 1))
    way: Index | slice = slice(None)
    for _ in range(_STEPS):
        least, ends = prices[begin[way]] - lead[way], to[way]
        higher = np.flatnonzero(least > prices[ends] + slack)
        if not len(higher):
            break
        ends = ends[higher]
        np.maximum.at(prices, ends, least[higher])
        moved = np.flatnonzero(np.bincount(ends, minlength=size))
        count = starts[moved + 1] - starts[moved]
        way = np.repeat(starts[moved + 1] - np.cumsum(count), count) + np.arange(count.sum())
    return prices


def _bound_and_missing(gain: Tensor, left: Numbers, prices: Numbers) -> tuple[float, Index]:
    """Return the upper bound at these prices, and the pairs that would beat their place's current unit.

    ``left`` is the gain minus price of every place with its unit. A first pass in float32 leaves few pairs to
    compute in float64.
    """
    size = len(gain)
    asked = torch.from_numpy(prices).float()
    largest = max(float(np.abs(left).max()), float(np.abs(prices).max()))
    bound, found = float(prices.sum()), [np.empty(0, np.int64)]
    for rows, block in row_chunks(gain):
        near = torch.from_numpy(left[rows] - _ROUNDING * largest).float()[:, None]
        where = np.flatnonzero((block - asked >= near).numpy())
        place, unit = np.divmod(where, size)
        more = block.numpy().reshape(-1)[where] - prices[unit] - left[rows][place]
        most = np.zeros(len(block))
        np.maximum.at(most, place, more)
        bound += float((left[rows] + most).sum())
        pays = more > _NEGLIGIBLE * largest
        if not pays.any():
            continue
        order = np.lexsort((-more[pays], place[pays]))
        place, where = place[pays][order], where[pays][order]
        first = np.arange(len(place)) - np.searchsorted(place, place) < JOINING
        found.append(where[first] + rows.start * size)
    return bound, np.concatenate(found)


def row_chunks(gain: Tensor, first: int = 0, every: int = 1) -> Iterator[tuple[slice, Tensor]]:
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
    for rows, block in row_chunks(gain, first, every):
        share = block - asked
        most = share.amax(1, keepdim=True) * (-1 / width)
        torch.add(most, share, alpha=1 / width, out=share).clamp_min_(_LEAST).exp_()
        share /= share.sum(1, keepdim=True)
        demand += share.sum(0)
        places += rows.stop - rows.start
    return demand.double().numpy() * (len(gain) / places)
