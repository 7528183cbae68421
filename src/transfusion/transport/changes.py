"""The change α·π(τ) of a fine-tuned model: changes to B's tensors, and tensors that B does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, ones_like, where

from transfusion.alignment.alignment import Alignment, PartPair
from transfusion.alignment.maps import NormFold
from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import Item, Layout, size_of
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.publishing import TensorShape
from transfusion.files.tensor_files import Rows
from transfusion.model.model import Model
from transfusion.model.part_roles import TensorPart, is_place
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.transport.alpha import Alpha
from transfusion.transport.carried_heads import CarriedHead, carried_heads, names_with_heads
from transfusion.transport.task_vector import NewTokens, TaskVector, wide

if TYPE_CHECKING:
    from transfusion.transport.adapters.adapter import Adapter


@dataclass
class DenseChange:
    """α·π(τ) of a dense model, for a B of the same or of another shape, read some rows at a time."""

    vector: TaskVector
    alignment: Alignment
    onto: Model
    alpha: Alpha = field(default_factory=Alpha)
    adapter: Adapter | None = None
    """What the user gave, if that is an adapter which was folded into A."""
    _by_rows: dict[str, bool] = field(default_factory=dict, init=False, repr=False)
    """What `by_rows` has answered: it is asked for every block."""

    @property
    def model(self) -> Model:
        return self.vector.finetuned

    @property
    def label(self) -> str:
        return (self.adapter or self.model).label

    @property
    def fingerprint(self) -> str:
        return (self.adapter or self.model).fingerprint

    @property
    def checkpoint(self) -> Checkpoint:
        return (self.adapter or self.model).checkpoint

    @property
    def module(self) -> nn.Module | None:
        return None if self.alignment.other_shape else self.model.checkpoint.module

    # ── the class of the output ──────────────────────────────────────────────────────────────

    @cached_property
    def _heads(self) -> dict[str, CarriedHead]:
        """If B has another shape: by their names on B, the heads that B has none to add a change to."""
        return carried_heads(self.label, self.vector, self.alignment, self.onto, self._sources)

    @cached_property
    def _sources(self) -> frozenset[str]:
        """The tensors of A whose changes have a place in B."""
        return frozenset(pair.source.tensor for several in self.pairs.values() for pair in several)

    @property
    def config(self) -> Mapping[str, Any] | None:
        config = self.model.checkpoint.config
        if not self.alignment.other_shape or config is None or self._heads.keys() - self.onto.names.keys():
            return config
        theirs = self.onto.checkpoint.config or {}  # B has the heads already, and its class
        return {**config, "architectures": theirs.get("architectures")}

    @cached_property
    def names(self) -> Mapping[str, TensorPieces]:
        if self.alignment.other_shape:
            return names_with_heads(self.onto, self.model, self._heads, self.pairs)
        known = self.model.architecture
        return {name: self.model.names[name] for name in (*known.tensors, *known.buffers)}

    @property
    def buffers(self) -> frozenset[str]:
        return (self.onto if self.alignment.other_shape else self.model).architecture.buffers

    @property
    def unread(self) -> frozenset[str]:
        """The tensors that the library leaves unread, which no other model takes over."""
        return (self.onto if self.alignment.other_shape else self.model).architecture.unread

    @property
    def has_heads(self) -> bool:
        return bool(self._heads if self.alignment.other_shape else self.model.architecture.task_heads)

    def owns(self, name: str) -> bool:
        """Whether it has a tensor of this name to carry over if B has none to add a change to."""
        return name in (self._heads if self.alignment.other_shape else self.model.architecture.tensors)

    def shape(self, name: str) -> TensorShape:
        """Return the shape and type of a tensor that is carried over."""
        head = self._head(name)
        info = self.model.info(head.part.tensor)
        return self.alignment.moved_shape(info.shape, head.part.layout, head.layout), info.dtype

    def _head(self, name: str) -> CarriedHead:
        """Return a tensor of the fine-tune that is carried over."""
        if self.alignment.other_shape:
            return self._heads[name]
        part = PartPair.whole(name, self.model.architecture.tensors[name]).source
        fold = fold_of(self.alignment, name, part.layout, self.vector.base.architecture)
        return CarriedHead(part, part.layout, fold, fold)

    def own(self, name: str, rows: slice) -> Tensor:
        """Return some rows of π(A_ft), of a tensor that is carried over."""
        some = rows if self.by_rows(name) else None
        value = self._carried(self._head(name), some)
        weight = self._heads.get(f"{name.rpartition('.')[0]}.weight") if self.alignment.other_shape else None
        if weight is not None and name.endswith(".bias") and weight.part.is_weight:
            value = value + self._lost_shift(weight)
        return value

    def _carried(self, head: CarriedHead, rows: slice | None = None) -> Tensor:
        """Return π(A_ft), behind B's norm instead of A's."""
        read = partial(self._scaled, self.model, head.part, head.fold_a)
        moved = self._mapped(read, head.part.layout, head.layout, rows)
        return divided(moved, self.onto, head.part.layout, head.fold_b, rows)

    def _lost_shift(self, head: CarriedHead) -> Tensor:
        """Return what a carried weight adds to its outputs because B's norm before it has another shift."""
        weight, layout = self._carried(head), head.part.layout
        lost = torch.zeros(weight.shape[layout.outputs[0]], dtype=torch.float64)  # (outputs,)
        for model, fold, values, sign in (
            (self.model, head.fold_a, wide(self.model.raw(head.part.tensor)), 1),
            (self.onto, head.fold_b, weight, -1),
        ):
            if fold is None or (name := f"{fold.norm}.bias") not in model.names:
                continue
            shift = wide(model.raw(name)).double()
            if model is self.onto and self.changes(name):
                shift = shift + self._whole(name)
            lost += sign * torch.tensordot(values.double(), shift, dims=([layout.inputs[0]], [0]))  # ± W·β
        return lost

    # ── changes of B's tensors ───────────────────────────────────────────────────────────────

    @cached_property
    def pairs(self) -> dict[str, list[PartPair]]:
        """For every tensor of B that gets a change, the parts of A's tensors that it comes from."""
        base, onto = self.vector.base, self.onto
        found: dict[str, list[PartPair]] = {}
        for pair in self.alignment.pairs(base.architecture, onto.architecture):
            source, target = pair.source.tensor, pair.target.tensor
            fits = self.alignment.other_shape or onto.info(target).shape == base.info(source).shape
            if fits and self.vector.covers(source):
                found.setdefault(target, []).append(pair)
        return found

    @property
    def left_out(self) -> list[str]:
        """The tensors of A whose changes have no place in B."""
        if not self.alignment.other_shape:
            return []
        return [name for name in self.vector.base.architecture.tensors if name not in self._sources]

    def changes(self, name: str) -> bool:
        """Whether it has a change to B's tensor of this name."""
        return name in self.pairs

    def by_rows(self, name: str) -> bool:
        """Whether a tensor can be computed in blocks of rows."""
        if self.alignment.other_shape:
            return False
        if name not in self._by_rows:
            layout = self.model.architecture.tensors[name]
            whole = not self.model.info(name).shape or any(map(self._is_special, self.pairs.get(name, ())))
            self._by_rows[name] = not whole and self.alignment.moves_by_rows(layout)
        return self._by_rows[name]

    def change(self, name: str, rows: slice) -> Tensor:
        """Return some rows of α·π(τ)."""
        alpha = self.alpha.at(name)
        moved = self._moved(self.pairs[name][0], rows) if self.by_rows(name) else self._whole(name)
        return moved if alpha == 1 else alpha * moved

    def _whole(self, name: str) -> Tensor:
        """Return π(τ) of one tensor: the sum of what its parts get."""
        first, *others = self.pairs[name]
        if first.target.index is None and first.share == 1 and not others:
            return self._moved(first)
        total = torch.zeros(self.onto.info(name).shape, dtype=torch.float64)
        for pair in (first, *others):
            pair.target.put(total, pair.share * self._moved(pair))
        return total

    def _moved(self, pair: PartPair, rows: slice | None = None) -> Tensor:
        """Return Δ_B = s · M_out τ M_inᵀ of one part, or of some rows."""
        source, target = pair.source, pair.target
        if self._is_special(pair):
            return self._moved_norm(pair)
        fold_a = self.alignment.folds.get(source.tensor) if source.is_weight else None
        fold_b = self.alignment.folds_onto.get(target.tensor) if source.is_weight else None
        moved = self._mapped(partial(self._difference, source, fold_a), source.layout, target.layout, rows)
        if self.alignment.other_shape:
            moved = resample(moved, target.layout, self.onto.architecture, grid=self._has_patches)
        return divided(moved, self.onto, target.layout, fold_b, rows)

    def _difference(self, part: TensorPart, fold: NormFold | None, rows: Rows | None = None) -> Tensor:
        """Return τ of a part; for a weight behind a norm, with the norm's scale folded in."""
        if fold is None:
            return part.of(self.vector.difference(part.tensor, rows))
        tuned, base = self.vector.finetuned, self.vector.base
        if rows is None and self.vector.added(part.tensor):
            rows = slice(0, base.info(part.tensor).shape[0])
        return self._scaled(tuned, part, fold, rows) - self._scaled(base, part, fold, rows)

    @staticmethod
    def _scaled(model: Model, part: TensorPart, fold: NormFold | None, rows: Rows | None = None) -> Tensor:
        """Return a part of a tensor, with the norm's scale folded into its inputs."""
        value = part.of(model.raw(part.tensor, rows))
        return value if fold is None else wide(value) * scale_of(model, part.layout, fold, rows)

    def _mapped(
        self, read: Callable[..., Tensor], layout: Layout, onto: Layout, rows: slice | None
    ) -> Tensor:
        if rows is not None:
            return self.alignment.move_rows(read, layout, rows)
        return self.alignment.move(read(None), layout, onto)

    @cached_property
    def _has_patches(self) -> bool:
        """Whether positions are those of patches."""
        return any(len(layout.inputs) == 3 for layout in self.vector.base.architecture.tensors.values())

    # ── norms ────────────────────────────────────────────────────────────────────────────────

    def _is_special(self, pair: PartPair) -> bool:
        """Whether moving a tensor takes more than its own values: norms, and scales of rotated units."""
        part, base = pair.source, self.vector.base.architecture
        if self.alignment.other_shape:
            of_norm = part.tensor in base.scales or f"{part.module}.weight" in base.scales
            return of_norm and pair.writes is not None
        maps = (self.alignment.maps.get(id) for id in part.layout.names())
        rotated = part.tensor in base.scales and any(one is not None and one.rotates for one in maps)
        return part.module in self.alignment.norms or rotated

    def _moved_norm(self, pair: PartPair) -> Tensor:
        """Move the scale of a norm, which B keeps if it is folded, or the shift β/g before the scale."""
        source, target, alignment = pair.source, pair.target, self.alignment
        fold_a, fold_b = self._norms_a.get(source.module), self._norms_b.get(target.module)
        if source.tensor in self.vector.base.architecture.scales:
            if fold_a is not None or fold_b is not None:
                return torch.zeros(self.onto.info(target.tensor).shape)
            return alignment.squares.move(self.vector.difference(source.tensor), source.layout, target.layout)
        shifts = []
        for model in (self.vector.finetuned, self.vector.base):
            shift = wide(model.raw(source.tensor))
            shifts.append(shift if fold_a is None else shift / safe(unit_scales(model, fold_a)))
        moved = alignment.activations.move(shifts[0] - shifts[1], source.layout, target.layout)
        return moved if fold_b is None else moved * unit_scales(self.onto, fold_b)

    @cached_property
    def _norms_a(self) -> dict[str, NormFold]:
        return {fold.norm: fold for fold in self.alignment.folds.values()}

    @cached_property
    def _norms_b(self) -> dict[str, NormFold]:
        return {fold.norm: fold for fold in self.alignment.folds_onto.values()}

    # ── tokens ───────────────────────────────────────────────────────────────────────────────

    def added(self, name: str) -> int:
        """Return the number of rows to append to B's, for new tokens."""
        keeps = self.vector.new_tokens is NewTokens.KEEP and not self.alignment.other_shape
        return self.vector.added(name) if keeps else 0

    @property
    def dropped_tokens(self) -> int:
        """The number of new tokens that are dropped."""
        if self.vector.new_tokens is not NewTokens.DROP or self.alignment.other_shape:
            return 0
        covered = [name for name in self.model.architecture.tensors if self.vector.covers(name)]
        return max(map(self.vector.added, covered), default=0)

    @property
    def token_counts(self) -> Set[tuple[int, int]]:
        """The numbers of tokens of the fine-tune and of its base, where they differ."""
        return self.vector.token_counts

    @property
    def auxiliary_files(self) -> list[Path]:
        """Its tokenizer and other files."""
        return self.model.checkpoint.auxiliary_files()


