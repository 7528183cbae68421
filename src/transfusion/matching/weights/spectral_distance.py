"""The distance of two heads by singular values, whatever the order of the units inside (Eq. 5 and 6).

Permuting rows or columns does not change singular values, so the distance depends on no map.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.threads import Threads


def spectral_distance(weights: WeightPair, sections: Iterable[Section], workers: Threads) -> Tensor:
    """Return the distance of singular values between each unit of B and each of A, summed over tensors."""
    tasks = [(section, side) for section in sections for side in ("b", "a")]
    values = workers.each(lambda task: _values(weights, *task), tasks)
    pairs = zip(values[::2], values[1::2], strict=True)
    return torch.stack([torch.cdist(of_b, of_a) for of_b, of_a in pairs]).sum(0)


def _values(weights: WeightPair, section: Section, side: str) -> Tensor:
    return singular_values(section.blocks(weights.read(side, section.tensor)))


def singular_values(matrices: Tensor) -> Tensor:
    """Return the singular values of a batch of matrices, largest first, by the smaller Gram matrix."""
    matrices = matrices.double()
    if matrices.shape[1] > matrices.shape[2]:
        matrices = matrices.transpose(1, 2)
    squares: Tensor = torch.linalg.eigvalsh(matrices @ matrices.transpose(1, 2))
    return squares.clamp(min=0).sqrt().flip(-1)
