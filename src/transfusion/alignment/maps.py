"""Map: y = s · M x along one axis, from A's units x to B's units y.

A permutation, a transport plan, a rotation and a map between axes of different sizes are all such maps. They
differ in which matrices M are allowed, and in how they are inverted. A permutation is stored as an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.architecture.layouts import Index
from transfusion.errors import AlignmentError

Matrices: TypeAlias = NDArray[np.floating[Any]]
"""One matrix per block: (blocks, units of B, units of A)."""
_TOLERANCE = 1e-3
"""For shares that must sum to 1, and for orthogonality; files and float32 round."""


class Kind(StrEnum):
    """Which matrices a map may have."""

    PERMUTATION = "permutation"
    """Unit j of block i comes from unit ``index[i, j]``."""
    PLAN = "plan"
    """A soft assignment: unit j is the mean of all units of A, weighted by shares that sum to 1."""
    ROTATION = "rotation"
    """An orthogonal matrix, with scales for activations that are larger in B than in A."""
    RECTANGULAR = "rectangular"
    """Between axes of different sizes: an isometry, a projection or a partial assignment, with scales."""


@dataclass(frozen=True, eq=False)
class Map:
    """y = s · M x for every block of an axis.

    An axis within others, such as the units of each head, has one block per element of its ancestors; other
    axes have one block.
    """

    kind: Kind
    values: NDArray[Any]
    """The index of a permutation, (blocks, units); otherwise the matrices M."""
    produced: Matrices
    """The scale s of outputs for each block: how much larger B's are."""
    read: Matrices
    """The scale of inputs for each block. Tensors that read the axis are divided by it."""
    writing: Matrices | None = None
    """The matrices for tensors that write the axis, if a rotation has others for those."""

    # ── the kinds ────────────────────────────────────────────────────────────────────────────

    @classmethod
    def permutation(cls, index: Index) -> Map:
        """Return the map in which unit j of block i comes from unit ``index[i, j]``."""
        index = np.atleast_2d(np.asarray(index, dtype=np.int64))
        if not (np.sort(index, axis=1) == np.arange(index.shape[1])).all():
            raise AlignmentError("an index vector is not a permutation: a position occurs twice")
        ones = np.ones(len(index), dtype=np.float32)
        return cls(Kind.PERMUTATION, index, ones, ones)

    @classmethod
    def identity(cls, size: int, blocks: int = 1) -> Map:
        return cls.permutation(np.tile(np.arange(size), (blocks, 1)))

    @classmethod
    def random(cls, size: int, blocks: int, rng: np.random.Generator) -> Map:
        """Return a random permutation per block; never the identity in all blocks, if others exist."""
        while True:
            drawn = cls.permutation(np.stack([rng.permutation(size) for _ in range(blocks)]))
            if size == 1 or not drawn.is_identity():
                return drawn

    @classmethod
    def plan(cls, shares: Matrices) -> Map:
        """Return a transport plan. Shares are kept in float32, in memory as in files."""
        shares = np.ascontiguousarray(shares, dtype=np.float32)
        _require_square(shares, Kind.PLAN)
        if not np.isfinite(shares).all() or (shares < 0).any():
            raise AlignmentError("a plan has shares that are negative or not numbers")
        if (np.abs(shares.sum(axis=2, dtype=np.float64) - 1) > _TOLERANCE).any():
            raise AlignmentError("a plan has shares that do not sum to 1")
        ones = np.ones(len(shares), dtype=np.float32)
        return cls(Kind.PLAN, shares, ones, ones)

    @classmethod
    def rotation(
        cls,
        matrix: Matrices,
        produced: Sequence[float] | Matrices,
        read: Sequence[float] | Matrices,
        writing: Matrices | None = None,
    ) -> Map:
        """Return a rotation or reflection, in float64 if the matrix is, otherwise in float32."""
        matrix = _orthogonal(_floating(matrix))
        if writing is not None:
            writing = _orthogonal(np.ascontiguousarray(writing, dtype=matrix.dtype))
            if writing.shape != matrix.shape:
                raise AlignmentError(
                    f"a rotation reads by matrices of shape {matrix.shape} and writes by {writing.shape}"
                )
            writing = None if np.array_equal(writing, matrix) else writing
        produced, read = (_positive(one, matrix, Kind.ROTATION) for one in (produced, read))
        return cls(Kind.ROTATION, matrix, produced, read, writing)

    @classmethod
    def rectangular(cls, matrix: Matrices, produced: float = 1.0, read: float = 1.0) -> Map:
        """Return the map by one matrix, (units of B, units of A)."""
        matrix = _floating(matrix)
        if matrix.ndim != 2 or not matrix.size or not np.isfinite(matrix).all():
            raise AlignmentError("a map between axes of different sizes is not a matrix of finite numbers")
        scales = [_positive([one], matrix[None], Kind.RECTANGULAR) for one in (produced, read)]
        return cls(Kind.RECTANGULAR, matrix[None], scales[0], scales[1])

    @classmethod
    def of(
        cls,
        kind: Kind,
        values: NDArray[Any],
        produced: Sequence[float],
        read: Sequence[float],
        writing: Matrices | None = None,
    ) -> Map:
        """Return a map from the numbers of a file, checked as one of its kind."""
        match kind:
            case Kind.PERMUTATION:
                return cls.permutation(values)
            case Kind.PLAN:
                return cls.plan(values)
            case Kind.ROTATION:
                return cls.rotation(values, produced, read, writing)
        return cls.rectangular(values[0], produced[0], read[0])

    # ── what it is ───────────────────────────────────────────────────────────────────────────

    @property
    def permutes(self) -> bool:
        """Whether every unit of B is one unit of A."""
        return self.kind is Kind.PERMUTATION

    @property
    def rotates(self) -> bool:
        """Whether units are rotated or projected: a map from activations, with scales."""
        return self.kind in (Kind.ROTATION, Kind.RECTANGULAR)

    @property
    def blocks(self) -> int:
        return int(self.values.shape[0])

    @property
    def size(self) -> int:
        """The number of units of B."""
        return int(self.values.shape[1])

    @property
    def source_size(self) -> int:
        """The number of units of A."""
        return int(self.values.shape[-1])

    @property
    def index(self) -> Index:
        """The index of a permutation."""
        if not self.permutes:
            raise TypeError(f"a {self.kind} has no index")
        return self.values

    @property
    def matrix(self) -> Matrices:
        """The matrices M, for activations and for tensors that read the axis; computed for a permutation."""
        return np.eye(self.size, dtype=np.float32)[self.values] if self.permutes else self.values

    @property
    def written(self) -> Matrices:
        """The matrices for tensors that write the axis."""
        return self.matrix if self.writing is None else self.writing

    @property
    def reading(self) -> Map:
        """The map of activations: the matrices for readers, and for writers as well."""
        return self if self.writing is None else replace(self, writing=None)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + (0 if self.writing is None else self.writing.nbytes))

    def is_identity(self) -> bool:
        """Return whether nothing moves."""
        return self.size == self.source_size and self == Map.identity(self.size, self.blocks)

    def __eq__(self, other: object) -> bool:
        """Return whether another map, of any kind, is exactly the same function."""
        if not isinstance(other, Map):
            return NotImplemented
        if self.permutes and other.permutes:
            return np.array_equal(self.values, other.values)
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("matrix", "written", "produced", "read")
        )

    # ── what it does ─────────────────────────────────────────────────────────────────────────

    def apply(
        self, tensor: Tensor, dim: int, ancestors: Sequence[int] = (), *, reads: bool = False
    ) -> Tensor:
        """Return y = s · M x along one dimension, in float32 at least, and in the tensor's own dtype.

        ``ancestors`` are the dimensions, already mapped, that select blocks. ``reads`` if the dimension is an
        input of the tensor: the scale then divides.
        """
        if self.permutes:
            return self._gather(tensor, dim, ancestors)
        matrix, scale = (self.matrix, 1 / self.read) if reads else (self.written, self.produced)
        places = (*ancestors, dim)
        front = tuple(range(len(places)))
        precision = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        x = tensor.movedim(places, front)  # (*ancestors, units of A, *rest)
        around, rest = x.shape[: len(ancestors)], x.shape[len(places) :]
        m, s = (torch.from_numpy(one).to(tensor.device, precision) for one in (matrix, scale))
        y = m @ x.reshape(self.blocks, self.source_size, -1).to(precision)  # (blocks, units of B, rest)
        if not bool((s == 1).all()):
            y *= s[:, None, None]
        kept = tensor.dtype if tensor.is_floating_point() else precision
        return y.reshape(*around, self.size, *rest).movedim(front, places).to(kept)

    def _gather(self, tensor: Tensor, dim: int, ancestors: Sequence[int]) -> Tensor:
        shape = [1] * tensor.ndim
        shape[dim] = self.size
        for ancestor in ancestors:
            shape[ancestor] = tensor.shape[ancestor]
        index = torch.from_numpy(self.index).to(tensor.device).reshape(shape)
        return torch.take_along_dim(tensor, index.expand(tensor.shape), dim)

    def inverse(self, lineage: Index) -> Map:
        """Return the map from B's units to A's. ``lineage[i]`` is A's block of B's block i.

        A plan has no exact inverse: its shares are transposed and normalised, and a unit that has no share in
        any other becomes the mean of all.
        """
        match self.kind:
            case Kind.PERMUTATION:
                return Map.permutation(_put_back(np.argsort(self.index, axis=1), lineage))
            case Kind.PLAN:
                shares = _put_back(self.matrix.transpose(0, 2, 1).astype(np.float64), lineage)
                total = shares.sum(axis=2, keepdims=True)
                alike = np.full_like(shares, 1 / self.size)
                return Map.plan(np.divide(shares, total, out=alike, where=total > 0))
            case Kind.ROTATION:
                return Map.rotation(
                    _put_back(self.matrix.transpose(0, 2, 1), lineage),
                    _put_back(1 / self.produced, lineage),
                    _put_back(1 / self.read, lineage),
                    None if self.writing is None else _put_back(self.writing.transpose(0, 2, 1), lineage),
                )
        raise AlignmentError(
            "a map between axes of different sizes has no inverse", hint="align the two models the other way"
        )

    def after(self, first: Map, lineage: Index) -> Map:
        """Return the map that applies ``first``, then this one, whose ancestors have this ``lineage``."""
        if self.permutes and first.permutes:
            return Map.permutation(np.take_along_axis(first.index[lineage], self.index, axis=1))
        kinds = {self.kind, first.kind} - {Kind.PERMUTATION}
        if kinds == {Kind.PLAN}:
            return Map.plan(_product(self.matrix, first.matrix[lineage]))
        if kinds != {Kind.ROTATION}:
            raise AlignmentError(f"a {self.kind} cannot be applied after a {first.kind}")
        apart = self.writing is not None or first.writing is not None
        return Map.rotation(
            _product(self.matrix, first.matrix[lineage]),
            self.produced * first.produced[lineage],
            self.read * first.read[lineage],
            _product(self.written, first.written[lineage]) if apart else None,
        )


