"""Linear assignment: the permutation that collects the largest total gain."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from transfusion.maps import Permutation


def assign(gain: Tensor) -> Permutation:
    """The best permutation for each row of a gain of shape (rows, size in B, size in A)."""
    return Permutation(np.stack([linear_sum_assignment(one, maximize=True)[1] for one in gain.cpu().numpy()]))
