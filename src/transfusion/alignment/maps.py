"""The kinds of maps: permutation, transport plan, rotation with scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.architecture.layouts import Index
from transfusion.errors import AlignmentError

_SUM = 1e-3
"""The tolerance for shares that must sum to 1, and for orthogonality; files and float32 round."""


class Map(ABC):
    """A change of basis of one axis, one per element of the axis's ancestors."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of maps: one per element of the ancestors."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The size of the axis."""

    @abstractmethod
    def apply(
        self, tensor: Tensor, dim: int, ancestors: Sequence[int] = (), *, reads: bool = False
    ) -> Tensor:
        """Map one dimension; ``ancestors`` are the dimensions, already mapped, that select rows.

        ``reads`` if the dimension is an input of the tensor: scales are then divided by, not multiplied with.
        """

    @abstractmethod
    def inverse(self, lineage: Index) -> Map:
        """Return the inverse map. ``lineage[i]`` is the source row of destination row i."""

    @abstractmethod
    def after(self, first: Map, lineage: Index) -> Map:
        """Return the map that applies ``first``, then this one, whose ancestors have this ``lineage``."""

    @property
    def reading(self) -> Map:
        """The map of activations: that of tensors which read the axis, for what is written as well."""
        return self

    @abstractmethod
    def is_identity(self) -> bool:
        """Return whether nothing moves."""

    @abstractmethod
    def to_tensor(self) -> Tensor:
        """Return the numbers that define the map, for a file."""

    @classmethod
    @abstractmethod
    def from_tensor(cls, tensor: Tensor) -> Map:
        """Return the map of the numbers that `to_tensor` returned."""


@dataclass(frozen=True, eq=False)
class Permutation(Map):
    """Position j of row i comes from position ``index[i, j]``."""

    index: Index
    kind: ClassVar[str] = "permutation"

    def __post_init__(self) -> None:
        index = np.atleast_2d(np.asarray(self.index, dtype=np.int64))
        if not (np.sort(index, axis=1) == np.arange(index.shape[1])).all():
            raise AlignmentError("an index vector is not a permutation: a position occurs twice")
        object.__setattr__(self, "index", index)

    @classmethod
    def identity(cls, size: int, rows: int = 1) -> Permutation:
        return cls(np.tile(np.arange(size), (rows, 1)))

    @classmethod
    def random(cls, size: int, rows: int, rng: np.random.Generator) -> Permutation:
        """Return a uniformly random permutation per row; never the identity in all rows, if others exist."""
        while True:
            drawn = cls(np.stack([rng.permutation(size) for _ in range(rows)]))
            if size == 1 or not drawn.is_identity():
                return drawn

    @property
    def rows(self) -> int:
        return int(self.index.shape[0])

    @property
    def size(self) -> int:
        return int(self.index.shape[1])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TransportMap | Rotation):
            return other == self
        return isinstance(other, Permutation) and np.array_equal(self.index, other.index)

    def apply(
        self, tensor: Tensor, dim: int, ancestors: Sequence[int] = (), *, reads: bool = False
    ) -> Tensor:
        shape = [1] * tensor.ndim
        shape[dim] = self.size
        for ancestor in ancestors:
            shape[ancestor] = tensor.shape[ancestor]
        index = torch.from_numpy(self.index).to(tensor.device).reshape(shape)
        return torch.take_along_dim(tensor, index.expand(tensor.shape), dim)

    def inverse(self, lineage: Index) -> Permutation:
        inverse = np.empty_like(self.index)
        inverse[lineage] = np.argsort(self.index, axis=1)
        return Permutation(inverse)

    def after(self, first: Map, lineage: Index) -> Map:
        if not isinstance(first, Permutation):
            wider = Rotation if isinstance(first, Rotation) else TransportMap
            return wider.of(self).after(first, lineage)
        return Permutation(np.take_along_axis(first.index[lineage], self.index, axis=1))

    def is_identity(self) -> bool:
        return bool((self.index == np.arange(self.size)).all())

    def to_tensor(self) -> Tensor:
        return torch.from_numpy(self.index.astype(np.int32))

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Permutation:
        return cls(tensor.numpy().astype(np.int64))


