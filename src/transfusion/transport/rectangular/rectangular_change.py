"""The change of a fine-tune of A, rewritten for a base B of another shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment, NormFold
from transfusion.alignment.part_pairs import PartPair
from transfusion.architecture.layouts import Layout, size_of
from transfusion.model.model import Model
from transfusion.model.part_roles import TensorPart, is_place
from transfusion.transport.norm_folding import safe, scale_of
from transfusion.transport.rectangular.resampling import resampled_kernel, resampled_positions
from transfusion.transport.task_vector import TaskVector, wide


@dataclass(frozen=True)
class CarriedHead:
    """A head of the fine-tune that B has none to add a change to."""

    part: TensorPart
    layout: Layout
    """Its layout on B."""
    fold_a: NormFold | None = None
    """The norm that it reads through, in A and in B."""
    fold_b: NormFold | None = None


@dataclass(frozen=True)
class RectangularChange:
    """π(τ) between shapes, tensor by tensor."""

    vector: TaskVector
    alignment: Alignment
    onto: Model

    @cached_property
    def parts_b(self) -> dict[str, list[PartPair]]:
        """For every tensor of B that gets a change, its parts and their sources."""
        found: dict[str, list[PartPair]] = {}
        for pair in self.alignment.pairs(self.vector.base.architecture, self.onto.architecture):
            if self.vector.covers(pair.source.tensor):
                found.setdefault(pair.target.tensor, []).append(pair)
        return found

    def covers(self, name: str) -> bool:
        """Whether a tensor of B gets a change."""
        return name in self.parts_b

    def sources(self, name: str) -> list[str]:
        """Return the tensors of A whose changes a tensor of B gets."""
        return list(dict.fromkeys(pair.source.tensor for pair in self.parts_b[name]))

    @cached_property
    def left_out(self) -> list[str]:
        """The tensors of A that have no counterpart in B."""
        used = {name for target in self.parts_b for name in self.sources(target)}
        return [name for name in self.vector.base.architecture.tensors if name not in used]

    def of(self, name: str) -> Tensor:
        """Return the change of one tensor of B."""
        total = torch.zeros(self.onto.info(name).shape, dtype=torch.float64)
        for pair in self.parts_b[name]:
            pair.target.put(total, pair.share * self._moved(pair))
        return total

    def _moved(self, pair: PartPair) -> Tensor:
        if pair.source.is_weight:
            return self._weight(self._difference(pair.source), pair)
        return self._vector(pair)

    def _weight(self, value: Tensor, pair: PartPair) -> Tensor:
        """Move a weight: its outputs, then its inputs. The scale of a norm before it is folded in."""
        source, target = pair.source, pair.target
        value = self._at_places(self.alignment.move(value, source.layout, target.layout), pair)
        if value.ndim == 4:
            *_, rows, columns = self.onto.info(target.tensor).shape
            value = resampled_kernel(value, rows, columns)
        if (fold := self.alignment.folds_b.get(target.tensor)) is not None:
            value = value / safe(scale_of(self.onto, target.layout, fold).double())
        return value

    def _difference(self, source: TensorPart) -> Tensor:
        if source.tensor not in self.alignment.folds:
            return source.of(self.vector.difference(source.tensor).double())
        tuned, base = (self._scaled(model, source) for model in (self.vector.finetuned, self.vector.base))
        return tuned - base

    def _scaled(self, model: Model, source: TensorPart, fold: NormFold | None = None) -> Tensor:
        """Return a weight of A with the scale of the norm before it."""
        value = source.of(wide(model.raw(source.tensor)).double())
        fold = fold or self.alignment.folds.get(source.tensor)
        return value if fold is None else value * scale_of(model, source.layout, fold).double()

    def carried(self, head: CarriedHead) -> Tensor:
        """Return a tensor of the fine-tune, such as a head, that B has no counterpart for."""
        part, moved = head.part, self.alignment.move
        if not part.is_weight:
            return moved(wide(self.vector.finetuned.raw(part.tensor)).double(), part.layout, head.layout)
        value = moved(self._scaled(self.vector.finetuned, part, head.fold_a), part.layout, head.layout)
        if head.fold_b is None:
            return value
        return value / safe(scale_of(self.onto, part.layout, head.fold_b).double())

    def shift_of(self, head: CarriedHead, moved: Tensor) -> Tensor:
        """Return what a carried weight adds to its outputs because B's norm before it has another shift."""
        tuned, layout = self.vector.finetuned, head.part.layout
        lost = torch.zeros(moved.shape[layout.outputs[0]], dtype=torch.float64)
        for model, fold, weight, sign in (
            (tuned, head.fold_a, wide(tuned.raw(head.part.tensor)).double(), 1),
            (self.onto, head.fold_b, moved, -1),
        ):
            if fold is None or (name := f"{fold.norm}.bias") not in model.names:
                continue
            shift = wide(model.raw(name)).double()
            if model is self.onto and self.covers(name):
                shift = shift + self.of(name)
            lost = lost + sign * torch.tensordot(weight, shift, dims=([layout.inputs[0]], [0]))
        return lost

    def _vector(self, pair: PartPair) -> Tensor:
        """Move a bias, a token or another tensor without inputs along its last dimension."""
        source, target = pair.source, pair.target
        value = source.of(self.vector.difference(source.tensor).double())
        if pair.writes is None:
            return value
        matrix = torch.from_numpy(self.alignment.maps[pair.writes].matrix[0]).double()
        ours, theirs = self._norms_a.get(source.module), self._norms_b.get(target.module)
        if source.tensor in self.vector.base.architecture.scales:
            folded = ours is not None or theirs is not None
            return torch.zeros(len(matrix)) if folded else matrix.square() @ value
        if source.module in self._norms:
            return self._shift(pair)
        return self._at_places(self.alignment.move(value, source.layout, target.layout), pair)

    def _at_places(self, value: Tensor, pair: PartPair) -> Tensor:
        """Return a change of positions for as many of them as B has; other changes stay."""
        items = pair.target.layout.items
        places = [dim for dim, item in enumerate(items) if is_place(item)]
        if not places or value.ndim == 4:  # the pixels of a patch have a way of their own
            return value
        count = size_of(items[places[0]], self.onto.architecture.sizes)
        by_place = value.movedim(places[0], 0)
        table = resampled_positions(by_place.reshape(len(by_place), -1), count, grid=self._has_patches)
        return table.reshape(count, *by_place.shape[1:]).movedim(0, places[0])

    @cached_property
    def _has_patches(self) -> bool:
        """Whether positions are those of patches."""
        return any(len(layout.inputs) == 3 for layout in self.vector.base.architecture.tensors.values())

    def _shift(self, pair: PartPair) -> Tensor:
        """Move the shift of a norm, as its readers get it: before the scale, where that is folded in."""
        source, target = pair.source, pair.target
        ours, theirs = self._norms_a.get(source.module), self._norms_b.get(target.module)
        shifts = []
        for model in (self.vector.finetuned, self.vector.base):
            value = wide(model.raw(source.tensor)).double()
            if ours is not None:
                value = value / safe(wide(model.raw(f"{ours.norm}.weight")).double() + ours.offset)
            shifts.append(value)
        assert pair.writes is not None
        map_ = self.alignment.maps[pair.writes]
        moved = float(map_.read[0]) * (torch.from_numpy(map_.matrix[0]).double() @ (shifts[0] - shifts[1]))
        if theirs is None:
            return moved
        return moved * (wide(self.onto.raw(f"{theirs.norm}.weight")).double() + theirs.offset)

    @cached_property
    def _norms_a(self) -> Mapping[str, NormFold]:
        return {fold.norm: fold for fold in self.alignment.folds.values()}

    @cached_property
    def _norms_b(self) -> Mapping[str, NormFold]:
        return {fold.norm: fold for fold in self.alignment.folds_b.values()}

    @cached_property
    def _norms(self) -> frozenset[str]:
        return frozenset(name.rpartition(".")[0] for name in self.vector.base.architecture.scales)
