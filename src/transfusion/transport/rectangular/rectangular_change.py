"""The change of a fine-tune of A, rewritten for a base B of another shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from transfusion.alignment.alignment import NormFold
from transfusion.alignment.rectangular import PartPair, RectangularAlignment
from transfusion.architecture.layouts import size_of
from transfusion.model.model import Model
from transfusion.model.part_roles import Role, TensorPart, is_place, tensor_parts
from transfusion.transport.norm_folding import safe, scale_of
from transfusion.transport.rectangular.resampling import resampled_kernel, resampled_positions
from transfusion.transport.task_vector import TaskVector, wide


@dataclass(frozen=True)
class RectangularChange:
    """π(τ) between shapes, tensor by tensor."""

    vector: TaskVector
    alignment: RectangularAlignment
    onto: Model

    @cached_property
    def parts_a(self) -> dict[Role, TensorPart]:
        return tensor_parts(self.vector.base.architecture)

    @cached_property
    def parts_b(self) -> dict[str, list[tuple[TensorPart, list[PartPair]]]]:
        """For every tensor of B that gets a change, its parts and their sources."""
        found: dict[str, list[tuple[TensorPart, list[PartPair]]]] = {}
        for role, part in tensor_parts(self.onto.architecture).items():
            pairs = [pair for pair in self.alignment.by_target.get(role, ()) if self._is_known(pair)]
            if pairs:
                found.setdefault(part.tensor, []).append((part, pairs))
        return found

    def _is_known(self, pair: PartPair) -> bool:
        """Return whether base and fine-tune both have the source of a pair."""
        source = self.parts_a.get(pair.source)
        return source is not None and self.vector.covers(source.tensor)

    def covers(self, name: str) -> bool:
        """Whether a tensor of B gets a change."""
        return name in self.parts_b

    def sources(self, name: str) -> list[str]:
        """Return the tensors of A whose changes a tensor of B gets."""
        pairs = [pair for _, several in self.parts_b[name] for pair in several]
        return list(dict.fromkeys(self.parts_a[pair.source].tensor for pair in pairs))

    @cached_property
    def left_out(self) -> list[str]:
        """The tensors of A that have no counterpart in B."""
        used = {name for target in self.parts_b for name in self.sources(target)}
        return [name for name in self.vector.base.architecture.tensors if name not in used]

    def of(self, name: str) -> Tensor:
        """Return the change of one tensor of B."""
        total = torch.zeros(self.onto.info(name).shape, dtype=torch.float64)
        for part, pairs in self.parts_b[name]:
            for pair in pairs:
                part.put(total, pair.share * self._moved(pair, part))
        return total

    def _moved(self, pair: PartPair, target: TensorPart) -> Tensor:
        source = self.parts_a[pair.source]
        if source.is_weight:
            value = self._difference(pair, source)
            return self._weight(value, pair, source, target)
        return self._vector(pair, source, target)

    def _weight(self, value: Tensor, pair: PartPair, source: TensorPart, target: TensorPart) -> Tensor:
        """Move a weight: its outputs, then its inputs. The scale of a norm before it is folded in."""
        if pair.writes is not None:
            value = _along(value, source.layout.outputs[0], self.alignment.maps[pair.writes].written)
        if pair.reads is not None:
            value = _along(value, source.layout.inputs[0], self.alignment.maps[pair.reads].reading)
        value = self._at_places(value, source, target)
        if source.layout.outputs != target.layout.outputs and value.ndim == 2:
            value = value.T
        if value.ndim == 4:
            *_, rows, columns = self.onto.info(target.tensor).shape
            value = resampled_kernel(value, rows, columns)
        if pair.fold_b is not None:
            value = value / safe(scale_of(self.onto, target.layout, pair.fold_b).double())
        return value

    def _difference(self, pair: PartPair, source: TensorPart) -> Tensor:
        if pair.fold_a is None:
            return source.of(self.vector.difference(source.tensor).double())
        tuned, base = (
            self._scaled(model, pair, source) for model in (self.vector.finetuned, self.vector.base)
        )
        return tuned - base

    @staticmethod
    def _scaled(model: Model, pair: PartPair, source: TensorPart) -> Tensor:
        """Return a weight of A with the scale of the norm before it."""
        value = source.of(wide(model.raw(source.tensor)).double())
        if pair.fold_a is None:
            return value
        return value * scale_of(model, source.layout, pair.fold_a).double()

    def carried(self, pair: PartPair, source: TensorPart) -> Tensor:
        """Return a tensor of the fine-tune, such as a head, that B has no counterpart for."""
        tuned = self.vector.finetuned
        if source.is_weight:
            return self._weight(self._scaled(tuned, pair, source), pair, source, source)
        value = source.of(wide(tuned.raw(source.tensor)).double())
        if pair.writes is None:
            return value
        return _along(value, value.ndim - 1, self.alignment.maps[pair.writes].written)

    def shift_of(self, pair: PartPair, source: TensorPart, moved: Tensor) -> Tensor:
        """Return what a carried weight adds to its outputs because B's norm before it has another shift."""
        tuned = self.vector.finetuned
        lost = torch.zeros(moved.shape[source.layout.outputs[0]], dtype=torch.float64)
        for model, fold, weight, sign in (
            (tuned, pair.fold_a, wide(tuned.raw(source.tensor)).double(), 1),
            (self.onto, pair.fold_b, moved, -1),
        ):
            if fold is None or (name := f"{fold.norm}.bias") not in model.names:
                continue
            shift = wide(model.raw(name)).double()
            if model is self.onto and self.covers(name):
                shift = shift + self.of(name)
            lost = lost + sign * torch.tensordot(weight, shift, dims=([source.layout.inputs[0]], [0]))
        return lost

    def _vector(self, pair: PartPair, source: TensorPart, target: TensorPart) -> Tensor:
        """Move a bias, a token or another tensor without inputs along its last dimension."""
        value = source.of(self.vector.difference(source.tensor).double())
        if pair.writes is None:
            return value
        map_ = self.alignment.maps[pair.writes]
        ours, theirs = self._norms_a.get(source.module), self._norms_b.get(target.module)
        if source.tensor in self.vector.base.architecture.scales:
            folded = ours is not None or theirs is not None
            return torch.zeros(len(map_.matrix)) if folded else map_.matrix.double().square() @ value
        if source.module in self._norms:
            return self._shift(pair, source, target)
        return self._at_places(_along(value, value.ndim - 1, map_.written), source, target)

    def _at_places(self, value: Tensor, source: TensorPart, target: TensorPart) -> Tensor:
        """Return a change of positions for as many of them as B has; other changes stay."""
        places = [dim for dim, item in enumerate(source.layout.items) if is_place(item)]
        if not places or value.ndim == 4:  # the pixels of a patch have a way of their own
            return value
        theirs = next(item for item in target.layout.items if is_place(item))
        count = size_of(theirs, self.onto.architecture.sizes)
        by_place = value.movedim(places[0], 0)
        table = resampled_positions(by_place.reshape(len(by_place), -1), count, grid=self._has_patches)
        return table.reshape(count, *by_place.shape[1:]).movedim(0, places[0])

    @cached_property
    def _has_patches(self) -> bool:
        """Whether positions are those of patches."""
        return any(len(part.layout.inputs) == 3 for part in self.parts_a.values())

    def _shift(self, pair: PartPair, source: TensorPart, target: TensorPart) -> Tensor:
        """Move the shift of a norm, as its readers get it: before the scale, where that is folded in."""
        ours, theirs = self._norms_a.get(source.module), self._norms_b.get(target.module)
        shifts = []
        for model in (self.vector.finetuned, self.vector.base):
            value = wide(model.raw(source.tensor)).double()
            if ours is not None:
                value = value / safe(wide(model.raw(f"{ours.norm}.weight")).double() + ours.offset)
            shifts.append(value)
        assert pair.writes is not None
        map_ = self.alignment.maps[pair.writes]
        moved = map_.read * (map_.matrix.double() @ (shifts[0] - shifts[1]))
        if theirs is None:
            return moved
        return moved * (wide(self.onto.raw(f"{theirs.norm}.weight")).double() + theirs.offset)

    @cached_property
    def _norms_a(self) -> Mapping[str, NormFold]:
        return {pair.fold_a.norm: pair.fold_a for pair in self.alignment.pairs if pair.fold_a is not None}

    @cached_property
    def _norms_b(self) -> Mapping[str, NormFold]:
        return {pair.fold_b.norm: pair.fold_b for pair in self.alignment.pairs if pair.fold_b is not None}

    @cached_property
    def _norms(self) -> frozenset[str]:
        return frozenset(name.rpartition(".")[0] for name in self.vector.base.architecture.scales)


def _along(value: Tensor, dim: int, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Move one dimension of a tensor by a function of matrices, (units, rest)."""
    front = value.movedim(dim, 0)
    moved = move(front.reshape(len(front), -1))
    return moved.reshape(-1, *front.shape[1:]).movedim(0, dim)
