"""Dominance: proof that every place has its best unit already, without computing the whole gain.

If the unit in each place fits it better than all other units do, these units are the best assignment, and the
only one. Where B descends from A, a part of the products proves it: what the other columns add to a gain is
at most the product of the norms of what is left of both units (Cauchy–Schwarz). The part that is needed is
at least one minus the cosine of the units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from transfusion.alignment.maps import Map, Permutation
from transfusion.matching.weights.gain_products import BLOCK, GainProducts, run_of
from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.threads import Threads

SMALLEST = 512
"""The size of an axis from which a proof costs less than its gain."""
SAMPLE = 64
"""Units, or columns, that tell whether a proof is likely."""
LIKELY = 0.3
"""The least median cosine of units in the same places for which a proof is tried."""
PARTS = 16
MOST = 11
"""Columns are divided into so many parts, of which at most so many are multiplied."""
AT_A_TIME = 3
"""The share of a section's rows that are read at a time, if their number is large: one in so many."""
CHANCE = 6.0
"""Standard deviations that a product of unlike units is expected to stay within."""
NEARLY_ALL = 0.999
"""The share of places for which a number of parts must be likely to suffice."""
ROUNDING = {torch.bfloat16: 2**-7, torch.float32: 1e-5, torch.float64: 1e-5}
"""The share of two norms that rounding may change their product by. In bfloat16 both factors and the product
are rounded, by at most 2⁻⁹ each; sums are made in float32."""
TRIED = 512
"""The size of the matrices that tell how fast this machine multiplies."""
FASTER = 1.3
"""How many times faster products in bfloat16 must be to be taken."""


@dataclass
class _Units:
    """The units of an axis in both models: their norms, part by part, and the products in place."""

    own: Tensor
    """For each place of B, the product of its unit with that of A."""
    of_b: Tensor
    of_a: Tensor
    """Squares of norms, (parts, units)."""

    def left(self, parts: int) -> tuple[Tensor, Tensor]:
        """Return the norms of B's and A's units without the first parts."""
        return self.of_b[parts:].sum(0).sqrt(), self.of_a[parts:].sum(0).sqrt()

    def margin(self, rounding: float) -> Tensor:
        """Return what rounding may add to the products of B's units."""
        b, a = self.left(0)
        return rounding * b * a.max()

    def parts_needed(self, width: int, rounding: float) -> int | None:
        """Return how many parts are likely to prove dominance; None if too many."""
        margin = self.margin(rounding)
        for parts in range(1, MOST + 1):
            b, a = self.left(parts)
            chance = (self.of_b[:parts].sum(0) * self.of_a[:parts].sum(0).max()).sqrt()
            largest = b * a.max() + CHANCE * chance / (width * parts / PARTS) ** 0.5 + margin
            if float((self.own > largest).double().mean()) >= NEARLY_ALL:
                return parts
        return None


def is_dominant(
    weights: WeightPair,
    workers: Threads,
    sections: Sequence[Section],
    maps: Mapping[str, Map],
    known: Permutation,
) -> bool:
    """Return whether each unit of A is proven to be the best for the place that ``known`` gives it.

    The sections are those of one axis, and ``maps`` move the other axes. False means that there is no proof.
    """
    size = known.size
    if size < SMALLEST or known.rows > 1 or not all(section.plain for section in sections):
        return False
    units = torch.from_numpy(known.index[0])
    columns = {section.key: section.columns(maps) for section in sections}
    widest = max(sections, key=lambda section: section.width)
    if _cosine(weights, widest, columns[widest.key][0], units) < LIKELY:
        return False
    measured = workers.each(
        lambda section: _measure(weights, section, columns[section.key][0], units), sections
    )
    found = _Units(*(torch.stack(list(some)).sum(0) for some in zip(*measured, strict=True)))
    rounded = _rounded(weights)
    rounding = ROUNDING[rounded.place["dtype"]]
    parts = found.parts_needed(sum(section.width for section in sections), rounding)
    if parts is None:
        return False
    gain = torch.zeros((1, size, size), **weights.place)
    products = GainProducts(rounded, workers, range(size))
    for section in sections:
        products.add(gain, section, None, columns[section.key][:, _parts(section) < parts])
    return _is_proven(gain[0], found, parts, units, workers, found.margin(rounding))


