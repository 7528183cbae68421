"""Transport plans between the units of two models, all of equal weight.

Between equal numbers of units of equal weight, some optimal plan is a permutation, and the best
permutation is an optimal plan. The hard plan is therefore solved as a linear assignment, which is exact
and gives indices. A general solver would return floating-point numbers, or a mixture of equally good
permutations. The soft plan has an entropic regularisation (Sinkhorn).
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.errors import SettingError
from transfusion.matching.solvers.assignment import assign

SOFTEST, HARDEST = 100.0, 0.01
_ROUNDS = 500
_PRECISION = 1e-6


def hard_plan(cost: Tensor) -> Map:
    """Return the cheapest permutation for each row of a cost of shape (rows, size in B, size in A)."""
    return assign(-cost)


def soft_plan(cost: Tensor, regularisation: float) -> Map:
    """Return the entropically regularised plan for each row of a cost of that shape.

    The regularisation is in standard deviations of the row's costs, so that one value means the same in every
    layer: at 1 similar units mix freely, at 0.01 hardly any do.
    """
    if not HARDEST <= regularisation <= SOFTEST:
        raise SettingError(
            f"regularisation = {regularisation}: not between {HARDEST:g} and {SOFTEST:g}",
            hint="for less regularisation, use hard plans",
        )
    return Map.plan(np.stack([_sinkhorn(one, regularisation) for one in cost.cpu().double().numpy()]))


def _sinkhorn(cost: NDArray[np.float64], regularisation: float) -> NDArray[np.float64]:
    """Return a plan whose rows sum to 1 exactly, and whose columns do up to the rounds.

    Subtracting the least cost of every row and column changes no plan, and keeps the kernel from vanishing.
    """
    size, spread = len(cost), float(cost.std())
    if spread == 0:
        return np.full((size, size), 1 / size)
    cost = cost - cost.min(axis=1, keepdims=True)
    cost = cost - cost.min(axis=0, keepdims=True)
    weights = np.full(size, 1 / size)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # about convergence: rows are normalised below
        import ot

        plan = ot.sinkhorn(
            weights,
            weights,
            cost,
            regularisation * spread,
            method="sinkhorn_stabilized",
            numItermax=_ROUNDS,
            stopThr=_PRECISION,
            warn=False,
        )
    result: NDArray[np.float64] = plan / plan.sum(axis=1, keepdims=True)
    return result
