"""Evidence from the weights.

The gain of matching unit j of A with unit i of B is the inner product of what belongs to them, over
every tensor in which the axis occurs, with all other axes of A already mapped. An axis that other
axes lie within (a head) needs a score that does not depend on the order inside it: the distance of
singular values, which is invariant to every permutation of rows and columns.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from transfusion.architecture import Architecture
from transfusion.errors import SettingError
from transfusion.layouts import Factor, Layout, explode
from transfusion.maps import Map, move_dim
from transfusion.model import Model, shared_tensors
from transfusion.tables import Group


class Weights:
    """The weights of two models of one architecture, for scoring their units against each other."""

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
        self.place: dict[str, Any] = {"dtype": dtype, "device": _usable(device)}
        self.tensors = {
            name: a.architecture.tensors[name]
            for name in shared_tensors(a, b)
            if vectors or len(a.architecture.tensors[name].items) > 1
        }
        self._cache: dict[tuple[str, str], Tensor] = {}

    def read(self, side: str, name: str) -> Tensor:
        """A tensor of model ``a`` or ``b``, in the type of the computation; read once."""
        key = (side, name)
        if key not in self._cache:
            model = self.a if side == "a" else self.b
            self._cache[key] = model.read(name).to(**self.place)
        return self._cache[key]

    def moved(
        self, name: str, maps: Mapping[str, Map], *, except_for: tuple[str, int] | None = None
    ) -> Tensor:
        """A tensor of A under ``maps``, leaving out one axis in one dimension."""
        layout, tensor = self.tensors[name], self.read("a", name)
        for dim in range(len(layout.items)):
            here = maps
            if except_for is not None and except_for[1] == dim:
                here = {id: map_ for id, map_ in maps.items() if id != except_for[0]}
            tensor = move_dim(tensor, dim, layout, here, self.architecture.sizes, self.architecture.parents)
        return tensor

    def objective(self, maps: Mapping[str, Map]) -> float:
        """⟨π(A), B⟩ over all tensors that take part."""
        return sum(
            float((self.moved(name, maps).double() * self.read("b", name).double()).sum())
            for name in self.tensors
        )

    def gain(
        self,
        id: str,
        maps: Mapping[str, Map],
        *,
        produced_only: bool = False,
        settled: Container[str] | None = None,
    ) -> Tensor:
        """How well each unit of A would do in each place of B: shape (rows, size in B, size in A).

        ``produced_only`` counts only the tensors that produce the axis (q, k and v for the units of
        a head), not those that read it (o). ``settled`` counts only tensors whose other axes are among
        these, or cannot move; the rest would add noise, unless there is nothing else to go by.
        """
        size, rows = self.architecture.sizes[id], self.architecture.rows(id)
        total = torch.zeros(rows, size, size, **self.place)
        places = list(self._places(id, produced_only=produced_only))
        if settled is not None:
            places = [place for place in places if self._is_settled(id, place[0], settled)] or places
        for name, dim in places:
            layout = self.tensors[name]
            moved = self.moved(name, maps, except_for=(id, dim))
            for of_a, of_b in zip(
                self._unfold(moved, layout, id, dim),
                self._unfold(self.read("b", name), layout, id, dim),
                strict=True,
            ):
                total += of_b @ of_a.transpose(1, 2)
        return total

    def spectral_distance(self, id: str, *, produced_only: bool) -> Tensor:
        """The distance of singular values between each unit of B and each of A (Eq. 5 and 6)."""
        size = self.architecture.sizes[id]
        total = torch.zeros(size, size, dtype=torch.float64)
        for name, dim in self._places(id, produced_only=produced_only):
            layout = self.tensors[name]
            for of_a, of_b in zip(
                self._blocks(self.read("a", name), layout, id, dim),
                self._blocks(self.read("b", name), layout, id, dim),
                strict=True,
            ):
                total += torch.cdist(singular_values(of_b), singular_values(of_a))
        return total

    def speaks_of(self, id: str) -> bool:
        """Whether any tensor says anything about an axis."""
        return any(name in self.tensors for name in self.architecture.occurrences[id])

    def _places(self, id: str, *, produced_only: bool) -> Iterator[tuple[str, int]]:
        """The tensors and dimensions in which an axis occurs."""
        for name in self.architecture.occurrences[id]:
            layout = self.tensors.get(name)
            if layout is None:
                continue
            for dim in layout.dims_with(id):
                if not produced_only or dim in layout.outputs:
                    yield name, dim

    def _is_settled(self, id: str, name: str, settled: Container[str]) -> bool:
        """Whether every other axis of a tensor has found its place, or has none to find."""
        return all(
            other == id or other in settled or self.architecture.spaces[other].group is Group.FIXED
            for other in self.tensors[name].names()
        )

    def _unfold(self, tensor: Tensor, layout: Layout, id: str, dim: int) -> Iterator[Tensor]:
        """Every piece as (rows of the axis, the axis, everything else)."""
        ancestors = self._ancestors(id)
        for piece, factors in explode(tensor, layout, self.architecture.sizes):
            if Factor(id, dim) not in factors:
                continue
            own = factors.index(Factor(id, dim))
            first = [*(_enclosing(factors[:own], name) for name in ancestors), own]
            rest = [i for i in range(piece.ndim) if i not in first]
            rows, size = self.architecture.rows(id), self.architecture.sizes[id]
            yield piece.permute(*first, *rest).reshape(rows, size, -1)

    def _blocks(self, tensor: Tensor, layout: Layout, id: str, dim: int) -> Iterator[Tensor]:
        """Every piece as one matrix per unit of the axis: what is in it × the rest.

        In it is what shares its dimension, and, where it has a dimension of its own, what lies within it.
        """
        parents = self.architecture.parents
        for piece, factors in explode(tensor, layout, self.architecture.sizes):
            if Factor(id, dim) not in factors:
                continue
            first = factors.index(Factor(id, dim))
            others = [i for i in range(len(factors)) if i != first]
            inside = [i for i in others if factors[i].dim == dim or parents.get(factors[i].name) == id]
            outside = [i for i in others if i not in inside]
            height = torch.Size([piece.shape[i] for i in inside]).numel()
            yield piece.permute(first, *inside, *outside).reshape(piece.shape[first], height, -1)

    def _ancestors(self, id: str) -> list[str]:
        chain: list[str] = []
        parent = self.architecture.parents.get(id)
        while parent is not None:
            chain.insert(0, parent)
            parent = self.architecture.parents.get(parent)
        return chain


def _usable(device: str) -> str:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(
            f"device {device!r} cannot be used here ({reason})", hint="leave --device out to compute on cpu"
        ) from error
    return device


def singular_values(matrices: Tensor) -> Tensor:
    """Singular values of a batch of matrices, largest first, through the smaller Gram matrix."""
    matrices = matrices.double()
    if matrices.shape[1] > matrices.shape[2]:
        matrices = matrices.transpose(1, 2)
    squares: Tensor = torch.linalg.eigvalsh(matrices @ matrices.transpose(1, 2))
    return squares.clamp(min=0).sqrt().flip(-1)


def _enclosing(factors: list[Factor], name: str) -> int:
    """The nearest place of an axis among the factors before another."""
    return max(i for i, factor in enumerate(factors) if factor.name == name)