def _rounded(weights: WeightPair) -> WeightPair:
    """Return the same weights in the type that a proof is fastest in: it need not be exact."""
    place = weights.place
    on_cpu = torch.device(place["device"]).type == "cpu"
    if place["dtype"] != torch.float32 or not on_cpu or not multiplies_faster_in_bfloat16():
        return weights
    rounded = copy(weights)
    rounded.place = {**place, "dtype": torch.bfloat16}
    return rounded


@cache
def multiplies_faster_in_bfloat16() -> bool:
    """Return whether this processor has instructions for products in bfloat16, by trying them."""

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(TRIED, TRIED, dtype=dtype)
        taken = []
        for _ in range(3):
            since = perf_counter()
            matrix @ matrix
            taken.append(perf_counter() - since)
        return min(taken)

    return FASTER * seconds(torch.bfloat16) < seconds(torch.float32)


def _cosine(weights: WeightPair, section: Section, columns: Tensor, units: Tensor) -> float:
    """Return the median cosine of units in the same places, from a sample of units or columns."""
    some = torch.arange(0, section.shape[0], max(1, section.shape[0] // SAMPLE))
    of_b = weights.read("b", section.tensor, some)
    if section.dim == 0:
        of_a = weights.read("a", section.tensor, units[some]).index_select(1, columns.to(of_b.device))
        similar = torch.nn.functional.cosine_similarity(of_a, of_b, dim=1)
    else:
        of_a = weights.read("a", section.tensor, columns[some]).index_select(1, units.to(of_b.device))
        similar = torch.nn.functional.cosine_similarity(of_a, of_b, dim=0)
    return float(similar.median())


def _measure(
    weights: WeightPair, section: Section, columns: Tensor, units: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the products in place, and the squares of norms of B's and of A's units, part by part."""
    name, device = section.tensor, weights.place["device"]
    own = torch.zeros(len(units), **weights.place)
    squares = torch.zeros(2, PARTS, len(units), **weights.place)
    part = _parts(section).to(device)
    if section.dim == 0:
        selecting = torch.nn.functional.one_hot(part, PARTS).to(own)
        for start in range(0, len(units), BLOCK):
            places = slice(start, start + BLOCK)
            of_b = weights.read("b", name, places)
            of_a = _select(weights.read("a", name, run_of(units[places])), columns)
            own[places] = torch.linalg.vecdot(of_a, of_b)
            squares[0, :, places] = (of_b.square() @ selecting).T
            squares[1, :, units[places]] = (of_a.square() @ selecting).T
    else:
        step = max(BLOCK, section.width // AT_A_TIME)
        for start in range(0, section.width, step):
            rows = slice(start, start + step)
            of_b, of_a = weights.read("b", name, rows), weights.read("a", name, run_of(columns[rows]))
            own += (_select(of_a, units) * of_b).sum(0)
            squares[0].index_add_(0, part[rows], of_b.square())
            squares[1].index_add_(0, part[rows], of_a.square())
    return own, squares[0], squares[1]


def _select(matrix: Tensor, columns: Tensor) -> Tensor:
    """Return columns of a matrix; the matrix itself, if these are all of them in their order."""
    every = len(columns) == matrix.shape[1] and isinstance(run_of(columns), slice)
    return matrix if every else matrix.index_select(1, columns.to(matrix.device))


def _parts(section: Section) -> Tensor:
    """Return the part of each column of a section."""
    return torch.arange(section.width) * PARTS // section.width


def _is_proven(
    gain: Tensor, found: _Units, parts: int, units: Tensor, workers: Threads, margin: Tensor
) -> bool:
    """Return whether no unit can fit a place better than its own, whatever the other columns add."""
    left_b, left_a = found.left(parts)

    def proven(start: int) -> bool:
        places = slice(start, min(start + BLOCK, len(units)))
        largest = torch.addr(gain[places], left_b[places], left_a)
        largest.scatter_(1, units[places, None].to(gain.device), -torch.inf)
        return bool((largest.amax(1) + margin[places] < found.own[places]).all())

    return all(workers.each(proven, range(0, len(units), BLOCK)))
