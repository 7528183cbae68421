"""Procrustes: the nearest matrix to a covariance of B's units and A's, among those that an axis admits.

Axes of one size take a rotation: the polar factor. Small matrices take a singular value decomposition in
float64. Large ones take the dynamically weighted Halley iteration X ← X·(b/c + (a − b/c)·(1 + c·XᵀX)⁻¹). It
keeps the singular vectors and brings all singular values to 1 in five steps of one product, one Cholesky
factor and two triangular solutions each. The first step meets the small singular values and is taken in
float64, the others in float32. Random vectors check the result in float64.

Axes of different sizes take an isometry. Units that rotary positions rotate in pairs, each pair by its own
angle, take a rotation in every plane: rotations of one plane commute, so q and k may both be rotated by any
angle before the positions rotate them, and their products stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import Architecture
from transfusion.architecture.table import Symmetry
from transfusion.running.activations import EXACT

SMALLEST = 1e-18
"""The smallest norm that is divided by: the product of two is still a number in float32."""
FULL_RANK = 1e-11
"""Singular values below this share of the largest one are taken for zero, in float64."""
UNKNOWN = 1e-7
"""Singular values below this share of the largest one are roundings of float32: their directions are unknown,
and stay where they are as far as possible."""
ROUNDS = (1e-8, 1e-2, 1e-2, 1e-2)
"""The smallest singular value that each round of steps brings to 1; one round is usually enough."""
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


# ── sizes ────────────────────────────────────────────────────────────────────────────────────


def unit(values: Tensor) -> Tensor:
    """Return values scaled to length 1 together."""
    size: Tensor = torch.linalg.vector_norm(values)
    return values / size.clamp(min=1e-30)


def normalise_units(values: Tensor) -> Tensor:
    """Return every unit's activations scaled to length 1."""
    sizes: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return values / sizes.clamp(min=1e-30)


def product_of_norms(b: Tensor, a: Tensor) -> float:
    """Return |B|·|A|; of zeros, a number that everything can be divided by."""
    sizes = [torch.linalg.vector_norm(one).clamp(min=SMALLEST) for one in (b, a)]
    return float(sizes[0] * sizes[1])


def covariance(b: Tensor, a: Tensor) -> Tensor:
    """Return the covariance of B's units and A's over the last dimension, with both normalised."""
    return (b @ a.transpose(-1, -2)).div_(product_of_norms(b, a))  # (…, units of B, units of A)


def norm_ratio(b: Tensor, a: Tensor) -> float:
    """Return the ratio of the norms of B's activations and A's."""
    return float(torch.linalg.vector_norm(b) / torch.linalg.vector_norm(a).clamp(min=1e-30))


