"""Sections: the part of a tensor that has an axis, as one matrix of the axis × everything else.

The maps of all other axes then only decide which *column* of A's matrix is paired with which of B's, and
`Section.columns` is that index vector. Matching is fast because the gain of an axis changes only by the
columns that moved, and because the vector covers all layouts (products, concatenations, experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.alignment.moves import move_dim
from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import ANONYMOUS, AxisFactor, Concat, Layout, Name, explode, size_of


@dataclass(frozen=True, eq=False)
class Section:
    """An axis in one dimension of a tensor, or in one part of a concatenation there."""

    architecture: Architecture
    tensor: str
    layout: Layout
    shape: tuple[int, ...]
    id: str
    dim: int
    part: int

    @classmethod
    def all_of(
        cls,
        architecture: Architecture,
        tensor: str,
        layout: Layout,
        shape: tuple[int, ...],
        id: str,
        dim: int,
    ) -> list[Section]:
        """Return the sections of an axis in one dimension of a tensor."""
        first = cls(architecture, tensor, layout, shape, id, dim, 0)
        count = len(first._pieces(first._outline, one_unit=True))
        return [cls(architecture, tensor, layout, shape, id, dim, part) for part in range(count)]

    @property
    def produces(self) -> bool:
        """Whether the tensor produces the axis (q, k and v the units of a head) or reads it (o)."""
        return self.dim in self.layout.outputs

    @cached_property
    def others(self) -> tuple[str, ...]:
        """The other axes of this part."""
        names = dict.fromkeys(factor.name for factor in self._factors)
        return tuple(name for name in names if name not in (self.id, ANONYMOUS))

    @property
    def rows(self) -> int:
        return self._extents[0]

    @property
    def width(self) -> int:
        return self._extents[1]

    @cached_property
    def key(self) -> str:
        """The name of this section in other processes."""
        return f"{self.tensor}:{self.dim}:{self.part}"

    @cached_property
    def plain(self) -> bool:
        """Whether the tensor is the matrix itself or its transpose, so that rows can be read separately."""
        alone = len(self.shape) == 2 and self.layout.items[self.dim] == Name(self.id)
        whole = not any(isinstance(item, Concat) for item in self.layout.items)
        return alone and whole and self.id not in self.architecture.parents

    @cached_property
    def member(self) -> Section | None:
        """The section of one member, if the tensor is a stack of members (experts) to be read separately."""
        first, spaces = self.layout.items[0], self.architecture.spaces
        if self.dim == 0 or not isinstance(first, Name) or first.text not in self.architecture.children:
            return None
        small = {id: spaces[id] for id in (*self.layout.names(), *self.architecture.parents) if id in spaces}
        small[first.text] = replace(spaces[first.text], size=1)
        architecture = replace(self.architecture, spaces=small)
        return replace(self, architecture=architecture, shape=(1, *self.shape[1:]))

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the matrix of a tensor: (rows of the axis, the axis, everything else)."""
        return self._unfold(*self._pieces(tensor)[self.part])

    def blocks(self, tensor: Tensor) -> Tensor:
        """Return one matrix for every unit of the axis: (the axis, what is inside it, the rest).

        Inside are the axes that share its dimension, and its children where it has a dimension of its own.
        """
        piece, factors = self._pieces(tensor)[self.part]
        first = factors.index(AxisFactor(self.id, self.dim))
        others = [place for place in range(len(factors)) if place != first]
        inside = [place for place in others if self._holds(factors[place])]
        outside = [place for place in others if place not in inside]
        height = torch.Size([piece.shape[place] for place in inside]).numel()
        rotated: Tensor = piece.permute(first, *inside, *outside)
        return rotated.reshape(piece.shape[first], height, -1)

    def columns(self, maps: Mapping[str, Map]) -> Tensor:
        """Return for every row and column of B's matrix the column of A's paired with it: (rows, width).

        Columns of A are numbered through all rows; the axis itself is not moved.
        """
        here = {id: maps[id] for id in self.others if id in maps}
        home, moved = self._places({}), self._places(here)
        number = torch.empty(int(home.max()) + 1, dtype=torch.int64)  # of the column at each position
        number[home.reshape(-1)] = torch.arange(home.numel())
        return number[moved]

    @cached_property
    def _factors(self) -> list[AxisFactor]:
        return self._pieces(self._outline, one_unit=True)[self.part][1]

    @cached_property
    def _extents(self) -> tuple[int, int]:
        """Rows and width, from the shape."""
        rows, _, width = self._unfold(*self._pieces(self._outline, one_unit=True)[self.part]).shape
        return int(rows), int(width)

    @property
    def _outline(self) -> Tensor:
        """The tensor with one unit of the axis, on the meta device."""
        return torch.empty(self._shape_of_one_unit, device="meta")

    def _places(self, maps: Mapping[str, Map]) -> Tensor:
        """Return the positions of all columns under maps."""
        return self._unfold(*self._pieces(self._positions(maps), one_unit=True)[self.part])[:, 0]

    def _positions(self, maps: Mapping[str, Map]) -> Tensor:
        """Return the tensor with one unit of the axis under maps, with positions instead of values."""
        sizes, shape = {**self.architecture.sizes, self.id: 1}, self._shape_of_one_unit
        positions = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for dim in range(len(shape)):
            positions = move_dim(positions, dim, self.layout, maps, sizes, self.architecture.parents)
        return positions

    @property
    def _shape_of_one_unit(self) -> list[int]:
        sizes = {**self.architecture.sizes, self.id: 1}
        return [
            size if item == Name(ANONYMOUS) else size_of(item, sizes)
            for item, size in zip(self.layout.items, self.shape, strict=True)
        ]

    def _pieces(self, tensor: Tensor, *, one_unit: bool = False) -> list[tuple[Any, list[AxisFactor]]]:
        """Return the parts of a tensor that have the axis, with their factors."""
        sizes = {**self.architecture.sizes, self.id: 1} if one_unit else self.architecture.sizes
        own = AxisFactor(self.id, self.dim)
        return [(piece, factors) for piece, factors in explode(tensor, self.layout, sizes) if own in factors]

    def _unfold(self, piece: Tensor, factors: Sequence[AxisFactor]) -> Tensor:
        return unfolded(piece, factors, AxisFactor(self.id, self.dim), self.architecture)

    def _holds(self, factor: AxisFactor) -> bool:
        return factor.dim == self.dim or self.architecture.parents.get(factor.name) == self.id


