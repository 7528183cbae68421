"""The distance of two heads by singular values, whatever the order of the units inside (Eq. 5 and 6).

Permuting rows or columns does not change singular values, so the distance depends on no map.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair


def spectral_distance(weights: WeightPair, sections: Iterable[Section]) -> Tensor:
    """Return the distance of singular values between each unit of B and each of A, summed over tensors."""
    return torch.stack([_distance(weights, section) for section in sections]).sum(0)


def _distance(weights: WeightPair, section: Section) -> Tensor:
    of_a, of_b = (singular_values(section.blocks(weights.read(side, section.tensor))) for side in ("a", "b"))
    return torch.cdist(of_b, of_a)


def singular_values(matrices: Tensor) -> Tensor:
    """Return the singular values of a batch of matrices, largest first, by the smaller Gram matrix."""
    matrices = matrices.double()
    if matrices.shape[1] > matrices.shape[2]:
        matrices = matrices.transpose(1, 2)
    squares: Tensor = torch.linalg.eigvalsh(matrices @ matrices.transpose(1, 2))
    return squares.clamp(min=0).sqrt().flip(-1)
