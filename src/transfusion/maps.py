"""Maps: what an alignment does to one axis, and how a tensor moves when its axes are mapped.

A map takes A's basis of an axis to B's. An axis that lies within another (the units inside a head)
has one map per element of its parents, stacked in the order of the destination; everything here
therefore carries a leading dimension of rows, of which an axis without a parent has one.

`move` is all that the rest of the program knows about maps. A new kind of map is a subclass of
`Map` with an `apply`; permutations take the faster road of a single gather per dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.errors import AlignmentError, LayoutError
from transfusion.layouts import Concat, Index, Item, Layout, Name, Product, index_map, names_in, size_of

_SUM = 1e-3
"""How far from 1 the shares of a plan may sum; files and float32 round."""


class Map(ABC):
    """A change of basis of one axis, one per element of the axis's ancestors."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many maps this is: one per element of the ancestors."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The size of the axis."""

    @abstractmethod
    def apply(
        self, tensor: Tensor, dim: int, ancestors: Sequence[int] = (), *, reads: bool = False
    ) -> Tensor:
        """Move one dimension; ``ancestors`` are the dimensions, already moved, that select rows.

        ``reads`` if the tensor takes its inputs there: what is twice as large in B is then read by half.
        """

    @abstractmethod
    def inverse(self, lineage: Index) -> Map:
        """The map back. ``lineage[i]`` is the source row that destination row i comes from."""

    @abstractmethod
    def after(self, first: Map, lineage: Index) -> Map:
        """``first``, then this. ``lineage`` belongs to this map's ancestors."""

    @abstractmethod
    def is_identity(self) -> bool:
        """Whether nothing moves."""

    @abstractmethod
    def to_tensor(self) -> Tensor:
        """The numbers that define the map, for a file."""

    @classmethod
    @abstractmethod
    def from_tensor(cls, tensor: Tensor) -> Map:
        """The map that `to_tensor` described."""


@dataclass(frozen=True, eq=False)
class Permutation(Map):
    """Position j of row i comes from position ``index[i, j]``."""

    index: Index
    kind: ClassVar[str] = "permutation"

    def __post_init__(self) -> None:
        index = np.atleast_2d(np.asarray(self.index, dtype=np.int64))
        if not (np.sort(index, axis=1) == np.arange(index.shape[1])).all():
            raise AlignmentError("an index vector is not a permutation: some position is taken twice")
        object.__setattr__(self, "index", index)

    @classmethod
    def identity(cls, size: int, rows: int = 1) -> Permutation:
        return cls(np.tile(np.arange(size), (rows, 1)))

    @classmethod
    def random(cls, size: int, rows: int, rng: np.random.Generator) -> Permutation:
        """A uniformly random permutation per row; never the identity where another exists."""
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
        if isinstance(other, Plan | Rotation):
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
            wider = Rotation if isinstance(first, Rotation) else Plan
            return wider.of(self).after(first, lineage)
        return Permutation(np.take_along_axis(first.index[lineage], self.index, axis=1))

    def is_identity(self) -> bool:
        return bool((self.index == np.arange(self.size)).all())

    def to_tensor(self) -> Tensor:
        return torch.from_numpy(self.index.astype(np.int32))

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Permutation:
        return cls(tensor.numpy().astype(np.int64))


