"""The weights of two models, and the objective ⟨π(A), B⟩."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.alignment.moves import RowMover, move_tensor, moves_by_rows
from transfusion.architecture.architecture import Architecture
from transfusion.files.tensor_files import Rows, row_blocks
from transfusion.matching.weights.sections import Section
from transfusion.model.model import Model
from transfusion.model.pair import shared_tensors
from transfusion.runtime.engines import require_device


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
        self.place: dict[str, Any] = {"dtype": dtype, "device": require_device(device)}
        self.tensors = {
            name: a.architecture.tensors[name]
            for name in shared_tensors(a, b)
            if vectors or len(a.architecture.tensors[name].items) > 1
        }

    def read(self, side: str, name: str, rows: Rows | None = None) -> Tensor:
        """Return a tensor of model ``a`` or ``b``, or some of its rows, in the type of the computation."""
        model = self.a if side == "a" else self.b
        return model.read(name, rows).to(**self.place)

    def blocks(self, name: str) -> Iterator[slice]:
        """Yield the rows of a tensor that are read at a time; always the same: sums keep their digits."""
        return row_blocks(self.a.info(name).shape)

    def require_unchanged(self) -> None:
        """Refuse files that have changed since they were opened."""
        for model in (self.a, self.b):
            model.checkpoint.require_unchanged()

    def beside(self, name: str, maps: Mapping[str, Map]) -> dict[str, Map]:
        """Return the maps of the axes that a tensor has."""
        return {id: maps[id] for id in self.tensors[name].names() if id in maps}

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the type of the computation."""
        dtype: torch.dtype = self.place["dtype"]
        return dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of both models in the type of the computation."""
        return 2 * self.itemsize * sum(torch.Size(self.a.info(name).shape).numel() for name in self.tensors)

    def score(self, name: str, maps: Mapping[str, Map]) -> float:
        """Return ⟨π(A), B⟩ of one tensor; refuse values that are not finite."""
        total = 0.0
        for moved, of_b in self._side_by_side(name, maps):
            total += sum_of(dot_by_row(moved, of_b))
        if not isfinite(total):
            for model in (self.a, self.b):
                model.read(name)
        return total

    def products(self, name: str, maps: Mapping[str, Map]) -> tuple[float, float, float]:
        """Return ⟨π(A), B⟩, |π(A)|² and |B|² of one tensor."""
        found = [0.0, 0.0, 0.0]
        for moved, of_b in self._side_by_side(name, maps):
            for place, pair in enumerate(((moved, of_b), (moved, moved), (of_b, of_b))):
                found[place] += sum_of(dot_by_row(*pair))
        return found[0], found[1], found[2]

    def distance(self, name: str, maps: Mapping[str, Map]) -> tuple[float, float]:
        """Return |B − π(A)|² and |π(A)|² of one tensor."""
        moved, of_a = 0.0, 0.0
        for one, other in self._side_by_side(name, maps):
            change = other - one
            moved += sum_of(dot_by_row(change, change))
            of_a += sum_of(dot_by_row(one, one))
        return moved, of_a

    def _side_by_side(self, name: str, maps: Mapping[str, Map]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield π(A) and B of one tensor, some rows at a time where rows can be moved separately."""
        sizes, parents, layout = self.architecture.sizes, self.architecture.parents, self.tensors[name]
        here = self.beside(name, maps)
        if self.a.info(name).shape and moves_by_rows(layout, here, parents):
            mover = RowMover(layout, here, sizes, parents)
            for rows in self.blocks(name):
                yield mover(partial(self.read, "a", name), rows), self.read("b", name, rows)
        else:
            yield move_tensor(self.read("a", name), layout, here, sizes, parents), self.read("b", name)

    def objective(self, maps: Mapping[str, Map]) -> float:
        """Return ⟨π(A), B⟩ over all tensors that count."""
        return sum(self.score(name, maps) for name in self.tensors)

    def has_evidence_for(self, id: str) -> bool:
        """Return whether some tensor has the axis."""
        return id in self.sections

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
                    found.setdefault(id, []).extend(
                        Section.all_of(self.architecture, tensor, layout, shape, id, dims[0])
                    )
        return found

    def matrix(self, side: str, section: Section) -> Tensor:
        """Return the matrix of a section in model ``a`` or ``b``: (rows, axis, width)."""
        return section.cut(self.read(side, section.tensor))

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


def dot_by_row(one: Tensor, other: Tensor) -> Tensor:
    """Return the products of two tensors along their last dimension; short sums lose no digits."""
    products: Tensor = torch.linalg.vecdot(one, other)
    return products


def sum_of(values: Tensor) -> float:
    """Return a sum in float64."""
    return float(values.sum(dtype=torch.float64))