def unfold(tensor: Tensor, layout: Layout, id: str, dim: int, architecture: Architecture) -> Iterator[Tensor]:
    """Yield the pieces of a tensor with an axis in a dimension as (rows of the axis, the axis, the rest)."""
    for piece, factors in explode(tensor, layout, architecture.sizes):
        if AxisFactor(id, dim) in factors:
            yield unfolded(piece, factors, AxisFactor(id, dim), architecture)


def unfolded(
    piece: Tensor, factors: Sequence[AxisFactor], axis: AxisFactor, architecture: Architecture
) -> Tensor:
    """Return one piece, whose dimensions are these factors, as (rows of the axis, the axis, the rest)."""
    own = factors.index(axis)
    first = [*(_enclosing(factors[:own], name) for name in _ancestors(axis.name, architecture)), own]
    rest = [place for place in range(piece.ndim) if place not in first]
    return piece.permute(*first, *rest).reshape(architecture.rows(axis.name), piece.shape[own], -1)


def _ancestors(id: str, architecture: Architecture) -> list[str]:
    """Return the ancestors of an axis, outermost first."""
    parent = architecture.parents.get(id)
    return [] if parent is None else [*_ancestors(parent, architecture), parent]


def _enclosing(factors: Sequence[AxisFactor], name: str) -> int:
    """Return the last place of an axis among factors."""
    return max(place for place, factor in enumerate(factors) if factor.name == name)
