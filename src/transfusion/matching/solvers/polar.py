"""Polar decomposition: the orthogonal matrix nearest to a square one.

Small matrices take a singular value decomposition in float64. Large ones take the dynamically weighted Halley
iteration X ← X·(b/c + (a − b/c)·(1 + c·XᵀX)⁻¹), which keeps the singular vectors and brings all singular
values to 1 in five steps of one product, one Cholesky factor and two triangular solutions each. The first
step meets the small singular values and is taken in float64, the others in float32. Random vectors check the
result in float64.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from transfusion.running.activations import EXACT

UNKNOWN = 1e-7
"""Singular values below this share of the largest one are roundings of float32: their directions are unknown,
and stay where they are as far as possible."""
ROUNDS = (1e-8, 1e-2, 1e-2, 1e-2)
"""The smallest singular value that each round of steps brings to 1; one is enough, or a few."""
NEAR = 1e-6
"""How near to 1 the steps bring all singular values."""
WELL_CONDITIONED = 1e4
"""The largest c of a step in float32."""
TOLERANCE = 1e-4
"""The largest relative error in the float64 check."""
CHECKED = 8
"""How many random vectors the check takes."""
POWERS = 8
PANEL = 512


def polar(matrix: Tensor) -> Tensor:
    """Return the orthogonal matrix nearest to a square matrix, or to each of a stack of them."""
    if matrix.shape[-1] > EXACT and matrix.ndim == 2:
        found = _regular(matrix)
        for smallest in ROUNDS:
            found = iterated_polar(found, smallest)
            if is_polar(found, matrix):
                return found.to(matrix.dtype)
    u, _, v = torch.linalg.svd(matrix.double())
    nearest: Tensor = u @ v
    return nearest.to(matrix.dtype)


def _regular(matrix: Tensor) -> Tensor:
    """Return the matrix, with the identity in directions that it says nothing about."""
    regular = matrix.clone()
    regular.diagonal().add_(UNKNOWN * _largest(matrix))
    return regular


def iterated_polar(matrix: Tensor, smallest: float = ROUNDS[0]) -> Tensor:
    """Return the orthogonal factor of a square matrix in float32, by products and Cholesky factors.

    Only singular values above a share of the largest, ``smallest``, are brought to 1.
    """
    bound = _upper_bound(matrix)
    if not 0 < bound < float("inf"):
        return matrix
    found = matrix / bound
    for a, b, c in _weights(smallest):
        found = found.to(torch.float32 if c < WELL_CONDITIONED else torch.float64)
        inner = symmetric_product(found).mul_(c)
        inner.diagonal().add_(1)
        factor, failed = torch.linalg.cholesky_ex(inner)
        if failed:
            return found
        del inner  # matrices may have gigabytes: the rest is in place
        solved = torch.cholesky_solve(found.T, factor)
        del factor
        found = found.mul_(b / c).add_(solved.mul_(a - b / c).T)
    return found


def symmetric_product(matrix: Tensor) -> Tensor:
    """Return MᵀM, of which only the blocks above the diagonal are computed."""
    size = matrix.shape[1]
    product = matrix.new_empty(size, size)
    for start in range(0, size, PANEL):
        end = min(start + PANEL, size)
        rows = matrix[:, start:end].T @ matrix[:, start:]
        product[start:end, start:] = rows
        product[end:, start:end] = rows[:, end - start :].T
    return product


def is_polar(found: Tensor, matrix: Tensor) -> bool:
    """Check on random vectors, in float64, that FᵀF = 1 and that FᵀM is symmetric."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(found), CHECKED, dtype=torch.float64, generator=generator).to(found.device)
    turned = _times(found, vectors)
    back = _times(found.T, turned)
    one, other = _times(found.T, _times(matrix, vectors)), _times(matrix.T, turned)
    errors = _distance(back, vectors), _distance(one, other)
    return all(error <= TOLERANCE for error in errors)  # NaN is refused, too


def _times(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Multiply in float64, some rows of the matrix at a time."""
    parts = [matrix[start : start + PANEL].double() @ vectors for start in range(0, len(matrix), PANEL)]
    return torch.cat(parts)


def _distance(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other).clamp(min=1e-300))


def _largest(matrix: Tensor) -> float:
    """Return the largest singular value, or a little less, by some power iterations."""
    vector = torch.randn(len(matrix), generator=torch.Generator().manual_seed(0)).to(matrix)
    for _ in range(POWERS):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / torch.linalg.vector_norm(vector).clamp(min=1e-30)
    return float(torch.linalg.vector_norm(matrix @ vector))


def _upper_bound(matrix: Tensor) -> float:
    """Return a number that no singular value exceeds."""
    rows, columns = matrix.abs().sum(1).max(), matrix.abs().sum(0).max()
    return float(torch.minimum(torch.linalg.vector_norm(matrix), (rows * columns).sqrt()))


@cache
def _weights(smallest: float) -> tuple[tuple[float, float, float], ...]:
    """Return a, b and c of every step, the best ones for singular values from ``smallest`` to 1."""
    found: list[tuple[float, float, float]] = []
    low = smallest
    while 1 - low > NEAR:
        square = low * low
        root = (4 * (1 - square) / square**2) ** (1 / 3)
        one = (1 + root) ** 0.5
        a = one + (8 - 4 * root + 8 * (2 - square) / (square * one)) ** 0.5 / 2
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        found.append((a, b, c))
        low = min(1.0, low * (a + b * square) / (1 + c * square))
    return tuple(found)
