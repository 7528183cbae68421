"""The place of a target module's weight: a tensor of the table, a piece of one, or a member of a stack."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import Concat, Item, Layout, size_of
from transfusion.architecture.naming import Naming, without_part
from transfusion.errors import listing
from transfusion.transport.adapters.module_settings import WRAPPED


@dataclass(frozen=True)
class TensorSlice:
    """A place within a tensor; by default the whole tensor."""

    tensor: str
    """The canonical name."""
    piece: int | None = None
    """The index of a piece of a concatenation."""
    member: int | None = None
    """The index of a member of a stack, such as an expert."""

    def layout(self, whole: Layout) -> Layout:
        """Return the layout of this place, from that of the tensor."""
        one = whole if self.member is None else Layout(whole.items[1:], whole.arrow, whole.split - 1)
        return one if self.piece is None else one.piece(self.piece)

    def stack(self, whole: Layout) -> tuple[Item, ...]:
        """Return the axis of the stack; empty without a stack."""
        return () if self.member is None else whole.items[:1]

    def index(self, whole: Layout, sizes: Mapping[str, int]) -> tuple[int | slice, ...]:
        """Return the index of this place in the tensor."""
        cuts: list[int | slice] = [_cut(item, self.piece, sizes) for item in whole.items]
        return tuple(cuts) if self.member is None else (self.member, *cuts[1:])

    @property
    def bias(self) -> TensorSlice:
        """The same place in the module's bias."""
        return TensorSlice(self.tensor.removesuffix("weight") + "bias", self.piece, self.member)


def joined_layout(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of weights that are joined along their outputs, as a fused projection has."""
    first = layouts[0]
    if len(layouts) == 1:
        return first
    inputs = {(one.arrow, one.split, one.part(one.inputs)) for one in layouts}
    if len(inputs) > 1 or len(first.outputs) != 1:
        raise AssertionError(f"weights that do not read the same inputs: {listing(map(str, layouts))}")
    (dim,) = first.outputs
    outputs = (one.items[dim] for one in layouts)
    parts = tuple(part for item in outputs for part in (item.parts if isinstance(item, Concat) else (item,)))
    return Layout((*first.items[:dim], Concat(parts), *first.items[dim + 1 :]), first.arrow, first.split)


def share_of(
    layouts: Sequence[Layout], number: int, layout: Layout, sizes: Mapping[str, int]
) -> tuple[slice, ...]:
    """Return the part of a factor that belongs to one of several joined weights.

    ``layout`` is that of the factor: its outputs are cut, its other dimensions belong to all weights.
    """
    joined = joined_layout(layouts)
    (item,) = joined.part(joined.outputs).items
    extents = [size_of(one.items[one.outputs[0]], sizes) for one in layouts]
    start = sum(extents[:number])
    rows = slice(start, start + extents[number])
    return tuple(rows if len(layouts) > 1 and one == item else slice(None) for one in layout.items)


def _cut(item: Item, piece: int | None, sizes: Mapping[str, int]) -> slice:
    if piece is None or not isinstance(item, Concat):
        return slice(None)
    start = sum(size_of(part, sizes) for part in item.parts[:piece])
    return slice(start, start + size_of(item.parts[piece], sizes))


@dataclass(frozen=True)
class TargetWeight:
    """The names and layouts of a base's tensors, to find the weight of a module."""

    naming: Naming
    architecture: Architecture
    ties: Mapping[str, str]

    def weight_of(self, module: str) -> TensorSlice:
        """Return the place of a module's weight. The base need not have the tensor."""
        module = module.replace(WRAPPED, ".")
        packed = self.naming.canonical(f"{module}.in_proj_weight")  # the weight of nn.MultiheadAttention
        if packed in self.architecture.tensors:
            return TensorSlice(packed)
        if found := re.fullmatch(r"(.+)#(\d{1,9})(\[\d{1,9}\])?", self.naming.canonical(f"{module}.weight")):
            _, piece = without_part(found[0])
            return TensorSlice(found[1], piece, int(found[2]))
        tensor, piece = without_part(self.naming.canonical(module) + ".weight")
        return TensorSlice(tensor, piece)


# ── weights as matrices ──────────────────────────────────────────────────────────────────────


def as_matrix(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a weight as a matrix with one row per output and one column per input; a vector as it is."""
    if layout.arrow is None:
        return tensor
    rotated = tensor.permute(*layout.outputs, *layout.inputs)
    return rotated.reshape(rotated.shape[: len(layout.outputs)].numel(), -1)


def as_stored(matrix: Tensor, layout: Layout, like: Tensor) -> Tensor:
    """Return the matrix of a weight in the shape that the weight is stored in."""
    if layout.arrow is None:
        return matrix
    order = [*layout.outputs, *layout.inputs]
    rotated = matrix.reshape([like.shape[dim] for dim in order])
    return rotated.permute([order.index(dim) for dim in range(len(order))])
