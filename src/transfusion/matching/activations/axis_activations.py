"""Activations by axis: from the recorded inputs and outputs of modules to the units of an axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from transfusion.alignment.alignment import NormFold
from transfusion.alignment.maps import Map
from transfusion.alignment.moves import move_tensor
from transfusion.architecture.architecture import Policy
from transfusion.architecture.layouts import ANONYMOUS, Concat, Item, Layout, Name, Product, explode, names_in
from transfusion.files.tensor_files import row_blocks
from transfusion.model.model import Model
from transfusion.model.part_roles import TensorPart
from transfusion.running.activations import (
    GRADIENT,
    INPUT,
    OUTPUT,
    ActivationStore,
    comparable,
    precision,
)

NUMBERS = 2**22
"""How many numbers of a table are read at a time; always the same, so that sums keep their digits."""


@dataclass(frozen=True)
class AxisPiece:
    """Activations of A and B, with one dimension per axis and the samples last."""

    axes: tuple[str, ...]
    a: Tensor
    b: Tensor
    side: str
    """Whether they are inputs or outputs of a module, or gradients of outputs."""

    @classmethod
    def of(cls, axes: tuple[str, ...], a: Tensor, b: Tensor, side: str) -> AxisPiece:
        """Convert activations to the type in which their axes are compared."""
        exact = precision(prod(a.shape[:-1]))
        return cls(axes, a.to(exact), b.to(exact), side)


class AxisActivations:
    """The activations of two models on the same probes, by axis."""

    def __init__(
        self, a: Model, b: Model, of_a: ActivationStore, of_b: ActivationStore, device: str = "cpu"
    ) -> None:
        self.a, self.b, self.of_a, self.of_b, self.device = a, b, of_a, of_b, device
        self.architecture = a.architecture
        self.sizes = a.architecture.sizes
        self.recorded = RecordedModel(a, of_a), RecordedModel(b, of_b)

    def under(self, policy: Policy) -> AxisActivations:
        """Return the same activations for the axes of another policy."""
        return AxisActivations(self.a.under(policy), self.b.under(policy), self.of_a, self.of_b, self.device)

    def pair(self, module: str, side: str) -> tuple[Tensor, Tensor] | None:
        """Return the samples of one module in both models, if both were recorded."""
        a, b = self.of_a.samples(module, side), self.of_b.samples(module, side)
        if a is None or b is None or a.shape != b.shape:
            return None
        return comparable(a.to(self.device), b.to(self.device))

    @cached_property
    def unshared(self) -> str | None:
        """Why gradients of A and B cannot be compared; None if both come from logits of one meaning."""
        ends = self.of_a.ends, self.of_b.ends
        if not all(ends):
            return "models without logits have no outputs in a space that both share"
        if ends[0] != ends[1]:
            listed = (", ".join(f"{name} of {size}" for name, size in one.items()) for one in ends)
            return f"A and B have different logits ({'; '.join(listed)})"
        labels = [(model.config or {}).get("id2label") for model in (self.a, self.b)]
        return None if labels[0] == labels[1] else "A and B have different classes"

    # ── norms ────────────────────────────────────────────────────────────────────────────────

    @property
    def norms(self) -> dict[str, str]:
        """Every norm on the residual stream, and its point of the stream."""
        return self.recorded[0].norms

    def before_branches(self, point: str) -> list[str]:
        """Return the norms at a point that only branches read (pre-norm)."""
        found = self.recorded[0].before_branches(point)
        return [norm for norm in found if self.recorded[1].is_recorded(norm)]

    def after(self, point: str) -> list[str]:
        """Return the norms whose output is the stream at a point (post-norm)."""
        return [norm for norm in self.recorded[0].after(point) if self.recorded[1].is_recorded(norm)]

    def on_stream(self, point: str) -> tuple[Tensor, Tensor] | None:
        """Return a point of the stream in both models, as (samples, units).

        With norms before branches it is normalised; otherwise it is the output of the last norm, or the input
        of a module.
        """
        if before := self.before_branches(point):
            pairs = [pair for norm in before if (pair := self.normalised(norm))]
        elif after := self.after(point):
            pairs = [pair for norm in after[-1:] if (pair := self.pair(norm, OUTPUT))]
        else:
            pieces = [piece for piece in self.pieces(point) if piece.axes == (point,) and piece.side == INPUT]
            pairs = [(piece.a.T, piece.b.T) for piece in pieces[:1]]
        if len(pairs) < 2:
            return pairs[0] if pairs else None
        return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])

    @cached_property
    def folds(self) -> dict[str, NormFold]:
        """For every tensor that reads the stream through a norm before a branch, the norm."""
        found: dict[str, NormFold] = {}
        for name, layout in self.architecture.tensors.items():
            fold = self.recorded[0].fold_of(name.rpartition(".")[0], layout)
            if fold is not None and self.recorded[1].is_recorded(fold.norm):
                found[name] = fold
        return found

    def normalised(self, norm: str) -> tuple[Tensor, Tensor] | None:
        """Return the normalised stream in both models, without the scale and shift of the norm."""
        pair = self.pair(norm, OUTPUT)
        if pair is None:
            return None
        offset = self.recorded[0].offset(norm)
        a, b = (one.bare(norm, value, offset) for one, value in zip(self.recorded, pair, strict=True))
        return a, b

    def weight_covariance(self, id: str, maps: Mapping[str, Map]) -> Tensor | None:
        """Return the covariance of B's units of a point and A's in the weights that read or write it.

        Only weights whose other axes are mapped already, or never move, count.
        """
        total: Tensor | None = None
        reading = {id: map_.reading for id, map_ in maps.items()}
        for name, layout in self.architecture.tensors.items():
            if layout.arrow is None or name not in self.b.architecture.tensors:
                continue
            dims = [dim for dim, item in enumerate(layout.items) if item == Name(id)]
            others = set(layout.names()) - {id}
            free = {one for one in others if one in self._free}
            if len(dims) != 1 or free - maps.keys() or self.a.info(name).shape != self.b.info(name).shape:
                continue
            squares = torch.zeros(2, dtype=torch.float64)
            table: Tensor | None = None
            for b, a in self._units_in_weights(name, id, dims[0], reading):
                table = b @ a.T if table is None else table.addmm_(b, a.T)
                squares += torch.stack([torch.linalg.vector_norm(one).double() ** 2 for one in (b, a)]).cpu()
            assert table is not None
            table /= float(squares.prod().sqrt().clamp(min=1e-30))
            total = table if total is None else total.add_(table)
        return total

    def _units_in_weights(
        self, name: str, id: str, dim: int, maps: Mapping[str, Map]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield B's units and A's in a weight, (units, rest): some rows at a time, where rows do not move.

        Tables of a vocabulary have rows by the hundred thousand.
        """
        layout, models = self.architecture.tensors[name], (self.b, self.a)
        if dim == 1 and len(layout.items) == 2 and not set(layout.names()) & maps.keys() - {id}:
            for rows in row_blocks(self.a.info(name).shape, NUMBERS):
                b, a = (self._scaled(model, name, self.sizes[id], rows) for model in models)
                yield b.T, a.T
            return
        b, a = (self._scaled(model, name, self.sizes[id]) for model in models)
        a = move_tensor(a, layout, maps, self.sizes, self.architecture.parents)
        yield b.movedim(dim, 0).flatten(1), a.movedim(dim, 0).flatten(1)

    @cached_property
    def _free(self) -> frozenset[str]:
        return frozenset(space.id for space in self.architecture.moving())

    def _scaled(self, model: Model, name: str, units: int, rows: slice | None = None) -> Tensor:
        """Return a weight, or some of its rows, with the scale of the norm that it reads through, as exact as
        ``units`` ask for.
        """
        value = (model.read(name) if rows is None else model.raw(name, rows)).to(
            self.device, precision(units)
        )
        if (fold := self.folds.get(name)) is not None:
            layout = self.architecture.tensors[name]
            shape = [1] * value.ndim
            shape[layout.inputs[0]] = -1
            value = value * (model.read(f"{fold.norm}.weight").to(value) + fold.offset).reshape(shape)
        return value

    # ── other axes ───────────────────────────────────────────────────────────────────────────

    def parent_axes(self) -> list[str]:
        """Return the axes that have children (mostly heads), where either may move."""
        parents = self.architecture.parents
        found: dict[str, None] = {}
        for layout in self.architecture.tensors.values():
            for item in layout.items:
                for first, *rest in _products(item):
                    within = {name for name in rest if parents.get(name) == first}
                    if parents.get(first) is None and (first in self._free or within & self._free):
                        found.setdefault(first)
        return list(found)

    def pieces(self, id: str) -> Iterator[AxisPiece]:
        """Yield all activations with an axis: outputs of modules that produce it, inputs of its readers."""
        for name, layout in self.architecture.tensors.items():
            if layout.arrow is None or len(layout.outputs) != 1:
                continue
            for side, dims in ((OUTPUT, layout.outputs), (INPUT, layout.inputs)):
                if id in names_in(layout.items[dims[0]]):
                    yield from self._pieces_of_module(name, dims[0], id, side)

        for output, space in self.architecture.outputs.items():
            if space == id and (pair := self.pair(output, OUTPUT)) is not None:
                yield AxisPiece.of((id,), pair[0].T, pair[1].T, INPUT)

    def _pieces_of_module(self, name: str, dim: int, id: str, side: str) -> Iterator[AxisPiece]:
        """Yield the activations of one side of a module. They are dropped before the next ones are read."""
        module, _, leaf = name.rpartition(".")
        pair = self.pair(module, side) if leaf == "weight" else self._computed(name, side)
        if pair is not None and pair[0].shape[1] == self._extent(name, dim):
            yield from self._cut(self.architecture.tensors[name].items[dim], id, pair, side)

    def gradients(self, id: str) -> Iterator[AxisPiece]:
        """Yield the gradients of the outputs of all modules that produce an axis; none, if A and B do not
        share an output space.
        """
        for name, layout in self.architecture.tensors.items() if self.unshared is None else ():
            if len(layout.outputs) != 1 or not name.endswith(".weight"):
                continue
            if id in names_in(layout.items[dim := layout.outputs[0]]):
                yield from self._pieces_of_module(name, dim, id, GRADIENT)

    def _extent(self, name: str, dim: int) -> int:
        return self.a.info(name).shape[dim]

    def _computed(self, name: str, side: str) -> tuple[Tensor, Tensor] | None:
        """Return the product of a tensor with its inputs, if no module of its own has recorded outputs."""
        module, parts = name.rpartition(".")[0], self.a.info(name).shape
        if side == INPUT or len(parts) != 2:
            return None
        given = [self.pair(module, f"{INPUT}{number or ''}") for number in range(3)]
        if given[0] is None:
            return None
        inputs = [one or given[0] for one in given]  # queries, keys and values may have different inputs
        count = min(len(pair[0]) for pair in inputs)

        def outputs(model: Model, which: int) -> Tensor:
            weight, bias = model.read(name).to(inputs[0][0]), name.removesuffix("weight") + "bias"
            shift = (
                model.read(bias).to(weight)
                if bias in model.architecture.tensors
                else weight.new_zeros(len(weight))
            )
            blocks = zip(weight.chunk(3), shift.chunk(3), inputs, strict=True)
            return torch.cat([pair[which][:count] @ one.T + own for one, own, pair in blocks], dim=1)

        return outputs(self.a, 0), outputs(self.b, 1)

    def _cut(self, item: Item, id: str, pair: tuple[Tensor, Tensor], side: str) -> Iterator[AxisPiece]:
        layout = Layout((Name(ANONYMOUS), item))
        cuts = [explode(one, layout, self.sizes) for one in pair]
        for (a, factors), (b, _) in zip(*cuts, strict=True):
            axes = tuple(factor.name for factor in factors[1:])
            if id in axes:
                yield AxisPiece.of(axes, a.movedim(0, -1), b.movedim(0, -1), side)


def _products(item: Item) -> Iterator[tuple[str, ...]]:
    """Yield the axes of every product in an item, outermost first."""
    match item:
        case Product(items):
            names = tuple(name for child in items for name in names_in(child))
            if isinstance(items[0], Name):
                yield names
        case Concat(parts):
            for part in parts:
                yield from _products(part)


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
