"""Spectra: how alike two heads are, whatever the order of the units inside them (Eq. 5 and 6).

Singular values do not change when rows or columns change places, so this evidence depends on no map
and is gathered once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair


def spectral_distance(weights: WeightPair, sections: Iterable[Section]) -> Tensor:
    """The distance of singular values between each unit of B and each of A, summed over tensors."""
    return torch.stack([_distance(weights, section) for section in sections]).sum(0)


def _distance(weights: WeightPair, section: Section) -> Tensor:
    of_a, of_b = (singular_values(section.blocks(weights.read(side, section.tensor))) for side in ("a", "b"))
    return torch.cdist(of_b, of_a)


def singular_values(matrices: Tensor) -> Tensor:
    """Singular values of a batch of matrices, largest first, through the smaller Gram matrix."""
    matrices = matrices.double()
    if matrices.shape[1] > matrices.shape[2]:
        matrices = matrices.transpose(1, 2)
    squares: Tensor = torch.linalg.eigvalsh(matrices @ matrices.transpose(1, 2))
    return squares.clamp(min=0).sqrt().flip(-1)
