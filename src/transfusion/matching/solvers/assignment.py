"""Linear assignment: the permutation that collects the largest total gain.

A small gain is solved directly. A large one is solved among candidate pairs, with the same answer and a proof
(`sparse_assignment`). A huge one always is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import lap
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.matching.solvers.sparse_assignment import EXACT, assign_among_candidates, blocks
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

    ``known`` is the current permutation of the axis. It may speed up the solver, and changes no total.
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
    best = [block.numpy().argmax(1) for _, block in blocks(gain)]
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
