"""Map: y = s · M x along one axis, from A's units x to B's units y; and tensors moved by maps.

A permutation, a transport plan, a rotation and a map between axes of different sizes are all such maps. They
differ in which matrices M are allowed, and in how they are inverted. A permutation is stored as an index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.architecture.layouts import (
    Concat,
    Index,
    Item,
    Layout,
    Name,
    Product,
    index_map,
    names_in,
    size_of,
)
from transfusion.errors import AlignmentError, LayoutError

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
    """Between models of different shapes: an isometry, a projection or a partial assignment, with scales."""


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

    # ── the kinds ────────────────────────────────────────────────────────────────────────────

    @classmethod
    def of(
        cls,
        kind: Kind,
        values: NDArray[Any],
        produced: Sequence[float] | Matrices | None = None,
        read: Sequence[float] | Matrices | None = None,
    ) -> Map:
        """Return a map, checked as one of its kind; without scales, with scales of 1."""
        if kind is Kind.PERMUTATION:
            values = np.atleast_2d(np.asarray(values, dtype=np.int64))
            if not (np.sort(values, axis=1) == np.arange(values.shape[1])).all():
                raise AlignmentError("an index vector is not a permutation: a position occurs twice")
            unscaled = np.ones(len(values), dtype=np.float32)
            return cls(kind, values, unscaled, unscaled)
        double = values.dtype == np.float64 and kind is not Kind.PLAN  # plans as in files, in float32
        values = _checked(np.ascontiguousarray(values, dtype=np.float64 if double else np.float32), kind)
        ones = np.ones(len(values))
        scales: list[Matrices] = [
            np.ascontiguousarray(ones if one is None else one, dtype=values.dtype) for one in (produced, read)
        ]
        if not all(one.shape == values.shape[:1] and (np.isfinite(one) & (one > 0)).all() for one in scales):
            raise AlignmentError(f"a {kind} has scales that are not positive numbers, one for each block")
        return cls(kind, values, scales[0], scales[1])

    @classmethod
    def permutation(cls, index: Index) -> Map:
        """Return the map in which unit j of block i comes from unit ``index[i, j]``."""
        return cls.of(Kind.PERMUTATION, index)

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
        """Return a transport plan."""
        return cls.of(Kind.PLAN, shares)

    @classmethod
    def rotation(
        cls, matrix: Matrices, produced: Sequence[float] | Matrices, read: Sequence[float] | Matrices
    ) -> Map:
        """Return a rotation or reflection, in float64 if the matrix is, otherwise in float32."""
        return cls.of(Kind.ROTATION, matrix, produced, read)

    @classmethod
    def rectangular(cls, matrix: Matrices, produced: float = 1.0, read: float = 1.0) -> Map:
        """Return the map by one matrix, (units of B, units of A)."""
        return cls.of(Kind.RECTANGULAR, matrix[None], [produced], [read])

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
        """The matrices M; computed for a permutation."""
        return np.eye(self.size, dtype=np.float32)[self.values] if self.permutes else self.values

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
            for name in ("matrix", "produced", "read")
        )

    # ── what it does ─────────────────────────────────────────────────────────────────────────

    def apply(
        self, tensor: Tensor, dim: int, ancestors: Sequence[int] = (), *, reads: bool = False
    ) -> Tensor:
        """Return y = s · M x along one dimension, computed in float32 or wider, in the tensor's dtype.

        ``ancestors`` are the dimensions, already mapped, that select blocks. ``reads`` if the dimension is an
        input of the tensor: the scale then divides.
        """
        if self.permutes:
            return self._gather(tensor, dim, ancestors)
        matrix, scale = self.matrix, 1 / self.read if reads else self.produced
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
        return Map.rotation(
            _product(self.matrix, first.matrix[lineage]),
            self.produced * first.produced[lineage],
            self.read * first.read[lineage],
        )


def _checked(matrix: Matrices, kind: Kind) -> Matrices:
    """Return matrices; refuse those that a kind does not allow."""
    if kind is Kind.RECTANGULAR:
        if matrix.ndim != 3 or not matrix.size or not np.isfinite(matrix).all():
            raise AlignmentError("a map between axes of different sizes is not a matrix of finite numbers")
        return matrix
    if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2]:
        raise AlignmentError(f"a {kind} of shape {matrix.shape} is not a stack of square matrices")
    exact = matrix.astype(np.float64)
    if kind is Kind.PLAN:
        if not np.isfinite(matrix).all() or (matrix < 0).any():
            raise AlignmentError("a plan has shares that are negative or not numbers")
        if (np.abs(exact.sum(axis=2) - 1) > _TOLERANCE).any():
            raise AlignmentError("a plan has shares that do not sum to 1")
    elif not np.allclose(exact @ exact.transpose(0, 2, 1), np.eye(matrix.shape[1]), atol=_TOLERANCE):
        raise AlignmentError("a rotation has a matrix that is not orthogonal")
    return matrix


def _put_back(values: NDArray[Any], lineage: Index) -> NDArray[Any]:
    """Return the values of B's blocks in the places of the blocks of A that they come from."""
    back = np.empty_like(values)
    back[lineage] = values
    return back


def _product(later: Matrices, earlier: Matrices) -> Matrices:
    product: Matrices = later.astype(np.float64) @ earlier.astype(np.float64)
    return product.astype(np.result_type(later, earlier))


# ── tensors ──────────────────────────────────────────────────────────────────────────────


