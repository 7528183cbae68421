"""Norm folding: move the scale and the shift of a norm together with the weights that read its output.

A norm multiplies every unit of the stream by its own number. Rotated units have no such numbers. Rotations
therefore act on W·diag(g), the weight with the scale g folded in, and on β/g, the shift before the scale.
B keeps its own scale: the moved weight is divided by it, and the moved shift is multiplied by it.
"""

from __future__ import annotations

from torch import Tensor, ones_like, where

from transfusion.alignment.alignment import Alignment, NormFold
from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import Item, Layout
from transfusion.files.tensor_files import Rows
from transfusion.model.model import Model
from transfusion.transport.task_vector import wide


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