def _floating(matrix: Matrices) -> Matrices:
    """Return matrices in float64 if they are, otherwise in float32."""
    return np.ascontiguousarray(matrix, dtype=np.float64 if matrix.dtype == np.float64 else np.float32)


def _require_square(matrix: Matrices, kind: Kind) -> None:
    if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2]:
        raise AlignmentError(f"a {kind} of shape {matrix.shape} is not a stack of square matrices")


def _orthogonal(matrix: Matrices) -> Matrices:
    """Return matrices; refuse any that are not orthogonal."""
    _require_square(matrix, Kind.ROTATION)
    product = matrix.astype(np.float64) @ matrix.astype(np.float64).transpose(0, 2, 1)
    if not np.allclose(product, np.eye(matrix.shape[1]), atol=_TOLERANCE):
        raise AlignmentError("a rotation has a matrix that is not orthogonal")
    return matrix


def _positive(scale: Sequence[float] | Matrices, matrix: Matrices, kind: Kind) -> Matrices:
    """Return the scales of matrices; refuse any that are not positive."""
    found: Matrices = np.ascontiguousarray(scale, dtype=matrix.dtype)
    if found.shape != matrix.shape[:1] or not (np.isfinite(found) & (found > 0)).all():
        raise AlignmentError(f"a {kind} has scales that are not positive numbers, one for each block")
    return found


def _put_back(values: NDArray[Any], lineage: Index) -> NDArray[Any]:
    """Return the values of B's blocks in the places of the blocks of A that they come from."""
    back = np.empty_like(values)
    back[lineage] = values
    return back


def _product(later: Matrices, earlier: Matrices) -> Matrices:
    product: Matrices = later.astype(np.float64) @ earlier.astype(np.float64)
    return product.astype(np.result_type(later, earlier))
