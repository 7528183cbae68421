"""Large assignments: solved among candidate pairs, and proven optimal among all pairs.

Dual prices of the units select the candidates. The best permutation among them gives better prices, and any
prices bound the total of every permutation: the sum of all prices, and of the best gain minus price of every
place. Other pairs that beat the bound join the candidates, and the assignment is solved again until it is
reached. The result is then the best permutation; otherwise the bound says how much may be missing.

The first prices come from demand. Every place spreads its demand over all units by a softmax of gain minus
price, and a unit with a demand above one becomes dearer. The temperature falls step by step, so that prices
first find their magnitude. A round is one pass over the gain in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import lap
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.errors import AlignmentError

CANDIDATES = 48
"""About how many candidates every place and every unit has."""
JOINING = 32
"""The most pairs that join for every place in a round."""
ROUNDS = 40
EXACT = 1e-7
"""The share of the bound that may be missing: less than the rounding of the gain in float32."""
_SAMPLE = 512
"""Rows and columns of the sample that sets the thresholds of candidates."""
_NEGLIGIBLE = 1e-12
"""Changes of prices below this share of the largest gain do not count."""
_SAMPLED_BLOCKS = 8
"""The standard deviation is computed from one block in this number."""
_MOST = 8 * CANDIDATES
"""The most first candidates of a place, where many pairs are equally good."""
_DIGITS = 18
"""Losses are scaled to this power of two: the solver needs them below a million."""
_STEPS = 10_000
_TINY = 1e-35
_ROUNDING = 4 * float(np.finfo(np.float32).eps)

Index = NDArray[np.int64]
Singles = NDArray[np.float32]


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
    def joined(cls, parts: Sequence[tuple[Index, Numbers]], size: int) -> _Pairs:
        """Join keys and gains of consecutive blocks of rows."""
        keys, gains = zip(*parts, strict=True)
        return cls(np.concatenate(keys), np.concatenate(gains), size)

    def union(self, other: _Pairs) -> _Pairs:
        """Return the union with other pairs."""
        at = np.searchsorted(self.keys, other.keys)
        new = self.keys[np.minimum(at, len(self.keys) - 1)] != other.keys
        at, keys, gains = at[new], other.keys[new], other.gains[new]
        return _Pairs(np.insert(self.keys, at, keys), np.insert(self.gains, at, gains), self.size)

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
    known = np.arange(size) if known is None else known
    start, spread = _first_look(gain, known)
    if isinstance(start, SparseSolution):
        return start
    prices = first_prices(gain, spread)
    pairs, prices = _first_candidates(gain, prices)
    pairs = pairs.union(start)
    best = None
    for _ in range(ROUNDS):
        index = _best(pairs, prices)
        prices = _dual_prices(pairs, index, prices)
        bound, joining = _bound_and_missing(gain, pairs.gain_of(index) - prices[index], prices)
        total = float(pairs.gain_of(index).sum())
        best = SparseSolution(index, total, min(bound, best.bound) if best else bound)
        if best.gap <= tolerance or not len(joining.keys):
            break
        pairs = pairs.union(joining)
    assert best is not None
    return best


def _first_look(gain: Tensor, known: Index) -> tuple[SparseSolution | _Pairs, float]:
    """Return the pairs of ``known`` and the standard deviation of the gain; or the best permutation, if all
    places have different best units.
    """
    size = len(gain)
    units, most, own = np.empty(size, np.int64), np.empty(size), np.empty(size)
    moments: list[tuple[float, float]] = []
    for rows, block in blocks(gain):
        values, here = block.numpy(), np.arange(len(block))
        units[rows] = values.argmax(1)
        most[rows], own[rows] = values[here, units[rows]], values[here, known[rows]]
        if len(moments) * _SAMPLED_BLOCKS <= rows.start // len(block):
            moments.append((values.mean(dtype=np.float64), values.std(dtype=np.float64)))
    if not np.isfinite(most).all():
        raise AlignmentError(
            "a gain is not a finite number", hint="look for weights that are infinite or not a number"
        )
    if len(np.unique(units)) == size:
        total = float(most.sum())
        return SparseSolution(units, total, total), 0.0
    means, spreads = np.array(moments).T
    spread = float(np.sqrt(means.var() + np.square(spreads).mean()))
    return _Pairs(np.arange(size) * size + known, own, size), max(
        spread, 1e-7 * float(np.abs(most).max()), _TINY
    )


def _first_candidates(gain: Tensor, prices: Numbers) -> tuple[_Pairs, Numbers]:
    """Return the pairs with a small loss at these prices, for every place and every unit, and prices at which
    every unit is the best of some place.

    The threshold of each place and unit is estimated from a sample.
    """
    size = len(gain)
    sample = np.unique(np.linspace(0, size - 1, min(_SAMPLE, size)).astype(np.int64))
    left, prices, some_rows, some_columns = _tight(gain, prices, sample)
    rank = max(1, round(min(CANDIDATES, size) * len(sample) / size)) - 1
    some_rows = prices.astype(np.float32)[:, None] + left.astype(np.float32)[sample] - some_rows.T
    some_columns = left.astype(np.float32)[:, None] + prices.astype(np.float32)[sample] - some_columns
    by_unit, by_place = (np.partition(some, rank, axis=1)[:, rank] for some in (some_rows, some_columns))
    return _within(gain, left, prices, by_place, by_unit), prices


def _tight(gain: Tensor, prices: Numbers, sample: Index) -> tuple[Numbers, Numbers, Singles, Singles]:
    """Return the best gain minus price of every place; the prices, lowered until every unit is the best of
    some place; and the rows and columns of a sample.
    """
    size = len(gain)
    asked = torch.from_numpy(prices).float()
    left, lowered = torch.empty(size), torch.full((size,), -torch.inf)
    some_rows = np.empty((len(sample), size), np.float32)
    some_columns = np.empty((size, len(sample)), np.float32)
    for rows, block in blocks(gain):
        after = block - asked
        left[rows] = after.amax(1)
        after -= left[rows, None]
        torch.maximum(lowered, after.amax(0), out=lowered)
        here = np.arange(*np.searchsorted(sample, (rows.start, rows.stop)))
        some_rows[here] = block.numpy()[sample[here] - rows.start]
        some_columns[rows] = block.numpy()[:, sample]
    return left.double().numpy(), asked.double().numpy() + lowered.double().numpy(), some_rows, some_columns


def _within(gain: Tensor, left: Numbers, prices: Numbers, by_place: Singles, by_unit: Singles) -> _Pairs:
    """Return the pairs within the threshold of their place or unit.

    Of too many for a place, the best are kept, and among equals those next after the place itself.
    """
    size = len(gain)
    asked, allowed = torch.from_numpy(prices).float(), torch.from_numpy(by_unit)
    found: list[tuple[Index, Numbers]] = []
    for rows, block in blocks(gain):
        after = block - asked
        after -= torch.from_numpy(left[rows]).float()[:, None]
        least = -torch.maximum(allowed, torch.from_numpy(by_place[rows])[:, None])
        where = np.flatnonzero((after >= least).numpy())
        if len(where) > _MOST:
            where = _fewer(where, after.numpy(), rows.start)
        found.append((where + rows.start * size, block.numpy().reshape(-1)[where].astype(np.float64)))
    return _Pairs.joined(found, size)


def _fewer(where: Index, after: Singles, start: int) -> Index:
    """Return at most `_MOST` of these pairs for every place."""
    size = after.shape[1]
    places = where // size
    for place in np.flatnonzero(np.bincount(places) > _MOST):
        mine = places == place
        units = where[mine] - place * size
        order = np.lexsort(((units - place - start) % size, -after[place, units]))
        kept = np.sort(where[mine][order[:_MOST]])
        where = np.concatenate([where[places < place], kept, where[places > place]])
        places = where // size
    return where


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


def _bound_and_missing(gain: Tensor, left: Numbers, prices: Numbers) -> tuple[float, _Pairs]:
    """Return the upper bound at these prices, and the pairs that would beat their place's current unit.

    ``left`` is the gain minus price of every place with its unit. A first pass in float32 leaves few pairs to
    compute in float64.
    """
    size = len(gain)
    asked = torch.from_numpy(prices).float()
    largest = max(float(np.abs(left).max()), float(np.abs(prices).max()))
    bound, found = float(prices.sum()), [(np.empty(0, np.int64), np.empty(0))]
    for rows, block in blocks(gain):
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
        kept = np.sort(where[first])
        found.append((kept + rows.start * size, block.numpy().reshape(-1)[kept].astype(np.float64)))
    return bound, _Pairs.joined(found, size)


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