@dataclass(frozen=True, eq=False)
class Plan(Map):
    """A soft map: unit j of row i is made of all units of the source, in the shares ``matrix[i, j]``.

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
    def of(cls, map_: Map) -> Plan:
        """A permutation as a plan in which every share is 0 or 1; a plan as it is."""
        match map_:
            case Plan():
                return map_
            case Permutation():
                return cls(np.eye(map_.size, dtype=np.float32)[map_.index])
        raise AlignmentError(f"a map of kind {map_.kind!r} cannot be seen as a plan")

    @property
    def rows(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def size(self) -> int:
        return int(self.matrix.shape[1])

    def __eq__(self, other: object) -> bool:
        """Whether another map, of this kind or a permutation, does exactly the same."""
        return isinstance(other, Plan | Permutation) and np.array_equal(self.matrix, Plan.of(other).matrix)

    def apply(
        self, tensor: Tensor, dim: int, ancestors: Sequence[int] = (), *, reads: bool = False
    ) -> Tensor:
        """Mix the units of one dimension, in float32 at least, and give back the tensor's own type."""
        return _mixed(tensor, self.matrix, (*ancestors, dim))

    def inverse(self, lineage: Index) -> Plan:
        """The transposed shares, made to sum to 1 again; undoes the plan only if it is a permutation.

        A unit that nothing is made of comes back as the mean of all.
        """
        back = np.empty(self.matrix.shape, dtype=np.float64)
        back[lineage] = self.matrix.transpose(0, 2, 1)
        total = back.sum(axis=2, keepdims=True)
        return Plan(np.divide(back, total, out=np.full_like(back, 1 / self.size), where=total > 0))

    def after(self, first: Map, lineage: Index) -> Plan:
        return Plan(self.matrix.astype(np.float64) @ Plan.of(first).matrix[lineage].astype(np.float64))

    def is_identity(self) -> bool:
        return bool((self.matrix == np.eye(self.size)).all())

    def to_tensor(self) -> Tensor:
        return torch.from_numpy(self.matrix)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Plan:
        return cls(tensor.numpy())


