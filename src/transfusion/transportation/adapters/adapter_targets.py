"""Where the weight of a module lies: a tensor of the table, a part of one, or a member of a stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.naming import Naming, without_part
from transfusion.layouts import Concat, Item, Layout, size_of
from transfusion.transportation.adapters.module_settings import WRAPPED


@dataclass(frozen=True)
class TensorSlice:
    """A place within a tensor: all of it, if nothing else is said."""

    tensor: str
    """The canonical name."""
    piece: int | None = None
    """Which part of what is concatenated."""
    member: int | None = None
    """Which member of a stack, such as one of the experts."""

    def layout(self, whole: Layout) -> Layout:
        """The layout of what lies here."""
        one = whole if self.member is None else Layout(whole.items[1:], whole.arrow, whole.split - 1)
        return one if self.piece is None else one.piece(self.piece)

    def stack(self, whole: Layout) -> tuple[Item, ...]:
        """The axis that this is a member of."""
        return () if self.member is None else whole.items[:1]

    def index(self, whole: Layout, sizes: Mapping[str, int]) -> tuple[int | slice, ...]:
        """How to cut this out of the tensor."""
        cuts: list[int | slice] = [_cut(item, self.piece, sizes) for item in whole.items]
        return tuple(cuts) if self.member is None else (self.member, *cuts[1:])

    @property
    def bias(self) -> TensorSlice:
        """The same place in the bias that belongs to a weight."""
        return TensorSlice(self.tensor.removesuffix("weight") + "bias", self.piece, self.member)


def _cut(item: Item, piece: int | None, sizes: Mapping[str, int]) -> slice:
    if piece is None or not isinstance(item, Concat):
        return slice(None)
    start = sum(size_of(part, sizes) for part in item.parts[:piece])
    return slice(start, start + size_of(item.parts[piece], sizes))


@dataclass(frozen=True)
class TargetWeight:
    """What the tensors of a base are called, and how they lie."""

    naming: Naming
    architecture: Architecture
    ties: Mapping[str, str]

    def weight_of(self, module: str) -> TensorSlice:
        """Where the weight of a module lies, whether the base has such a tensor or not."""
        module = module.replace(WRAPPED, ".")
        packed = self.naming.canonical(f"{module}.in_proj_weight")  # nn.MultiheadAttention has no other
        if packed in self.architecture.tensors:
            return TensorSlice(packed)
        if found := re.fullmatch(r"(.+)#(\d{1,9})(\[\d{1,9}\])?", self.naming.canonical(f"{module}.weight")):
            _, piece = without_part(found[0])
            return TensorSlice(found[1], piece, int(found[2]))
        tensor, piece = without_part(self.naming.canonical(module) + ".weight")
        return TensorSlice(tensor, piece)


# ── weights as matrices ──────────────────────────────────────────────────────────────────────


def as_matrix(tensor: Tensor, layout: Layout) -> Tensor:
    """A weight with one row per output and one column per input."""
    rotated = tensor.permute(*layout.outputs, *layout.inputs)
    return rotated.reshape(rotated.shape[: len(layout.outputs)].numel(), -1)


def as_stored(matrix: Tensor, layout: Layout, like: Tensor) -> Tensor:
    """The matrix of a weight, the way round that the weight is stored."""
    order = [*layout.outputs, *layout.inputs]
    rotated = matrix.reshape([like.shape[dim] for dim in order])
    return rotated.permute([order.index(dim) for dim in range(len(order))])
