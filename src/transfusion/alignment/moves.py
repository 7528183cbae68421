"""Move tensors by the maps of their axes, whole or some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.layouts import Concat, Item, Layout, Name, Product, index_map, names_in, size_of
from transfusion.errors import LayoutError


def move_tensor(
    tensor: Tensor,
    layout: Layout,
    maps: Mapping[str, Map],
    sizes: Mapping[str, int],
    parents: Mapping[str, str],
) -> Tensor:
    """Return the tensor with every axis of its layout mapped; axes without a map stay."""
    for dim in range(len(layout.items)):
        tensor = move_dim(tensor, dim, layout, maps, sizes, parents)
    return tensor


def moves_by_rows(layout: Layout, maps: Mapping[str, Map], parents: Mapping[str, str]) -> bool:
    """Return whether each row of the moved tensor depends on one row of the tensor only."""
    return not any(
        not map_.permutes and (dim == 0 or 0 in layout.outside(dim, parents).values())
        for dim, item in enumerate(layout.items)
        for name in names_in(item)
        if (map_ := maps.get(name)) is not None
    )


class RowMover:
    """Moves some rows of a tensor at a time; the indices are computed once.

    For layouts for which `moves_by_rows` is true.
    """

    def __init__(
        self, layout: Layout, maps: Mapping[str, Map], sizes: Mapping[str, int], parents: Mapping[str, str]
    ) -> None:
        self._dims = [_Dim.of(dim, layout, maps, sizes, parents) for dim in range(len(layout.items))]

    def __call__(self, read: Callable[[slice | Tensor], Tensor], rows: slice | Tensor) -> Tensor:
        """Return some rows of the moved tensor; only their source rows are read."""
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
    """Return the tensor with the axes of one dimension mapped; earlier dimensions must be mapped already."""
    return _Dim.of(dim, layout, maps, sizes, parents).moved(tensor)


@dataclass(frozen=True)
class _Dim:
    """The move of one dimension."""

    dim: int
    outside: Mapping[str, int]
    """The ancestors of its axes that have earlier dimensions of their own, and these dimensions."""
    index: Tensor | None = None
    """The source of every position, for every element of ``outside``; None if nothing moves by index."""
    by_factors: Callable[[Tensor], Tensor] | None = None
    """The function that moves the dimension if a map is not a permutation."""

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
        permutations = {name: map_.index for name, map_ in here.items() if map_.permutes}
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

    def moved(self, tensor: Tensor, rows: slice | Tensor | None = None) -> Tensor:
        """Return the tensor, or some rows of it, with this dimension moved; earlier ones must be moved."""
        if self.by_factors is not None:
            return self.by_factors(tensor)
        if self.index is None:
            return tensor
        index, places = self.index.to(tensor.device), tuple(self.outside.values())
        if not places:
            return tensor.index_select(self.dim, index)
        if rows is not None and 0 in places:
            index = index[(*(slice(None),) * places.index(0), rows)]
        return _select(tensor, self.dim, index, places)


def _select(tensor: Tensor, dim: int, index: Tensor, outside: tuple[int, ...]) -> Tensor:
    """Gather one dimension by an index for every element of earlier dimensions.

    Gathering element by element is several times faster than one gather of the whole tensor.
    """
    front = tuple(range(len(outside)))
    rotated = tensor.movedim(outside, front)
    elements = rotated.flatten(0, front[-1])
    moved = [
        element.index_select(dim - len(outside), one)
        for element, one in zip(elements, index.flatten(0, front[-1]), strict=True)
    ]
    return torch.stack(moved).reshape(rotated.shape).movedim(front, outside)


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
    """Move one dimension by maps of any kind: unfold the dimension and map axis by axis."""
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
    """Return the dimensions of an axis's ancestors, outermost first."""
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