# ── norms folded into the weights behind them ───────────────────────────────────────────────────────


def fold_of(alignment: Alignment, name: str, layout: Layout, base: Architecture) -> NormFold | None:
    """Return the norm whose output a weight reads; if A lacks the weight, that of its neighbours."""
    if name in base.tensors or layout.arrow is None:
        return alignment.folds.get(name)
    others = {at: fold for at, fold in alignment.folds.items() if at in base.tensors}
    beside = {fold for at, fold in others.items() if _reads(base.tensors[at]) == _reads(layout)}
    return beside.pop() if len(beside) == 1 else None


def _reads(layout: Layout) -> list[Item]:
    return [layout.items[dim] for dim in layout.inputs]


def unit_scales(model: Model, fold: NormFold) -> Tensor:
    """Return the scale g of a norm."""
    return wide(model.raw(f"{fold.norm}.weight")) + fold.offset


def scale_of(model: Model, layout: Layout, fold: NormFold, rows: Rows | None = None) -> Tensor:
    """Return a norm's scale, broadcastable to the inputs of a weight that reads its output."""
    (dim,) = layout.inputs
    scale = unit_scales(model, fold)
    if dim == 0 and rows is not None:
        scale = scale[rows]
    shape = [1] * len(layout.items)
    shape[dim] = -1
    return scale.reshape(shape)