class _Matrices(Map):
    """A map that has a square matrix for each row."""

    matrix: NDArray[np.floating[Any]]

    @property
    def rows(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def size(self) -> int:
        return int(self.matrix.shape[1])


@dataclass(frozen=True, eq=False)
class TransportMap(_Matrices):
    """A soft map: unit j of row i is the mean of all source units, weighted by the shares ``matrix[i, j]``.

    The shares are numbers of at least 0 that sum to 1. They are kept in float32, in memory as in files.
    """

    matrix: NDArray[np.floating[Any]]
    kind: ClassVar[str] = "plan"

    def __post_init__(self) -> None:
        matrix = np.ascontiguousarray(self.matrix, dtype=np.float32)
        if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2]:
            raise AlignmentError(f"a plan of shape {matrix.shape} is not a stack of square matrices")
        if not np.isfinite(matrix).all() or (matrix < 0).any():
            raise AlignmentError("a plan has shares that are negative or not numbers")
        if (np.abs(matrix.sum(axis=2, dtype=np.float64) - 1) > _SUM).any():
            raise AlignmentError("a plan has shares that do not sum to 1")
        object.__setattr__(self, "matrix", matrix)

    @classmethod
    def of(cls, map_: Map) -> TransportMap:
        """Return a permutation as a plan of shares 0 and 1; return a plan unchanged."""
        match map_:
            case TransportMap():
                return map_
            case Permutation():
                return cls(np.eye(map_.size, dtype=np.float32)[map_.index])
        raise AlignmentError(f"a map of kind {map_.kind!r} cannot be written as a plan")

    def __eq__(self, other: object) -> bool:
        """Return whether another map, of this kind or a permutation, is exactly the same function."""
        return isinstance(other, TransportMap | Permutation) and np.array_equal(
            self.matrix, TransportMap.of(other).matrix
        )

    def apply(
        self, tensor: Tensor, dim: int, ancestors: Sequence[int] = (), *, reads: bool = False
    ) -> Tensor:
        """Mix the units of one dimension, in float32 at least; return the tensor's own type."""
        return _mixed(tensor, self.matrix, (*ancestors, dim))

    def inverse(self, lineage: Index) -> TransportMap:
        """Return the transposed shares, normalised to sum to 1: the exact inverse only of a permutation.

        A unit that has no share in any other becomes the mean of all.
        """
        back = np.empty(self.matrix.shape, dtype=np.float64)
        back[lineage] = self.matrix.transpose(0, 2, 1)
        total = back.sum(axis=2, keepdims=True)
        return TransportMap(np.divide(back, total, out=np.full_like(back, 1 / self.size), where=total > 0))

    def after(self, first: Map, lineage: Index) -> TransportMap:
        return TransportMap(
            self.matrix.astype(np.float64) @ TransportMap.of(first).matrix[lineage].astype(np.float64)
        )

    def is_identity(self) -> bool:
        return bool((self.matrix == np.eye(self.size)).all())

    def to_tensor(self) -> Tensor:
        return torch.from_numpy(self.matrix)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TransportMap:
        return cls(tensor.numpy())


