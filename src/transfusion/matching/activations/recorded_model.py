"""The activations of one model, by the points and axes of its architecture."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from transfusion.alignment.alignment import NormFold
from transfusion.architecture.layouts import Item, Layout, Name
from transfusion.model.model import Model
from transfusion.model.part_roles import TensorPart
from transfusion.running.activation_store import INPUT, OUTPUT, ActivationStore


class RecordedModel:
    """A model, and samples of what its modules read and write on probes."""

    def __init__(self, model: Model, store: ActivationStore) -> None:
        self.model, self.store = model, store
        self.architecture = model.architecture
        self._offsets: dict[str, float] = {}

    @property
    def held_out(self) -> RecordedModel:
        """The same model on the held-out probes."""
        return RecordedModel(self.model, self.store.others)

    def samples(self, module: str, side: str) -> Tensor | None:
        return self.store.samples(module, side)

    def is_recorded(self, module: str) -> bool:
        """Return whether the outputs of a module were recorded."""
        return self.store.has(module, OUTPUT)

    # ── the residual stream ──────────────────────────────────────────────────────────────────

    @cached_property
    def norms(self) -> dict[str, str]:
        """Every norm on the residual stream, and its point of the stream."""
        found: dict[str, str] = {}
        for name, layout in self.architecture.tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf == "weight" and name in self.architecture.scales:
                (item,) = layout.items
                if self.is_point(item):
                    found[module] = str(item)
        return found

    def is_point(self, item: Item | None) -> bool:
        """Return whether an axis is a point of the residual stream."""
        return isinstance(item, Name) and self.architecture.spaces[item.text].stream is not None

    def before_branches(self, point: str) -> list[str]:
        """Return the norms at a point that only branches read (pre-norm)."""
        cuts = [cut for cut in self.architecture.shortcuts if cut.source == point]
        entries = {cut.entry for cut in cuts}
        here = [norm for norm, at in self.norms.items() if at == point and norm not in self.store.shown]
        return [norm for norm in here if (norm in entries or not cuts) and self.is_recorded(norm)]

    def after(self, point: str) -> list[str]:
        """Return the norms whose output is the stream at a point (post-norm)."""
        return [norm for norm, at in self.norms.items() if at == point and self.is_recorded(norm)]

    def stream(self, point: str) -> Tensor | None:
        """Return a point of the stream as its readers get it: normalised, without scale and shift, if norms
        stand before them.
        """
        if before := self.before_branches(point):
            return self.normalised(before[0])
        if after := self.after(point):
            return self.samples(after[-1], OUTPUT)
        for name, layout in self.architecture.tensors.items():
            reads = [layout.items[dim] for dim in layout.inputs] == [Name(point)]
            if reads and (found := self.samples(name.rpartition(".")[0], INPUT)) is not None:
                return found
        return None

    def raw(self, point: str) -> Tensor | None:
        """Return a point of the stream before its norm."""
        norms = self.before_branches(point) or self.after(point)
        return self.samples(norms[-1], INPUT) if norms else self.stream(point)

    def normalised(self, norm: str) -> Tensor | None:
        """Return the output of a norm without its scale and shift."""
        output = self.samples(norm, OUTPUT)
        return None if output is None else self.bare(norm, output, self.offset(norm))

    def bare(self, norm: str, output: Tensor, offset: float) -> Tensor:
        """Return an output of a norm without its scale and shift."""
        if (bias := f"{norm}.bias") in self.architecture.tensors:
            output = output - self.model.read(bias).to(output)
        scale = self.model.read(f"{norm}.weight").to(output) + offset
        return output / torch.where(scale.abs() < 1e-4, torch.ones_like(scale), scale)

    def offset(self, norm: str) -> float:
        """Return 1 if a norm multiplies by 1 + its weight, 0 if by its weight, from recorded outputs."""
        if norm not in self._offsets:
            output = self.samples(norm, OUTPUT)
            off = [
                0.0 if output is None else float((self.bare(norm, output, one).square().mean() - 1).abs())
                for one in (0, 1)
            ]
            self._offsets[norm] = float(off[1] < off[0])
        return self._offsets[norm]

    # ── parts of tensors ─────────────────────────────────────────────────────────────────────

    def fold(self, part: TensorPart) -> NormFold | None:
        """Return the norm before a branch whose output a weight reads; of such a norm, itself."""
        if part.module in self.norms:
            here = part.module in self.before_branches(self.norms[part.module])
            return NormFold(part.module, self.offset(part.module)) if here else None
        return self.fold_of(part.module, part.layout)

    def fold_of(self, module: str, layout: Layout) -> NormFold | None:
        """Return the norm before a branch whose output a weight of this module and layout reads."""
        norm = self.store.fed_by.get(module)
        if layout.arrow is None or norm is None or norm not in self.norms:
            return None
        point = self.norms[norm]
        reads = [layout.items[dim] for dim in layout.inputs] == [Name(point)]
        return NormFold(norm, self.offset(norm)) if reads and norm in self.before_branches(point) else None

    def read_by(self, part: TensorPart) -> Tensor | None:
        """Return what a weight reads; without the scale and shift of a norm that is folded into it."""
        fold = self.fold(part)
        return self.samples(part.module, INPUT) if fold is None else self.normalised(fold.norm)

    def written_by(self, part: TensorPart) -> Tensor | None:
        """Return what a weight writes."""
        found = self.samples(part.module, OUTPUT)
        if found is None or not part.is_weight:
            return None
        extent = self.model.info(part.tensor).shape[part.layout.outputs[0]]
        return part.of(found, 1) if found.shape[1] == extent else None
