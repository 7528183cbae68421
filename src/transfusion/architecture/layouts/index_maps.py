"""Positions in a tensor: where they come from when axes are permuted, and which axes they lie on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transfusion.architecture.layouts.axis_sizes import size_of
from transfusion.architecture.layouts.notation import Concat, Item, Layout, Name, Product, names_in
from transfusion.errors import LayoutError

Index: TypeAlias = NDArray[np.int64]


def index_map(
    item: Item,
    sizes: Mapping[str, int],
    permutations: Mapping[str, Index],
    parents: Mapping[str, str],
    outside: Sequence[str] = (),
) -> Index | None:
    """Return the source of each position of a dimension: ``new[j] = old[index[j]]``.

    ``permutations[axis]`` has one row for every element of the axis's ancestors (one row for an
    axis without a parent), in the order of the destination. The result is None if nothing in this item
    moves. Ancestors that have dimensions of their own are ``outside``; their dimensions come first in the
    index.
    """
    if not any(name in permutations for name in names_in(item)):
        return None

    def row_of(name: str, places: Mapping[str, Index], shape: tuple[int, ...]) -> Index:
        """Return the row that its ancestors select, for every destination position so far."""
        parent = parents.get(name)
        if parent is None:
            return np.zeros(shape, dtype=np.int64)
        if parent not in places:
            raise LayoutError(
                f"axis {name} lies within {parent}, which does not enclose it in '{item}'",
                hint=f"write the two together, as in ({parent} {name}), or give {parent} a"
                " dimension of its own before this one",
            )
        return row_of(parent, places, shape) * sizes[parent] + places[parent]

    def sources(item: Item, places: Mapping[str, Index], shape: tuple[int, ...]) -> Index:
        """Return the source within this item for every destination position: shape (*shape, size)."""
        match item:
            case Name(text):
                if (permutation := permutations.get(text)) is not None:
                    return permutation[row_of(text, places, shape)]
                return np.broadcast_to(np.arange(sizes[text]), (*shape, sizes[text]))
            case Concat(parts):
                blocks, offset = [], 0
                for part in parts:
                    blocks.append(sources(part, places, shape) + offset)
                    offset += size_of(part, sizes)
                return np.concatenate(blocks, axis=-1)
            case Product(items):
                total: Index = np.zeros(shape, dtype=np.int64)
                here, inner = dict(places), shape
                for child in items:
                    size = size_of(child, sizes)
                    total = total[..., None] * size + sources(child, here, inner)
                    inner = (*inner, size)
                    here = {name: np.broadcast_to(at[..., None], inner) for name, at in here.items()}
                    if isinstance(child, Name):
                        here[child.text] = np.broadcast_to(np.arange(size), inner)
                return total.reshape(*shape, -1)

    around = tuple(sizes[name] for name in outside)
    return sources(item, dict(zip(outside, np.indices(around), strict=True)), around)


@dataclass(frozen=True, slots=True)
class AxisFactor:
    """One dimension of a piece: its axis, and the dimension of the tensor that it came from."""

    name: str
    dim: int


def explode(array: Any, layout: Layout, sizes: Mapping[str, int]) -> list[tuple[Any, list[AxisFactor]]]:
    """Return views of a tensor in which every dimension is a single axis.

    Concatenations are split and products unfolded. ``array`` is a NumPy array or a torch tensor.
    """
    whole = [(item, dim) for dim, item in enumerate(layout.items)]
    return list(_pieces(array, whole, sizes))


def _pieces(
    array: Any, items: list[tuple[Item, int]], sizes: Mapping[str, int]
) -> Iterator[tuple[Any, list[AxisFactor]]]:
    for place, (item, dim) in enumerate(items):
        before, after = items[:place], items[place + 1 :]
        if isinstance(item, Product):
            extents = [size_of(child, sizes) for child in item.items]
            shape = (*array.shape[:place], *extents, *array.shape[place + 1 :])
            inner = [(child, dim) for child in item.items]
            yield from _pieces(array.reshape(shape), [*before, *inner, *after], sizes)
            return
        if isinstance(item, Concat):
            start = 0
            for part in item.parts:
                stop = start + size_of(part, sizes)
                cut = array[(slice(None),) * place + (slice(start, stop),)]
                yield from _pieces(cut, [*before, (part, dim), *after], sizes)
                start = stop
            return
    yield array, [AxisFactor(item.text, dim) for item, dim in items if isinstance(item, Name)]