@dataclass(frozen=True, eq=False)
class Rotation(Map):
    """Unit j of row i is ``matrix[i, j]`` in the units of the source: a rotation, or a reflection.

    What B produces there may be larger than what A does, and what it reads from there too. All numbers are
    kept in float64 if the matrix comes in it, and in float32 otherwise.
    """

    matrix: NDArray[np.floating[Any]]
    produced: NDArray[np.floating[Any]]
    """For each row, how much larger."""
    read: NDArray[np.floating[Any]]
    kind: ClassVar[str] = "rotation"

    def __post_init__(self) -> None:
        precision: type[np.floating[Any]] = np.float64 if self.matrix.dtype == np.float64 else np.float32
        matrix = np.ascontiguousarray(self.matrix, dtype=precision)
        if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2]:
            raise AlignmentError(f"a rotation of shape {matrix.shape} is not a stack of square matrices")
        product = matrix.astype(np.float64) @ matrix.astype(np.float64).transpose(0, 2, 1)
        if not np.allclose(product, np.eye(matrix.shape[1]), atol=_SUM):
            raise AlignmentError("a rotation has a matrix that is not orthogonal")
        scales = [np.ascontiguousarray(one, dtype=precision) for one in (self.produced, self.read)]
        if any(one.shape != matrix.shape[:1] or not (np.isfinite(one) & (one > 0)).all() for one in scales):
            raise AlignmentError("a rotation has scales that are not positive numbers, one for each row")
        for name, value in zip(("matrix", "produced", "read"), (matrix, *scales), strict=True):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, map_: Map) -> Rotation:
        """A permutation as a rotation that does the same; a rotation as it is."""
        match map_:
            case Rotation():
                return map_
            case Permutation():
                ones = np.ones(map_.rows, dtype=np.float32)
                return cls(np.eye(map_.size, dtype=np.float32)[map_.index], ones, ones)
        raise AlignmentError(f"a map of kind {map_.kind!r} cannot be seen as a rotation")

    @property
    def rows(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def size(self) -> int:
        return int(self.matrix.shape[1])

    def __eq__(self, other: object) -> bool:
        """Whether another map, of this kind or a permutation, does exactly the same."""
        if not isinstance(other, Rotation | Permutation):
            return False
        return np.array_equal(self.to_tensor().numpy(), Rotation.of(other).to_tensor().numpy())

    def apply(
        self, tensor: Tensor, dim: int, ancestors: Sequence[int] = (), *, reads: bool = False
    ) -> Tensor:
        scale = 1 / self.read if reads else self.produced
        return _mixed(tensor, self.matrix * scale[:, None, None], (*ancestors, dim))

    def inverse(self, lineage: Index) -> Rotation:
        back = np.empty_like(self.matrix)
        back[lineage] = self.matrix.transpose(0, 2, 1)
        scales = [np.empty_like(self.produced), np.empty_like(self.read)]
        for scale, own in zip(scales, (self.produced, self.read), strict=True):
            scale[lineage] = 1 / own
        return Rotation(back, *scales)

    def after(self, first: Map, lineage: Index) -> Rotation:
        earlier = Rotation.of(first)
        product = self.matrix.astype(np.float64) @ earlier.matrix[lineage].astype(np.float64)
        matrix = product.astype(np.result_type(self.matrix, earlier.matrix))
        return Rotation(matrix, self.produced * earlier.produced[lineage], self.read * earlier.read[lineage])

    def is_identity(self) -> bool:
        return self == Permutation.identity(self.size, self.rows)

    def to_tensor(self) -> Tensor:
        """The matrices, and below each a line of how much larger things are produced, and one of read."""
        lines = np.stack([self.produced, self.read], axis=1)[:, :, None].repeat(self.size, axis=2)
        return torch.from_numpy(np.concatenate([self.matrix, lines], axis=1))

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Rotation:
        values = tensor.numpy()
        if values.ndim != 3 or values.shape[1] != values.shape[2] + 2 or not values.size:
            raise AlignmentError(f"numbers of shape {values.shape} are no matrices with their scales")
        return cls(values[:, :-2], values[:, -2, 0], values[:, -1, 0])


def _mixed(tensor: Tensor, matrix: NDArray[np.floating[Any]], places: tuple[int, ...]) -> Tensor:
    """The last of some dimensions mixed by a matrix for each element of the others."""
    front = tuple(range(len(places)))
    precision = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    turned = tensor.movedim(places, front)
    factors = torch.from_numpy(matrix).to(device=tensor.device, dtype=precision)
    mixed = factors @ turned.reshape(*factors.shape[:2], -1).to(precision)
    kept = tensor.dtype if tensor.is_floating_point() else precision
    return mixed.reshape(turned.shape).movedim(front, places).to(kept)


KINDS: dict[str, type[Map]] = {kind.kind: kind for kind in (Permutation, Plan, Rotation)}


def move(
    tensor: Tensor,
    layout: Layout,
    maps: Mapping[str, Map],
    sizes: Mapping[str, int],
    parents: Mapping[str, str],
) -> Tensor:
    """The tensor with every axis of its layout mapped; axes without a map stay."""
    for dim in range(len(layout.items)):
        tensor = move_dim(tensor, dim, layout, maps, sizes, parents)
    return tensor


def moves_by_rows(layout: Layout, maps: Mapping[str, Map], parents: Mapping[str, str]) -> bool:
    """Whether each row of the moved tensor comes from one row of the tensor, whatever the others are."""
    return not any(
        not isinstance(map_, Permutation) and (dim == 0 or 0 in layout.outside(dim, parents).values())
        for dim, item in enumerate(layout.items)
        for name in names_in(item)
        if (map_ := maps.get(name)) is not None
    )


class RowMover:
    """Moves some rows of a tensor at a time. Where everything goes is found once, and kept.

    For layouts that `moves_by_rows` affirms.
    """

    def __init__(
        self, layout: Layout, maps: Mapping[str, Map], sizes: Mapping[str, int], parents: Mapping[str, str]
    ) -> None:
        self._dims = [_Dim.of(dim, layout, maps, sizes, parents) for dim in range(len(layout.items))]

    def __call__(self, read: Callable[[slice | Tensor], Tensor], rows: slice) -> Tensor:
        """Some rows of the moved tensor, of which only the rows that they come from are read."""
        first, *rest = self._dims
        block = read(rows if first.index is None else first.index[rows])
        for dim in rest:
            block = dim.moved(block, rows)
        return block


def move_dim(
    tensor: Tensor,
    dim: int,
    layout: Layout,
    maps: Mapping[str, Map],
    sizes: Mapping[str, int],
    parents: Mapping[str, str],
) -> Tensor:
    """The tensor with the axes of one dimension mapped; those before it have been mapped already."""
    return _Dim.of(dim, layout, maps, sizes, parents).moved(tensor)


@dataclass(frozen=True)
class _Dim:
    """What becomes of one dimension."""

    dim: int
    outside: Mapping[str, int]
    """Ancestors of its axes that have earlier dimensions of their own, and which."""
    index: Tensor | None = None
    """Where its positions come from, for every element of those outside; None if nothing moves by index."""
    by_factors: Callable[[Tensor], Tensor] | None = None
    """How it moves where some map is no permutation."""

    @classmethod
    def of(
        cls,
        dim: int,
        layout: Layout,
        maps: Mapping[str, Map],
        sizes: Mapping[str, int],
        parents: Mapping[str, str],
    ) -> _Dim:
        item, outside = layout.items[dim], layout.outside(dim, parents)
        here = {name: maps[name] for name in names_in(item) if name in maps}
        permutations = {name: map_.index for name, map_ in here.items() if isinstance(map_, Permutation)}
        if len(permutations) < len(here):
            return cls(
                dim,
                outside,
                by_factors=lambda tensor: _move_by_factors(
                    tensor, dim, item, here, sizes, parents, outside, reads=dim in layout.inputs
                ),
            )
        index = index_map(item, sizes, permutations, parents, tuple(outside))
        return cls(dim, outside, None if index is None else torch.from_numpy(index))

    def moved(self, tensor: Tensor, rows: slice | None = None) -> Tensor:
        """The tensor, or some rows of it, with this dimension moved; those before it have been."""
        if self.by_factors is not None:
            return self.by_factors(tensor)
        if self.index is None:
            return tensor
        index, places = self.index.to(tensor.device), tuple(self.outside.values())
        if not places:
            return tensor.index_select(self.dim, index)
        if rows is not None and 0 in places:
            index = index.narrow(places.index(0), rows.start, rows.stop - rows.start)
        return _select(tensor, self.dim, index, places)


def _select(tensor: Tensor, dim: int, index: Tensor, outside: tuple[int, ...]) -> Tensor:
    """One dimension gathered by an index for every element of earlier ones; element by element, which is
    several times faster than one gather of everything.
    """
    front = tuple(range(len(outside)))
    turned = tensor.movedim(outside, front)
    elements = turned.flatten(0, front[-1])
    moved = [
        element.index_select(dim - len(outside), one)
        for element, one in zip(elements, index.flatten(0, front[-1]), strict=True)
    ]
    return torch.stack(moved).reshape(turned.shape).movedim(front, outside)


def _move_by_factors(
    tensor: Tensor,
    dim: int,
    item: Item,
    maps: Mapping[str, Map],
    sizes: Mapping[str, int],
    parents: Mapping[str, str],
    places: Mapping[str, int],
    *,
    reads: bool = False,
) -> Tensor:
    """What `move_dim` does for maps of any kind: unfold the dimension and map axis by axis."""
    match item:
        case Name(text):
            map_ = maps.get(text)
            if map_ is None:
                return tensor
            return map_.apply(tensor, dim, _ancestors(text, parents, places), reads=reads)
        case Concat(parts):
            blocks = torch.split(tensor, [size_of(part, sizes) for part in parts], dim)
            return torch.cat(
                [
                    _move_by_factors(block, dim, part, maps, sizes, parents, places, reads=reads)
                    for block, part in zip(blocks, parts, strict=True)
                ],
                dim,
            )
        case Product(items):
            extents = [size_of(child, sizes) for child in items]
            unfolded = tensor.reshape(*tensor.shape[:dim], *extents, *tensor.shape[dim + 1 :])
            here = dict(places)
            for offset, child in enumerate(items):
                unfolded = _move_by_factors(
                    unfolded, dim + offset, child, maps, sizes, parents, here, reads=reads
                )
                if isinstance(child, Name):
                    here[child.text] = dim + offset
            return unfolded.reshape(tensor.shape)


def _ancestors(name: str, parents: Mapping[str, str], places: Mapping[str, int]) -> list[int]:
    """The dimensions that hold an axis's ancestors, outermost first."""
    chain: list[int] = []
    while (parent := parents.get(name)) is not None:
        if parent not in places:
            raise LayoutError(
                f"axis {name} lies within {parent}, which does not enclose it",
                hint=f"write the two together, as in ({parent} {name}), or give {parent} a dimension of its"
                " own before this one",
            )
        chain.insert(0, places[parent])
        name = parent
    return chain