def move_tensor(
    tensor: Tensor,
    layout: Layout,
    maps: Mapping[str, Map],
    sizes: Mapping[str, int],
    parents: Mapping[str, str],
    dims: Sequence[int] | None = None,
) -> Tensor:
    """Return the tensor with every axis of its layout mapped; axes without a map stay.

    With ``dims``, only these dimensions are; earlier ones must be mapped already.
    """
    mover = Mover(layout, maps, sizes, parents)
    for dim in range(len(layout.items)) if dims is None else dims:
        tensor = mover.move_dim(tensor, dim)
    return tensor


class Mover:
    """Moves tensors of one layout; the indices are computed once."""

    def __init__(
        self, layout: Layout, maps: Mapping[str, Map], sizes: Mapping[str, int], parents: Mapping[str, str]
    ) -> None:
        self.layout, self.sizes, self.parents = layout, sizes, parents
        self.maps = {name: maps[name] for name in layout.names() if name in maps}
        self._indices: dict[int, Tensor | None] = {}

    @property
    def by_rows(self) -> bool:
        """Whether each row of the moved tensor depends on one row of the tensor only."""
        return not any(
            not self.maps[name].permutes
            and (dim == 0 or 0 in self.layout.outside(dim, self.parents).values())
            for dim, item in enumerate(self.layout.items)
            for name in names_in(item)
            if name in self.maps
        )

    def move_rows(self, read: Callable[[slice | Tensor], Tensor], rows: slice | Tensor) -> Tensor:
        """Return some rows of a tensor that moves `by_rows`; only their source rows are read."""
        index = self._index(0)
        block = read(rows if index is None else index[rows])
        for dim in range(1, len(self.layout.items)):
            block = self.move_dim(block, dim, rows)
        return block

    def move_dim(self, tensor: Tensor, dim: int, rows: slice | Tensor | None = None) -> Tensor:
        """Return the tensor, or some rows of it, with one dimension moved; earlier ones must be moved."""
        item, outside = self.layout.items[dim], self.layout.outside(dim, self.parents)
        if not all(self.maps[name].permutes for name in names_in(item) if name in self.maps):
            return self._move_by_factors(tensor, dim, item, outside, reads=dim in self.layout.inputs)
        if (index := self._index(dim)) is None:
            return tensor
        index, places = index.to(tensor.device), tuple(outside.values())
        if not places:
            return tensor.index_select(dim, index)
        if rows is not None and 0 in places:
            index = index[(*(slice(None),) * places.index(0), rows)]
        # element by element: several times faster than one gather of the whole tensor
        front = tuple(range(len(places)))
        turned = tensor.movedim(places, front)  # (*ancestors, …, units, …)
        elements = zip(turned.flatten(0, front[-1]), index.flatten(0, front[-1]), strict=True)
        moved = [element.index_select(dim - len(places), one) for element, one in elements]
        return torch.stack(moved).reshape(turned.shape).movedim(front, places)

    def _index(self, dim: int) -> Tensor | None:
        """Return the source of every position of a dimension, for every element of the ancestors that have
        earlier dimensions of their own; None if nothing moves.
        """
        if dim not in self._indices:
            permutations = {name: map_.index for name, map_ in self.maps.items() if map_.permutes}
            outside = tuple(self.layout.outside(dim, self.parents))
            index = index_map(self.layout.items[dim], self.sizes, permutations, self.parents, outside)
            self._indices[dim] = None if index is None else torch.from_numpy(index)
        return self._indices[dim]

    def _move_by_factors(
        self, tensor: Tensor, dim: int, item: Item, places: Mapping[str, int], *, reads: bool
    ) -> Tensor:
        """Move one dimension by maps of any kind: unfold the dimension and map axis by axis."""
        match item:
            case Name(text):
                if text not in self.maps:
                    return tensor
                return self.maps[text].apply(tensor, dim, self._ancestors(text, places), reads=reads)
            case Concat(parts):
                pieces = torch.split(tensor, [size_of(part, self.sizes) for part in parts], dim)
                moved = [
                    self._move_by_factors(piece, dim, part, places, reads=reads)
                    for piece, part in zip(pieces, parts, strict=True)
                ]
                return torch.cat(moved, dim)
            case Product(items):
                extents = [size_of(child, self.sizes) for child in items]
                # (h·d) becomes (h, d)
                unfolded = tensor.reshape(*tensor.shape[:dim], *extents, *tensor.shape[dim + 1 :])
                here = dict(places)
                for at, child in enumerate(items, dim):
                    unfolded = self._move_by_factors(unfolded, at, child, here, reads=reads)
                    if isinstance(child, Name):
                        here[child.text] = at
                return unfolded.reshape(tensor.shape)

    def _ancestors(self, name: str, places: Mapping[str, int]) -> list[int]:
        """Return the dimensions of an axis's ancestors, outermost first."""
        chain: list[int] = []
        while (parent := self.parents.get(name)) is not None:
            if parent not in places:
                raise LayoutError(
                    f"axis {name} lies within {parent}, which does not enclose it",
                    hint=f"write the two together, as in ({parent} {name}), or give {parent} a dimension of"
                    " its own before this one",
                )
            chain.insert(0, places[parent])
            name = parent
        return chain


@dataclass(frozen=True)
class NormFold:
    """A norm whose output a tensor reads. Its scale and shift are moved with the tensor, not on their own."""

    norm: str
    """The module."""
    offset: float = 0.0
    """The number that the norm adds to its weight: 1 in some families."""