def mean_ratio(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean of ratios, without those of activations that are all zero."""
    found = [ratio for ratio in ratios if ratio > 0]
    return float(np.exp(np.mean(np.log(found)))) if found else None


# ── the nearest matrix ───────────────────────────────────────────────────────────────────────


def nearest(covariances: Tensor, group: Symmetry) -> Tensor:
    """Return the nearest matrix among those that the symmetry of an axis admits."""
    if group.rotates_pairs:
        return rotate_pairs(split_pairs(covariances, group).angle(), group)
    return polar(covariances)


def isometry(covariances: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal columns, or rows if B's axis is the smaller one."""
    u, sizes, v = torch.linalg.svd(covariances, full_matrices=False)
    rounding = max(FULL_RANK, max(covariances.shape) * torch.finfo(covariances.dtype).eps)
    known = sizes > rounding * sizes.max().clamp(min=1e-30)
    nearest: Tensor = (u * known) @ v
    return nearest


def polar(matrix: Tensor) -> Tensor:
    """Return the orthogonal matrix nearest to a square matrix, or to each of a stack of them."""
    if matrix.shape[-1] > EXACT and matrix.ndim == 2:
        found = _regular(matrix)
        for smallest in ROUNDS:
            found = iterated_polar(found, smallest)
            if is_polar(found, matrix):
                return found.to(matrix.dtype)
    u, _, v = torch.linalg.svd(matrix.double())  # Procrustes: argmax_M ⟨M, C⟩ = U Vᵀ
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
        inner.diagonal().add_(1)  # 1 + c·XᵀX, (size, size)
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


# ── pairs of units that rotary positions rotate ──────────────────────────────────────────────


def rotary_pairs(group: Symmetry, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second unit of every plane."""
    units = torch.arange(size)
    match group:
        case Symmetry.ROTARY:
            return units[: size // 2], units[size // 2 :]
        case Symmetry.INTERLEAVED:
            return units[::2], units[1::2]
    raise ValueError(f"the units of an axis that is {group} do not rotate in pairs")


class PlanePairs:
    """The planes of B and those of A that rotary positions turn at about the same speed."""

    def __init__(self, groups: tuple[Symmetry, Symmetry], sizes: tuple[int, int]) -> None:
        planes = nearest_frequencies(sizes[0] // 2, sizes[1] // 2)
        self.sizes = sizes
        self.b, self.a = (
            [units[planes[:, side]] for units in rotary_pairs(groups[side], sizes[side])] for side in (0, 1)
        )

    def split(self, covariances: Tensor) -> Tensor:
        """Return how B's planes match A's, as complex numbers: their angle, and their agreement as the size.

        ``covariances`` has B's units and A's units in its last two dimensions.
        """
        (b1, b2), (a1, a2) = self.b, self.a
        along = covariances[..., b1, a1] + covariances[..., b2, a2]
        return torch.complex(along, covariances[..., b2, a1] - covariances[..., b1, a2])

    def rotation(self, angles: Tensor) -> Tensor:
        """Return the rotation by an angle in every plane; one matrix for every row of angles."""
        (b1, b2), (a1, a2) = self.b, self.a
        matrix = angles.new_zeros(*angles.shape[:-1], *self.sizes)
        matrix[..., b1, a1] = matrix[..., b2, a2] = torch.cos(angles)
        matrix[..., b2, a1] = torch.sin(angles)
        matrix[..., b1, a2] = -torch.sin(angles)
        return matrix


def nearest_frequencies(ours: int, theirs: int) -> Tensor:
    """Pair the planes of two heads whose rotary positions turn at about the same speed: (ours, theirs)."""
    if ours == theirs:
        return torch.arange(ours)[:, None].expand(-1, 2)
    distance = (torch.arange(ours)[:, None] / ours - torch.arange(theirs) / theirs).abs()
    return torch.from_numpy(np.stack(assign_rectangle(-distance), axis=1))


def assign_rectangle(gain: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows and columns of the best assignment; units of the longer side may have none."""
    from scipy.optimize import linear_sum_assignment  # its import takes half a second

    rows, columns = linear_sum_assignment(gain.cpu().numpy(), maximize=True)
    return rows.astype(np.int64), columns.astype(np.int64)


def split_pairs(covariances: Tensor, group: Symmetry) -> Tensor:
    """Return how the planes of two axes of one size match: see `PlanePairs.split`."""
    size = covariances.shape[-1]
    return _same_planes(group, size).split(covariances)


def rotate_pairs(angles: Tensor, group: Symmetry) -> Tensor:
    """Return the rotation of an axis by an angle in every plane; one matrix for every row of angles."""
    return _same_planes(group, 2 * angles.shape[-1]).rotation(angles)


@cache
def _same_planes(group: Symmetry, size: int) -> PlanePairs:
    return PlanePairs((group, group), (size, size))


def random_pair_rotations(architecture: Architecture, seed: int) -> dict[str, Map]:
    """Return rotations by random angles, in float64, for every axis whose units rotate in pairs."""
    rng = np.random.default_rng(seed)
    maps: dict[str, Map] = {}
    for space in architecture.rotary_spaces():
        rows = architecture.rows(space.id)
        angles = torch.from_numpy(rng.uniform(-np.pi, np.pi, (rows, space.size // 2)))
        ones: NDArray[np.floating[Any]] = np.ones(rows)
        maps[space.id] = Map.rotation(rotate_pairs(angles, space.group).numpy(), ones, ones)
    return maps
