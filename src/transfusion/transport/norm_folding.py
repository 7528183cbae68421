"""Norm folding: move the scale and the shift of a norm together with the weights that read its output.

A norm multiplies every unit of the stream by its own number. Rotated units have no such numbers. Rotations
therefore act on W·diag(g), the weight with the scale g folded in, and on β/g, the shift before the scale.
B keeps its own scale: the moved weight is divided by it, and the moved shift is multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment, NormFold
from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import Item, Layout
from transfusion.files.tensor_files import Rows
from transfusion.model.model import Model
from transfusion.transport.task_vector import wide


@dataclass(frozen=True)
class NormFolding:
    """The norms of an alignment that rotates units."""

    alignment: Alignment

    @cached_property
    def _norms(self) -> frozenset[str]:
        return frozenset(fold.norm for fold in self.alignment.folds.values())

    def is_part(self, name: str) -> bool:
        """Return whether a tensor is the scale or the shift of a norm that is folded into a weight."""
        return name.rpartition(".")[0] in self._norms

    def fold_of(self, name: str, layout: Layout, base: Architecture) -> NormFold | None:
        """Return the norm whose output a weight reads; if A lacks the weight, that of its neighbours."""
        if name in base.tensors or layout.arrow is None:
            return self.alignment.folds.get(name)
        others = {at: fold for at, fold in self.alignment.folds.items() if at in base.tensors}
        beside = {fold for at, fold in others.items() if _reads(base.tensors[at]) == _reads(layout)}
        return beside.pop() if len(beside) == 1 else None

    def is_rotated_scale(self, name: str, architecture: Architecture) -> bool:
        """Return whether a tensor is a scale of units that the alignment rotates."""
        ids = architecture.tensors[name].names() if name in architecture.scales else ()
        return any((one := self.alignment.maps.get(id)) and one.rotates for id in ids)

    def move_scale(self, values: Tensor, layout: Layout) -> Tensor:
        """Move a scale of rotated units: B's are means of A's, weighted by squared entries."""
        rotated = {id: one for id in layout.names() if (one := self.alignment.maps.get(id)) and one.rotates}
        shares: dict[str, Map] = {id: Map.plan(np.square(one.matrix)) for id, one in rotated.items()}
        larger = float(next(iter(rotated.values())).read[0])
        return larger * replace(self.alignment, maps={**self.alignment.maps, **shares}).move(values, layout)

    @staticmethod
    def scaled(model: Model, name: str, fold: NormFold, rows: Rows | None) -> Tensor:
        """Return a weight, or some of its rows, with the norm's scale folded into its inputs."""
        return wide(model.raw(name, rows)) * scale_of(model, model.architecture.tensors[name], fold, rows)

    @staticmethod
    def divided(
        value: Tensor, model: Model, layout: Layout, fold: NormFold | None, rows: Rows | None
    ) -> Tensor:
        """Divide a weight by the scale of the norm of its new model."""
        return value if fold is None else value / safe(scale_of(model, layout, fold, rows))

    def offset_of(self, norm: str) -> float:
        return next(fold.offset for fold in self.alignment.folds.values() if fold.norm == norm)

    def shift(self, model: Model, name: str) -> Tensor:
        """Return the shift of a norm divided by its scale."""
        return wide(model.raw(name)) / safe(self.scale(model, name))

    def scale(self, model: Model, name: str) -> Tensor:
        """Return the scale of the norm that a shift belongs to."""
        norm = name.rpartition(".")[0]
        return wide(model.raw(f"{norm}.weight")) + self.offset_of(norm)


def scale_of(model: Model, layout: Layout, fold: NormFold, rows: Rows | None = None) -> Tensor:
    """Return a norm's scale, broadcastable to the inputs of a weight that reads its output."""
    (dim,) = layout.inputs
    scale = wide(model.raw(f"{fold.norm}.weight")) + fold.offset
    if dim == 0 and rows is not None:
        scale = scale[rows]
    shape = [1] * len(layout.items)
    shape[dim] = -1
    return scale.reshape(shape)


def _reads(layout: Layout) -> list[Item]:
    return [layout.items[dim] for dim in layout.inputs]


def safe(scale: Tensor) -> Tensor:
    """Return a scale to divide by: one for units that the norm sets to zero."""
    return torch.where(scale.abs() < 1e-4, torch.ones_like(scale), scale)