def divided(
    value: Tensor, model: Model, layout: Layout, fold: NormFold | None, rows: Rows | None = None
) -> Tensor:
    """Divide a weight by the scale of the norm that it reads in its new model."""
    return value if fold is None else value / safe(scale_of(model, layout, fold, rows))


def safe(scale: Tensor) -> Tensor:
    """Return a scale to divide by: one for units that the norm sets to zero."""
    return where(scale.abs() < 1e-4, ones_like(scale), scale)


# ── position embeddings and patch kernels for another grid ──────────────────────────────────────────


def resample(value: Tensor, layout: Layout, b: Architecture, *, grid: bool) -> Tensor:
    """Return a change for as many positions, or pixels of a patch, as B has; other changes stay.

    ``layout`` is the one in B. ``grid`` if positions are those of patches.
    """
    places = [dim for dim, item in enumerate(layout.items) if is_place(item)]
    if not places:
        return value
    sizes = [size_of(layout.items[dim], b.sizes) for dim in places]
    if len(places) == 2:  # the pixels of a patch
        return resampled_kernel(value, *sizes)
    by_place = value.movedim(places[0], 0)  # (positions, …)
    table = resampled_positions(by_place.reshape(len(by_place), -1), sizes[0], grid=grid)
    return table.reshape(sizes[0], *by_place.shape[1:]).movedim(0, places[0])


