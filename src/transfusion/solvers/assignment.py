"""Linear assignment: the permutation that collects the largest total gain."""

from __future__ import annotations

from typing import Any, cast

import lap
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.maps import Permutation
from transfusion.scratch import scratch


def assign(gain: Tensor) -> Permutation:
    """The best permutation for each row of a gain of shape (rows, size in B, size in A)."""
    costs = _costs(gain)
    if len(costs) == 1:
        return Permutation(lap.lapjvr(costs[0], return_cost=False)[1])
    return Permutation(np.stack(lap.lapjvr_batch(costs, return_cost=False, n_threads=1)[1]))


def best_totals(gain: Tensor) -> tuple[Permutation, Tensor]:
    """The best permutation for each row, and what it collects."""
    best = assign(gain)
    index = torch.from_numpy(best.index).to(gain.device).unsqueeze(2)
    return best, gain.gather(2, index).sum((1, 2), dtype=torch.float64)


def _costs(gain: Tensor) -> NDArray[np.floating[Any]]:
    """What each place of B loses with each unit of A against the best one for it.

    The answer is the same as for the plain negative; with rows that start at zero the solver needs half
    of the time.
    """
    costs = torch.sub(gain.amax(2, keepdim=True), gain, out=scratch("costs", gain.shape, gain))
    return cast("NDArray[np.floating[Any]]", costs.cpu().numpy())
