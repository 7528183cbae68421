"""Linear assignment: the permutation that collects the largest total gain.

A gain that fits into memory and is small is solved as it is. A large one is solved among candidates, with the
same answer and a proof (`candidates`); so is one that is handed out by rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import lap
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.maps import Permutation
from transfusion.scratch import scratch
from transfusion.solvers.candidates import EXACT, assign_among_candidates
from transfusion.solvers.prices import ByRows, InMemory

LARGE = 4096
"""The size from which candidates are faster than looking at everything (docs/assignments.md)."""


@dataclass(frozen=True)
class Solution:
    """A permutation, and how far from the best it can be at most."""

    permutation: Permutation
    gap: float
    """The share of the bound that is missing, (bound - total) / |bound|: the largest over the rows."""
    exact: bool
    """Whether it is the best one, up to rounding."""


def solve(gain: Tensor | ByRows, *, known: Permutation | None = None) -> Solution:
    """The best permutation for each row of a gain of shape (rows, size in B, size in A), or for one gain that
    is handed out by rows.

    ``known`` is where the axis is now. It may help to find the best, and never changes how good it is.
    """
    if not isinstance(gain, Tensor):
        return _among_candidates([gain], known)
    if gain.shape[1] < LARGE:
        return Solution(_among_all(gain), 0.0, exact=True)
    return _among_candidates([InMemory(one) for one in gain], known)


def assign(gain: Tensor) -> Permutation:
    """The best permutation for each row of a gain of shape (rows, size in B, size in A)."""
    return solve(gain).permutation


def best_totals(gain: Tensor) -> tuple[Permutation, Tensor]:
    """The best permutation for each row, and what it collects."""
    best = assign(gain)
    index = torch.from_numpy(best.index).to(gain.device).unsqueeze(2)
    return best, gain.gather(2, index).sum((1, 2), dtype=torch.float64)


def _among_candidates(gains: list[Any], known: Permutation | None) -> Solution:
    found = [
        assign_among_candidates(gain, known=known.index[row] if known is not None else None)
        for row, gain in enumerate(gains)
    ]
    gap = max(one.gap for one in found)
    return Solution(Permutation(np.stack([one.index for one in found])), gap, exact=gap <= EXACT)


def _among_all(gain: Tensor) -> Permutation:
    costs = _costs(gain)
    if len(costs) == 1:
        return Permutation(lap.lapjvr(costs[0], return_cost=False)[1])
    return Permutation(np.stack(lap.lapjvr_batch(costs, return_cost=False, n_threads=1)[1]))


def _costs(gain: Tensor) -> NDArray[np.floating[Any]]:
    """What each place of B loses with each unit of A against the best one for it.

    The answer is the same as for the plain negative; with rows that start at zero the solver needs half
    of the time.
    """
    costs = torch.sub(gain.amax(2, keepdim=True), gain, out=scratch("costs", gain.shape, gain))
    return cast("NDArray[np.floating[Any]]", costs.cpu().numpy())
