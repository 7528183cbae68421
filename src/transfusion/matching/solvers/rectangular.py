"""Maps between axes of different sizes, from what both models compute on the same probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.layouts import Item, names_in
from transfusion.architecture.table import Symmetry
from transfusion.matching.activations.axis_activations import RecordedModel
from transfusion.matching.activations.prediction_quality import PredictionQuality, predicted, shuffled
from transfusion.matching.activations.procrustes import mean_ratio, norm_ratio, normalise_units, unit
from transfusion.matching.solvers.rotary_pairs import rotary_pairs
from transfusion.running.activations import INPUT, OUTPUT, comparable

FULL_RANK = 1e-11
"""Singular values below this share of the largest one are taken for zero, in float64."""


@dataclass(frozen=True)
class Sample:
    """What both models write to an axis, or read from it: (units, samples)."""

    a: Tensor
    b: Tensor
    side: str

    @classmethod
    def of(cls, a: Tensor, b: Tensor, side: str) -> Sample:
        """Return recorded samples, (samples, units), in one type."""
        a, b = comparable(a, b)
        return cls(a.T, b.T, side)


@dataclass
class AxisEvidence:
    """All samples of an axis of B and the axis of A that corresponds to it."""

    item_a: Item
    item_b: Item
    samples: list[Sample] = field(default_factory=list)
    held_out: list[Sample] = field(default_factory=list)
    produced: float | None = None
    """How much larger B's activations are where they are written, if the samples do not tell."""

    def ratio(self, matrix: Tensor, side: str) -> float | None:
        """Return how much larger B's activations are than A's after the map, on one side."""
        return mean_ratio(norm_ratio(one.b, matrix @ one.a) for one in self.samples if one.side == side)


@dataclass(frozen=True)
class RectangularSolver:
    """Finds the map of one axis."""

    a: RecordedModel
    b: RecordedModel

    def solve(self, evidence: AxisEvidence) -> tuple[Map, PredictionQuality]:
        """Return the map of an axis, and how well it predicts B's held-out activations."""
        together_b, together_a = (
            torch.cat([unit(getattr(one, side)) for one in evidence.samples], dim=1) for side in "ba"
        )
        covariances = together_b @ together_a.T
        if self.a.is_point(evidence.item_a) and is_centred(together_a) and is_centred(together_b):
            covariances = covariances + torch.full_like(covariances, 1 / covariances.numel())
        candidates = self._candidates(evidence, covariances, together_b, together_a)
        measured = [(self.quality(evidence, matrix), matrix) for matrix in candidates]
        quality, matrix = max(measured, key=lambda one: one[0].found)
        written, read = (evidence.ratio(matrix, side) for side in (OUTPUT, INPUT))
        produced = evidence.produced or written or read or 1.0
        return Map.rectangular(matrix.float().numpy(), produced, read or produced), quality

    def _candidates(self, evidence: AxisEvidence, covariances: Tensor, b: Tensor, a: Tensor) -> list[Tensor]:
        groups = self._group(self.a, evidence.item_a), self._group(self.b, evidence.item_b)
        heads = self._heads(self.a, evidence.item_a), self._heads(self.b, evidence.item_b)
        if all(one.rotates_pairs for one in groups):
            return [matched_planes(covariances, heads, groups)]
        if Symmetry.PERMUTATION not in groups:  # units have places of their own in both
            return [matched_heads(covariances, heads)]
        if heads != (1, 1) or self.a.is_point(evidence.item_a):
            return [isometry(covariances)]
        assigned = assigned_units(normalise_units(b) @ normalise_units(a).T)
        return [assigned, isometry(covariances)] if _spans(a) else [assigned]

    @staticmethod
    def _group(model: RecordedModel, item: Item) -> Symmetry:
        return model.architecture.spaces[list(names_in(item))[-1]].group

    @staticmethod
    def _heads(model: RecordedModel, item: Item) -> int:
        """Return how many heads an axis is divided into."""
        *outer, _ = names_in(item)
        return int(np.prod([model.architecture.sizes[name] for name in outer] or [1]))

    @staticmethod
    def quality(evidence: AxisEvidence, matrix: Tensor) -> PredictionQuality:
        moved = [(one.b, matrix.to(one.a) @ one.a) for one in evidence.held_out]
        return PredictionQuality(
            fmean(predicted(b, a) for b, a in moved), 0.0, fmean(predicted(b, shuffled(a)) for b, a in moved)
        )


def is_centred(values: Tensor) -> bool:
    """Return whether the mean over all units is zero in every sample, as behind LayerNorm.

    The direction in which all units are equal then has no activations, and is the same one in both models.
    """
    mean, size = values.mean(dim=0), values.square().mean(dim=0).sqrt()
    return bool((mean.abs() < 1e-3 * size).all())


def negligible(matrix: Tensor) -> float:
    """Return the share of the largest singular value below which the others are roundings."""
    return max(FULL_RANK, max(matrix.shape) * torch.finfo(matrix.dtype).eps)


