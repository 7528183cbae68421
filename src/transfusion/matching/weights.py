"""The weights of two models: the objective ⟨π(A), B⟩, and sections.

A section is the part of a tensor that has an axis, as one matrix of the axis × everything else. The maps of
all other axes then only decide which *column* of A's matrix is paired with which of B's, and
`Section.columns` is that index vector. It covers all layouts: products, concatenations, experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.maps import Map, Mover, move_tensor
from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import ANONYMOUS, AxisFactor, Concat, Layout, Name, explode, size_of
from transfusion.files.tensor_files import Rows, row_blocks
from transfusion.model.model import Model
from transfusion.model.pair import shared_tensors
from transfusion.runtime.engines import Engine, require_device


class WeightPair:
    """The weights of two models of one architecture, read on use."""

    def __init__(
        self,
        a: Model,
        b: Model,
        *,
        vectors: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.architecture: Architecture = a.architecture
        self.a, self.b = a, b
        self.place: dict[str, Any] = {"dtype": dtype, "device": require_device(device, torch.float64)}
        self.tensors = {
            name: a.architecture.tensors[name]
            for name in shared_tensors(a, b)
            if vectors or len(a.architecture.tensors[name].items) > 1
        }

    def read(self, side: str, name: str, rows: Rows | None = None) -> Tensor:
        """Return a tensor of model ``a`` or ``b``, or some of its rows, in the type of the computation."""
        model = self.a if side == "a" else self.b
        return model.read(name, rows).to(**self.place)

    def require_unchanged(self) -> None:
        """Refuse files that have changed since they were opened."""
        for model in (self.a, self.b):
            model.checkpoint.require_unchanged()

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the type of the computation."""
        dtype: torch.dtype = self.place["dtype"]
        return dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of both models in the type of the computation."""
        return 2 * self.itemsize * sum(torch.Size(self.a.info(name).shape).numel() for name in self.tensors)

    # ── tensors with π(A) beside B ───────────────────────────────────────────────────────────

    def moved(self, name: str, maps: Mapping[str, Map], rows: Rows | None = None) -> Tensor:
        """Return π(A) of one tensor, or some of its rows."""
        if rows is not None:
            return self._mover(name, maps).move_rows(partial(self.read, "a", name), rows)
        architecture = self.architecture
        layout, whole = self.tensors[name], self.read("a", name)
        return move_tensor(whole, layout, maps, architecture.sizes, architecture.parents)

    def _mover(self, name: str, maps: Mapping[str, Map]) -> Mover:
        return Mover(self.tensors[name], maps, self.architecture.sizes, self.architecture.parents)

    def side_by_side(self, name: str, maps: Mapping[str, Map]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, π(A) and B of one tensor: some rows at a time where rows can be moved separately."""
        shape, mover = self.a.info(name).shape, self._mover(name, maps)
        if shape and mover.by_rows:
            for rows in row_blocks(shape):  # always the same ones: sums keep their digits
                yield rows, mover.move_rows(partial(self.read, "a", name), rows), self.read("b", name, rows)
        else:
            yield slice(None), self.moved(name, maps), self.read("b", name)

    def beside(self, name: str, maps: Mapping[str, Map]) -> dict[str, Map]:
        """Return the maps of the axes that a tensor has."""
        return {id: maps[id] for id in self.tensors[name].names() if id in maps}

    def products(self, name: str, maps: Mapping[str, Map], *pairs: str) -> list[float]:
        """Return inner products of one tensor. In ``pairs``, a is π(A), b is B, and d is B − π(A)."""
        totals = [0.0] * len(pairs)
        for _, a, b in self.side_by_side(name, maps):
            sides = {"a": a, "b": b} | ({"d": b - a} if "d" in "".join(pairs) else {})
            for place, pair in enumerate(pairs):
                totals[place] += sum_of(dot_by_row(sides[pair[0]], sides[pair[1]]))
        return totals

    def score(self, name: str, maps: Mapping[str, Map]) -> float:
        """Return ⟨π(A), B⟩ of one tensor; refuse values that are not finite."""
        (total,) = self.products(name, maps, "ab")
        if not isfinite(total):
            for model in (self.a, self.b):
                model.read(name)  # refuses it by name
        return total

    # ── axes ─────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def sections(self) -> dict[str, list[Section]]:
        """For every axis, the parts of tensors in which it occurs.

        A tensor with an axis in two dimensions would make the assignment quadratic, and does not count.
        """
        found: dict[str, list[Section]] = {}
        for tensor, layout in self.tensors.items():
            shape = self.a.info(tensor).shape
            for id in layout.names():
                if len(dims := layout.dims_with(id)) == 1:
                    first = Section(self.architecture, tensor, layout, shape, id, dims[0], 0)
                    parts = range(first.parts)
                    found.setdefault(id, []).extend(
                        Section(self.architecture, tensor, layout, shape, id, dims[0], part) for part in parts
                    )
        return found

    @cached_property
    def axes(self) -> list[str]:
        """The free axes that occur in some tensor, in the order of the forward pass."""
        return [space.id for space in self.architecture.free() if space.id in self.sections]

    @cached_property
    def neighbours(self) -> dict[str, set[str]]:
        """For every axis, the axes that it shares a section with."""
        return {
            id: {other for section in sections for other in section.others}
            for id, sections in self.sections.items()
        }

    @cached_property
    def tensors_of(self) -> dict[str, list[str]]:
        """For every axis with a section, all tensors in which it occurs."""
        found: dict[str, list[str]] = {id: [] for id in self.sections}
        for tensor, layout in self.tensors.items():
            for id in layout.names():
                if id in found:
                    found[id].append(tensor)
        return found

    def tensors_with(self, ids: Iterable[str]) -> list[str]:
        """Return the tensors that have some of these axes."""
        return list(dict.fromkeys(name for id in ids for name in self.tensors_of[id]))