@dataclass(frozen=True, eq=False)
class Rotation(_Matrices):
    """Unit j of row i is ``matrix[i, j]`` in the units of the source: a rotation, or a reflection.

    Scales account for activations that are larger in B than in A. All numbers are float64 if the matrix is,
    and float32 otherwise.
    """

    matrix: NDArray[np.floating[Any]]
    """For activations, and for tensors that read the axis."""
    produced: NDArray[np.floating[Any]]
    """For each row, the scale of the outputs: how much larger they are in B."""
    read: NDArray[np.floating[Any]]
    """For each row, the scale of the inputs, by which tensors that read the axis are divided."""
    writing: NDArray[np.floating[Any]] | None = None
    """The matrices for tensors that write the axis; None if they are those that read."""
    kind: ClassVar[str] = "rotation"

    def __post_init__(self) -> None:
        precision: type[np.floating[Any]] = np.float64 if self.matrix.dtype == np.float64 else np.float32
        matrix = _orthogonal(self.matrix, precision)
        if (writing := self.writing) is not None:
            writing = _orthogonal(writing, precision)
            if writing.shape != matrix.shape:
                raise AlignmentError(
                    f"a rotation reads by matrices of shape {matrix.shape} and writes by {writing.shape}"
                )
            writing = None if np.array_equal(writing, matrix) else writing
        scales = [np.ascontiguousarray(one, dtype=precision) for one in (self.produced, self.read)]
        if any(one.shape != matrix.shape[:1] or not (np.isfinite(one) & (one > 0)).all() for one in scales):
            raise AlignmentError("a rotation has scales that are not positive numbers, one for each row")
        names = ("matrix", "produced", "read", "writing")
        for name, value in zip(names, (matrix, *scales, writing), strict=True):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, map_: Map) -> Rotation:
        """Return a permutation as a rotation; return a rotation unchanged."""
        match map_:
            case Rotation():
                return map_
            case Permutation():
                ones = np.ones(map_.rows, dtype=np.float32)
                return cls(np.eye(map_.size, dtype=np.float32)[map_.index], ones, ones)
        raise AlignmentError(f"a map of kind {map_.kind!r} cannot be written as a rotation")

    def __eq__(self, other: object) -> bool:
        """Return whether another map, of this kind or a permutation, is exactly the same function."""
        if not isinstance(other, Rotation | Permutation):
            return False
        return np.array_equal(self.to_tensor().numpy(), Rotation.of(other).to_tensor().numpy())

    @property
    def _written(self) -> NDArray[np.floating[Any]]:
        return self.matrix if self.writing is None else self.writing

    @property
    def reading(self) -> Rotation:
        return self if self.writing is None else replace(self, writing=None)

    def apply(
        self, tensor: Tensor, dim: int, ancestors: Sequence[int] = (), *, reads: bool = False
    ) -> Tensor:
        matrix, scale = (self.matrix, 1 / self.read) if reads else (self._written, self.produced)
        return _mixed(tensor, matrix * scale[:, None, None], (*ancestors, dim))

    def inverse(self, lineage: Index) -> Rotation:
        """Return the transposed matrices and inverted scales: what was written is written back by its own."""
        produced, read = np.empty_like(self.produced), np.empty_like(self.read)
        produced[lineage], read[lineage] = 1 / self.produced, 1 / self.read
        writing = None if self.writing is None else _transposed(self.writing, lineage)
        return Rotation(_transposed(self.matrix, lineage), produced, read, writing)

    def after(self, first: Map, lineage: Index) -> Rotation:
        """Chain what is read with what is read, and what is written with what is written."""
        earlier = Rotation.of(first)
        apart = self.writing is not None or earlier.writing is not None
        return Rotation(
            _chained(self.matrix, earlier.matrix[lineage]),
            self.produced * earlier.produced[lineage],
            self.read * earlier.read[lineage],
            _chained(self._written, earlier._written[lineage]) if apart else None,
        )

    def is_identity(self) -> bool:
        return self == Permutation.identity(self.size, self.rows)

    def to_tensor(self) -> Tensor:
        """Return the matrices, each followed by a row of its output scale and a row of its input scale.

        Matrices of their own for what is written come before the two rows.
        """
        lines = np.stack([self.produced, self.read], axis=1)[:, :, None].repeat(self.size, axis=2)
        matrices = [self.matrix] if self.writing is None else [self.matrix, self.writing]
        return torch.from_numpy(np.concatenate([*matrices, lines], axis=1))

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Rotation:
        values = tensor.numpy()
        size = values.shape[2] if values.ndim == 3 else 0
        if not values.size or not size or values.shape[1] not in (size + 2, 2 * size + 2):
            raise AlignmentError(f"values of shape {values.shape} are not matrices with their scales")
        writing = values[:, size:-2] if values.shape[1] > size + 2 else None
        return cls(values[:, :size], values[:, -2, 0], values[:, -1, 0], writing)


def _orthogonal(
    matrix: NDArray[np.floating[Any]], precision: type[np.floating[Any]]
) -> NDArray[np.floating[Any]]:
    """Return matrices in this precision; refuse any that are not orthogonal."""
    matrix = np.ascontiguousarray(matrix, dtype=precision)
    if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2]:
        raise AlignmentError(f"a rotation of shape {matrix.shape} is not a stack of square matrices")
    product = matrix.astype(np.float64) @ matrix.astype(np.float64).transpose(0, 2, 1)
    if not np.allclose(product, np.eye(matrix.shape[1]), atol=_SUM):
        raise AlignmentError("a rotation has a matrix that is not orthogonal")
    return matrix


def _transposed(matrix: NDArray[np.floating[Any]], lineage: Index) -> NDArray[np.floating[Any]]:
    """Return the transposed matrices, each in the row that it comes from."""
    back = np.empty_like(matrix)
    back[lineage] = matrix.transpose(0, 2, 1)
    return back


def _chained(
    later: NDArray[np.floating[Any]], earlier: NDArray[np.floating[Any]]
) -> NDArray[np.floating[Any]]:
    product: NDArray[np.floating[Any]] = later.astype(np.float64) @ earlier.astype(np.float64)
    return product.astype(np.result_type(later, earlier))


def _mixed(tensor: Tensor, matrix: NDArray[np.floating[Any]], places: tuple[int, ...]) -> Tensor:
    """Return the tensor with the last of some dimensions mixed, by one matrix per element of the others."""
    front = tuple(range(len(places)))
    precision = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    rotated = tensor.movedim(places, front)
    factors = torch.from_numpy(matrix).to(device=tensor.device, dtype=precision)
    mixed = factors @ rotated.reshape(*factors.shape[:2], -1).to(precision)
    kept = tensor.dtype if tensor.is_floating_point() else precision
    return mixed.reshape(rotated.shape).movedim(front, places).to(kept)


KINDS: dict[str, type[Map]] = {kind.kind: kind for kind in (Permutation, TransportMap, Rotation)}