def isometry(covariances: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal columns, or rows if B's axis is the smaller one."""
    u, sizes, v = torch.linalg.svd(covariances, full_matrices=False)
    known = sizes > negligible(covariances) * sizes.max().clamp(min=1e-30)
    nearest: Tensor = (u * known) @ v
    return nearest


def assigned_units(similarities: Tensor) -> Tensor:
    """Return the matrix of the best one-to-one assignment; units of the larger axis may have none."""
    rows, columns = _assignment(similarities.numpy(), maximize=True)
    matrix = torch.zeros_like(similarities)
    matrix[rows, columns] = 1
    return matrix


def matched_heads(covariances: Tensor, heads: tuple[int, int]) -> Tensor:
    """Assign heads to heads whose units stay in their places; nothing moves between heads of other sizes."""
    ours, theirs = heads[1], heads[0]
    blocks = _by_heads(covariances, ours, theirs)
    if blocks.shape[2] != blocks.shape[3]:
        return torch.zeros_like(covariances)
    agreement = torch.diagonal(blocks, dim1=2, dim2=3).sum(-1)
    return _joined(agreement, lambda i, j: torch.eye(blocks.shape[2], dtype=covariances.dtype), blocks)


def matched_planes(covariances: Tensor, heads: tuple[int, int], groups: tuple[Symmetry, Symmetry]) -> Tensor:
    """Assign heads to heads, and rotate each plane of rotary positions onto the one of its frequency."""
    blocks = _by_heads(covariances, heads[1], heads[0])
    size_b, size_a = blocks.shape[2:]
    (one_a, two_a), (one_b, two_b) = (
        rotary_pairs(group, size) for group, size in zip(groups, (size_a, size_b), strict=True)
    )
    planes = nearest_frequencies(size_b // 2, size_a // 2)
    to, of = planes[:, 0], planes[:, 1]
    along = blocks[..., one_b[to], one_a[of]] + blocks[..., two_b[to], two_a[of]]
    across = blocks[..., two_b[to], one_a[of]] - blocks[..., one_b[to], two_a[of]]
    found = torch.complex(along, across)

    def block(i: int, j: int) -> Tensor:
        angles = found[i, j].angle()
        matrix = covariances.new_zeros(size_b, size_a)
        matrix[one_b[to], one_a[of]] = matrix[two_b[to], two_a[of]] = torch.cos(angles)
        matrix[two_b[to], one_a[of]] = torch.sin(angles)
        matrix[one_b[to], two_a[of]] = -torch.sin(angles)
        return matrix

    return _joined(found.abs().sum(-1), block, blocks)


def nearest_frequencies(ours: int, theirs: int) -> Tensor:
    """Pair the planes of two heads whose rotary positions turn at about the same speed: (ours, theirs)."""
    distance = (torch.arange(ours)[:, None] / ours - torch.arange(theirs) / theirs).abs()
    rows, columns = _assignment(distance.numpy())
    return torch.tensor(np.stack([rows, columns], axis=1))


def _by_heads(covariances: Tensor, ours: int, theirs: int) -> Tensor:
    """Return the covariances as (B's head, A's head, B's unit, A's unit)."""
    rows, columns = covariances.shape
    return covariances.reshape(ours, rows // ours, theirs, columns // theirs).movedim(2, 1)


def _joined(agreement: Tensor, block: Callable[[int, int], Tensor], blocks: Tensor) -> Tensor:
    """Return the map of whole heads. Where B has more heads, the others take the head that fits best."""
    ours, theirs, units_b, units_a = blocks.shape
    rows, columns = _assignment(agreement.numpy(), maximize=True)
    assigned: dict[int, int] = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    if ours > theirs:
        best = agreement.argmax(1).tolist()
        assigned = {head: assigned.get(head, best[head]) for head in range(ours)}
    matrix = blocks.new_zeros(ours, units_b, theirs, units_a)
    for i, j in assigned.items():
        matrix[i, :, j] = block(i, j)
    return matrix.reshape(ours * units_b, theirs * units_a)


def _spans(values: Tensor) -> bool:
    """Return whether activations reach all directions, from the eigenvalues of their products."""
    sizes = torch.linalg.eigvalsh(values @ values.T)
    return bool(sizes.min() > negligible(values) * sizes.max())


def prediction(b: Tensor, a: Tensor, held_b: Tensor, held_a: Tensor) -> float:
    """Return how much of B's held-out activations an isometry predicts that was found on the others."""
    if not b.abs().sum() or not a.abs().sum():
        return 0.0
    (a, b), (held_a, held_b) = comparable(a, b), comparable(held_a, held_b)
    return predicted(held_b.T, isometry(b.T @ a) @ held_a.T)


def _assignment(
    values: NDArray[Any], *, maximize: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows and columns of the best assignment of a rectangular matrix."""
    from scipy.optimize import linear_sum_assignment  # its import takes half a second

    rows, columns = linear_sum_assignment(values, maximize=maximize)
    return rows.astype(np.int64), columns.astype(np.int64)


def monotone_path(quality: Sequence[Sequence[float]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of blocks (of A, of B) with the largest total quality.

    ``quality[i][j]`` is that of A's block i and B's block j. Both ends are paired, the order is kept, every
    block has a partner, and every block of the deeper model has exactly one.
    """
    table = np.asarray(quality, dtype=np.float64)
    if table.shape[0] > table.shape[1]:
        return tuple((i, j) for j, i in monotone_path(table.T.tolist()))
    depth, deeper = table.shape
    best = np.full((depth, deeper), -np.inf)
    best[0, 0] = table[0, 0]
    for j in range(1, deeper):
        for i in range(min(j + 1, depth)):
            before = best[i, j - 1] if i == 0 else max(best[i, j - 1], best[i - 1, j - 1])
            best[i, j] = before + table[i, j]
    path = [(depth - 1, deeper - 1)]
    while path[-1][1]:
        i, j = path[-1]
        stays = i < j and best[i, j - 1] >= (best[i - 1, j - 1] if i else -np.inf)
        path.append((i if stays else i - 1, j - 1))
    return tuple(reversed(path))