def resampled_kernel(kernel: Tensor, rows: int, columns: int) -> Tensor:
    """Return kernels (outputs, channels, rows, columns) for patches of another size.

    A patch that shows the same thing in another size gets the same answer.
    """
    before = kernel.shape[-2:]
    if tuple(before) == (rows, columns):
        return kernel
    made = nn.functional.interpolate(
        kernel, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True
    )
    return made * (before[0] * before[1] / (rows * columns))


def resampled_positions(table: Tensor, count: int, *, grid: bool) -> Tensor:
    """Return position embeddings (positions, units) for another number of positions.

    Those of a grid of patches are resampled in two dimensions; the rows before the grid belong to other
    tokens and stay. Positions in a text stay in their places, and further ones get 0.
    """
    if len(table) == count:
        return table
    if not grid:
        made = table.new_zeros(count, *table.shape[1:])
        kept = min(count, len(table))
        made[:kept] = table[:kept]
        return made
    ours, theirs = isqrt(len(table)), isqrt(count)
    before, room = len(table) - ours**2, count - theirs**2
    square = table[before:].reshape(1, ours, ours, -1).movedim(-1, 1)  # (1, units, rows, columns)
    resized = nn.functional.interpolate(
        square, size=(theirs, theirs), mode="bilinear", align_corners=False, antialias=True
    )
    rows = resized.movedim(1, -1).reshape(theirs**2, -1)  # (positions, units)
    others = table.new_zeros(room, table.shape[-1])
    others[: min(before, room)] = table[: min(before, room)]
    return torch.cat([others, rows])