def tensor_products(
    weights: WeightPair, names: Sequence[str], maps: Mapping[str, Map], engine: Engine, *pairs: str
) -> dict[str, list[float]]:
    """Return `WeightPair.products` of every tensor; by default ⟨π(A), B⟩, checked."""
    tasks = [(name, weights.beside(name, maps), pairs) for name in names]
    return dict(zip(names, engine.map(partial(_products, weights), tasks), strict=True))


def _products(weights: WeightPair, task: tuple[str, Mapping[str, Map], tuple[str, ...]]) -> list[float]:
    name, maps, pairs = task
    return weights.products(name, maps, *pairs) if pairs else [weights.score(name, maps)]


def dot_by_row(one: Tensor, other: Tensor) -> Tensor:
    """Return the products of two tensors along their last dimension; short sums lose no digits."""
    products: Tensor = torch.linalg.vecdot(one, other)  # (rows,)
    return products


def sum_of(values: Tensor) -> float:
    """Return a sum in float64."""
    return float(values.sum(dtype=torch.float64))


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

    @property
    def produces(self) -> bool:
        """Whether the tensor produces the axis (q, k and v the units of a head) or reads it (o)."""
        return self.dim in self.layout.outputs

    @property
    def key(self) -> str:
        return f"{self.tensor}:{self.dim}:{self.part}"

    @cached_property
    def plain(self) -> bool:
        """Whether the tensor is the matrix itself or its transpose, so that rows can be read separately."""
        alone = len(self.shape) == 2 and self.layout.items[self.dim] == Name(self.id)
        whole = not any(isinstance(item, Concat) for item in self.layout.items)
        return alone and whole and self.id not in self.architecture.parents

    @cached_property
    def parts(self) -> int:
        """The number of parts of the tensor that have the axis."""
        return len(self._pieces(self._one_unit({}), self._sizes))

    @cached_property
    def others(self) -> tuple[str, ...]:
        """The other axes of this part."""
        _, factors = self._pieces(self._one_unit({}), self._sizes)[self.part]
        names = dict.fromkeys(factor.name for factor in factors)
        return tuple(name for name in names if name not in (self.id, ANONYMOUS))

    @cached_property
    def extents(self) -> tuple[int, int]:
        """The number of rows, one for every element of the axis's ancestors, and of columns."""
        rows, width = self._places({}).shape
        return rows, width

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return the matrix of a tensor: (rows, units, columns)."""
        return unfolded(
            *self._pieces(tensor, self.architecture.sizes)[self.part], self._own, self.architecture
        )

    def unit_matrices(self, tensor: Tensor) -> Tensor:
        """Return one matrix for every unit of the axis: (units, inside, outside).

        Inside are the axes that share its dimension, and its children where it has a dimension of its own.
        """
        piece, factors = self._pieces(tensor, self.architecture.sizes)[self.part]
        parents, first = self.architecture.parents, factors.index(self._own)
        others = [place for place in range(len(factors)) if place != first]
        inside = [
            place
            for place in others
            if factors[place].dim == self.dim or parents.get(factors[place].name) == self.id
        ]
        outside = [place for place in others if place not in inside]
        height = torch.Size([piece.shape[place] for place in inside]).numel()
        turned: Tensor = piece.permute(first, *inside, *outside)
        return turned.reshape(piece.shape[first], height, -1)  # (units, inside, outside)

    def columns(self, maps: Mapping[str, Map]) -> Tensor:
        """Return for every row and column of B's matrix the column of A's paired with it: (rows, columns).

        A column of A is numbered row · width + column; the axis itself is not moved.
        """
        home, moved = self._places({}), self._places(maps)
        number = torch.empty(int(home.max()) + 1, dtype=torch.int64)  # of the column at each position
        number[home.reshape(-1)] = torch.arange(home.numel())
        return number[moved]

    @property
    def _own(self) -> AxisFactor:
        return AxisFactor(self.id, self.dim)

    @property
    def _sizes(self) -> dict[str, int]:
        """The sizes of all axes, with one unit of this one."""
        return {**self.architecture.sizes, self.id: 1}

    def _places(self, maps: Mapping[str, Map]) -> Tensor:
        """Return the positions of all columns under maps: (rows, columns)."""
        piece, factors = self._pieces(self._one_unit(maps), self._sizes)[self.part]
        return unfolded(piece, factors, self._own, self.architecture)[:, 0]

    def _one_unit(self, maps: Mapping[str, Map]) -> Tensor:
        """Return the tensor with one unit of the axis under maps, with positions instead of values."""
        shape = [
            size if item == Name(ANONYMOUS) else size_of(item, self._sizes)
            for item, size in zip(self.layout.items, self.shape, strict=True)
        ]
        positions = torch.arange(torch.Size(shape).numel()).reshape(shape)
        here = {id: maps[id] for id in self.layout.names() if id in maps and id != self.id}
        return move_tensor(positions, self.layout, here, self._sizes, self.architecture.parents)

    def _pieces(self, tensor: Tensor, sizes: Mapping[str, int]) -> list[tuple[Tensor, list[AxisFactor]]]:
        """Return the parts of a tensor that have the axis, with their factors."""
        parts = explode(tensor, self.layout, sizes)
        return [(piece, factors) for piece, factors in parts if self._own in factors]


def unfold(tensor: Tensor, layout: Layout, id: str, dim: int, architecture: Architecture) -> Iterator[Tensor]:
    """Yield the pieces of a tensor with an axis in a dimension as (rows of the axis, the axis, the rest)."""
    for piece, factors in explode(tensor, layout, architecture.sizes):
        if AxisFactor(id, dim) in factors:
            yield unfolded(piece, factors, AxisFactor(id, dim), architecture)


def unfolded(
    piece: Tensor, factors: Sequence[AxisFactor], axis: AxisFactor, architecture: Architecture
) -> Tensor:
    """Return one piece, whose dimensions are these factors, as (rows of the axis, the axis, the rest)."""
    own, id = factors.index(axis), axis.name
    first = [own]
    while (id := architecture.parents.get(id, "")) != "":
        first.insert(0, max(place for place, factor in enumerate(factors[:own]) if factor.name == id))
    rest = [place for place in range(piece.ndim) if place not in first]
    return piece.permute(*first, *rest).reshape(architecture.rows(axis.name), piece.shape[own], -1)
