"""Roles: what each part of a tensor is for, read off its axes.

Two models of different families name and fuse their tensors differently. The axes of the tables tell what
corresponds: ``(head qk) <- x`` is a query or a key in all families, ``x@next <- ffn`` the end of an MLP.
Parts with the same role correspond to each other, block by block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import (
    ANONYMOUS,
    Concat,
    Item,
    Layout,
    Name,
    Product,
    explode,
    names_in,
    size_of,
)
from transfusion.architecture.table import Symmetry

PLACES = ("position", "row", "column")
"""The axes of places, in all tables."""
STREAM = "stream"
"""The residual stream, in a role."""
_PLACE = re.compile(r"(?:([A-Za-z_]\w*)\.)?(?:(\d+)\.)?([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Role:
    """What a part of a tensor is for: the first ``qk <- stream`` of block 3 is its query."""

    stack: str
    block: int | None
    """The number of the block; None outside of the blocks."""
    use: str
    number: int = 0
    """The number among parts of the same use: queries before keys, gates before what they multiply."""

    def __str__(self) -> str:
        where = f"block {self.block}: " if self.block is not None else ""
        return f"{where}{self.use}" + (f" ({self.number + 1})" if self.number else "")


@dataclass(frozen=True)
class TensorPart:
    """A tensor, or the part of it that has a role of its own, such as the query of a fused projection."""

    tensor: str
    layout: Layout
    """The layout of the part."""
    role: Role
    dim: int = 0
    """The dimension along which it is a part."""
    index: tuple[int, ...] | None = None
    """Its positions along that dimension; None if it is the whole tensor."""

    @property
    def module(self) -> str:
        return self.tensor.rpartition(".")[0]

    @property
    def is_weight(self) -> bool:
        """Whether it maps some axes to others."""
        return self.layout.arrow is not None

    @property
    def output(self) -> Item:
        """The axis that it writes; of a vector, its only axis."""
        dims = self.layout.outputs if self.is_weight else range(len(self.layout.items))
        return self.layout.items[dims[-1]]

    @property
    def input(self) -> Item | None:
        """The axis that it reads, if it is one."""
        dims = self.layout.inputs
        return self.layout.items[dims[0]] if len(dims) == 1 else None

    @cached_property
    def _positions(self) -> Tensor | None:
        return None if self.index is None else torch.tensor(self.index)

    def of(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """Return this part of its tensor; with ``dim``, of what is along that dimension."""
        if self._positions is None:
            return tensor
        return tensor.index_select(self.dim if dim is None else dim, self._positions)

    def put(self, tensor: Tensor, value: Tensor) -> None:
        """Add a value to this part of a tensor."""
        if self._positions is None:
            tensor += value
        else:
            tensor.index_add_(self.dim, self._positions, value.to(tensor.dtype))


def tensor_parts(architecture: Architecture) -> dict[Role, TensorPart]:
    """Return all parts of all tensors, by role."""
    found: dict[Role, TensorPart] = {}
    seen: Counter[tuple[str, int | None, str]] = Counter()
    weights: dict[tuple[str, int], Role] = {}
    for name, layout in architecture.tensors.items():
        module, _, leaf = name.rpartition(".")
        for number, (part, dim, index) in enumerate(_parts(layout, architecture.sizes)):
            weight = weights.get((module, number)) if leaf == "bias" else None
            if weight is not None:
                role = Role(weight.stack, weight.block, f"bias of {weight.use}", weight.number)
            else:
                kind = "scale " if name in architecture.scales else ""
                stack, block, use = _use(part, architecture)
                key = (stack, block, kind + use)
                role = Role(*key, seen[key])
                seen[key] += 1
                if leaf == "weight":
                    weights[module, number] = role
            found[role] = TensorPart(name, part, role, dim, index)
    return found


def _use(layout: Layout, architecture: Architecture) -> tuple[str, int | None, str]:
    """Return the stack, the block and the use of a tensor with this layout."""
    spaces = architecture.spaces
    names = layout.names()
    points = [place_of(name) for name in names if spaces[name].stream is not None]
    others = [place_of(name) for name in names if spaces[name].stream is None]
    inside = [place for place in others if place[1] is not None]
    stack = next((place[0] for place in (*others, *points) if place[0]), "")
    block = inside[0][1] if inside else None
    alone = layout.arrow is None and not others
    if alone and len(layout.items) == 1 and points:  # a norm on the stream, named by its point
        block = points[0][1]

    def word(item: Item) -> str:
        match item:
            case Product(items):
                return word(items[-1])
            case Concat(parts):
                return "|".join(map(word, parts))
            case Name(text):
                if text not in spaces:
                    return text
                axis = place_of(text)[2]
                if spaces[text].stream is None:
                    return axis
                return f"{STREAM} at {axis}" if alone else STREAM

    def words(dims: range) -> str:
        return " ".join(word(layout.items[dim]) for dim in dims)

    if layout.arrow is not None:
        return stack, block, f"{words(layout.outputs)} <- {words(layout.inputs)}"
    return stack, block, words(range(len(layout.items)))


def moves(architecture: Architecture, item: Item) -> bool:
    """Return whether the units of an axis have no fixed meaning."""
    groups = [architecture.spaces[name].group for name in names_in(item)]
    return any(group is not Symmetry.FIXED for group in groups)


def is_place(item: Item) -> bool:
    """Return whether the units of an axis are places: positions, or the pixels of a patch."""
    return [place_of(name)[2] in PLACES for name in names_in(item)] == [True]


def place_of(id: str) -> tuple[str, int | None, str]:
    """Return the stack, the block and the axis of a space: ``layer.3.qk``, ``layer.position``, ``vocab``."""
    match = _PLACE.fullmatch(id)
    if match is None:
        return "", None, id
    stack, block, axis = match.groups()
    return stack or "", None if block is None else int(block), axis


def _parts(layout: Layout, sizes: Mapping[str, int]) -> Iterator[tuple[Layout, int, tuple[int, ...] | None]]:
    """Divide a layout at its first concatenation; yield layouts of parts, the dimension and the positions.

    ``(head [a|b])`` has two parts, ``(head a)`` and ``(head b)``.
    """
    for dim, item in enumerate(layout.items):
        if item == Name(ANONYMOUS):
            continue
        pieces = explode(np.arange(size_of(item, sizes)), Layout((item,)), sizes)
        for positions, factors in pieces if len(pieces) > 1 else ():
            names = tuple(Name(factor.name) for factor in factors)
            part = names[0] if len(names) == 1 else Product(names)
            items = (*layout.items[:dim], part, *layout.items[dim + 1 :])
            yield Layout(items, layout.arrow, layout.split), dim, tuple(positions.flatten().tolist())
        if len(pieces) > 1:
            return
    yield layout, 0, None
