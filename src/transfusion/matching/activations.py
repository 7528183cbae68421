"""Activations: what two models compute on the same probes, by axis.

`running.activations` records samples of the inputs and outputs of modules. Here they become the units of an
axis, for models of one shape (`functional`) and of different shapes (`other_shapes`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from transfusion.alignment.maps import Map, NormFold, move_tensor
from transfusion.architecture.architecture import Architecture, Policy
from transfusion.architecture.layouts import ANONYMOUS, Concat, Item, Layout, Name, Product, explode, names_in
from transfusion.architecture.table import Symmetry
from transfusion.files.tensor_files import row_blocks
from transfusion.matching.methods import FunctionalOptions
from transfusion.model.model import Model
from transfusion.model.part_roles import TensorPart
from transfusion.running.activations import (
    HELD_OUT,
    INPUT,
    OUTPUT,
    READS,
    ActivationStore,
    comparable,
    input_of,
    input_side,
    precision,
    record_activations,
)
from transfusion.running.building import build, skeleton
from transfusion.running.probes import enough_probes, make_probes, tokens_of_a_probe
from transfusion.running.probes.pairs import paired_probes
from transfusion.running.probes.probed_model import ProbedModel, Probes
from transfusion.running.streaming import WHOLE, RunConfig, RunningModel, streamed_bytes
from transfusion.runtime.engines import require_device
from transfusion.runtime.resources import LIBRARY, Resources

NUMBERS = 2**22
"""How many numbers of a table are read at a time; always the same, so that sums keep their digits."""
MATRICES = 44
"""Bytes for every entry of an axis's square matrix: the covariance, and four matrices in float64 with one in
float32 while its polar factor is found."""
KEPT_STATES = 4
"""Tensors of the size of the hidden states that a pass keeps between two layers."""


# ── one model ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RecordedModel:
    """A model, and samples of what its modules read and write on probes."""

    model: Model
    store: ActivationStore
    device: str = "cpu"

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def held_out(self) -> RecordedModel:
        """The same model on the held-out probes."""
        return replace(self, store=self.store.others)

    def samples(self, module: str, side: str) -> Tensor | None:
        """Return the samples of one side of a module, (samples, units), if it was recorded."""
        found = self.store.samples(module, side)
        return None if found is None else found.to(self.device, precision(found.shape[1]))

    @cached_property
    def norms(self) -> dict[str, str]:
        """Every norm on the residual stream, and its point of the stream."""
        found: dict[str, str] = {}
        for name, layout in self.architecture.tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf == "weight" and name in self.architecture.scales and self.is_point(layout.items[0]):
                found[module] = str(layout.items[0])
        return found

    def is_point(self, item: Item | None) -> bool:
        """Return whether an axis is a point of the residual stream."""
        return isinstance(item, Name) and self.architecture.spaces[item.text].stream is not None

    def pre_norms(self, point: str) -> list[str]:
        """Return the norms at a point that only branches read (pre-norm)."""
        cuts = [cut for cut in self.architecture.shortcuts if cut.source == point]
        entries = {cut.entry for cut in cuts}
        here = [norm for norm in self.norms_at(point) if norm not in self.store.shown]
        return [norm for norm in here if norm in entries or not cuts]

    def norms_at(self, point: str) -> list[str]:
        """Return the norms that were recorded at a point of the stream."""
        return [norm for norm, at in self.norms.items() if at == point and self.store.has(norm, OUTPUT)]

    def stream(self, point: str, *, first: bool = False) -> Tensor | None:
        """Return a point of the stream as its readers get it, (samples, units).

        With norms before branches it is normalised, without scale and shift, by each of them or by the
        ``first``; otherwise it is the output of the last norm, or the input of a module.
        """
        if before := self.pre_norms(point):
            outputs = [self.normalised(norm) for norm in (before[:1] if first else before)]
            return torch.cat([one for one in outputs if one is not None])
        if after := self.norms_at(point):
            return self.samples(after[-1], OUTPUT)
        readers = [
            (name.rpartition(".")[0], input_of(name))
            for name, layout in self.architecture.tensors.items()
            if self._reads(layout, point) and len(layout.outputs) == 1
        ]
        shown = [(name, OUTPUT) for name, space in self.architecture.outputs.items() if space == point]
        found = (self.samples(*one) for one in (*readers, *shown))
        return next((one for one in found if one is not None), None)

    def _reads(self, layout: Layout, point: str) -> bool:
        """Return whether a weight reads a point of the stream, and nothing else: the taps of a convolution
        are places.
        """
        items = [layout.items[dim] for dim in layout.inputs]
        spaces = [self.architecture.spaces.get(str(item)) for item in items[1:]]
        return items[:1] == [Name(point)] and all(
            item == Name(ANONYMOUS) or (space is not None and space.group is Symmetry.FIXED)
            for item, space in zip(items[1:], spaces, strict=True)
        )

    def raw(self, point: str) -> Tensor | None:
        """Return a point of the stream before its norm, if it has one."""
        norms = self.pre_norms(point) or self.norms_at(point)
        return self.samples(norms[-1], INPUT) if norms else self.stream(point)

    def normalised(self, norm: str) -> Tensor | None:
        """Return the output of a norm without its scale and shift."""
        output = self.samples(norm, OUTPUT)
        return None if output is None else self._bare(norm, output, self.offset(norm))

    def _bare(self, norm: str, output: Tensor, offset: float) -> Tensor:
        if (bias := f"{norm}.bias") in self.architecture.tensors:
            output = output - self.model.read(bias).to(output)
        scale = self.model.read(f"{norm}.weight").to(output) + offset
        return output / torch.where(scale.abs() < 1e-4, torch.ones_like(scale), scale)

    @cached_property
    def _offsets(self) -> dict[str, float]:
        return {}

    def offset(self, norm: str) -> float:
        """Return 1 if a norm multiplies by 1 + its weight, 0 if by its weight, from recorded outputs."""
        if norm not in self._offsets:
            output = self.samples(norm, OUTPUT)
            off = [
                0.0 if output is None else float((self._bare(norm, output, one).square().mean() - 1).abs())
                for one in (0, 1)
            ]
            self._offsets[norm] = float(off[1] < off[0])
        return self._offsets[norm]

    def fold(self, part: TensorPart) -> NormFold | None:
        """Return the norm before a branch whose output a weight reads; of such a norm, itself."""
        if part.module in self.norms:
            here = part.module in self.pre_norms(self.norms[part.module])
            return NormFold(part.module, self.offset(part.module)) if here else None
        return self.fold_of(part.module, part.layout)

    def fold_of(self, module: str, layout: Layout) -> NormFold | None:
        """Return the norm before a branch whose output a weight of this module and layout reads."""
        norm = self.store.fed_by.get(module)
        if layout.arrow is None or norm is None or norm not in self.norms:
            return None
        point = self.norms[norm]
        reads = [layout.items[dim] for dim in layout.inputs] == [Name(point)]
        return NormFold(norm, self.offset(norm)) if reads and norm in self.pre_norms(point) else None

    def part_samples(self, part: TensorPart, side: str) -> Tensor | None:
        """Return what a weight reads, without the scale and shift of a norm that is folded into it; or what
        it writes.
        """
        if side == INPUT:
            fold = self.fold(part)
            inputs = self.samples(part.module, input_of(part.tensor))
            return inputs if fold is None else self.normalised(fold.norm)
        of_attention = part.tensor.rpartition(".")[2] in READS
        found = self.computed(part.tensor) if of_attention else self.samples(part.module, OUTPUT)
        if found is None or not part.is_weight:
            return None
        extent = self.model.info(part.tensor).shape[part.layout.outputs[0]]
        return part.of(found, 1) if found.shape[1] == extent else None

    def computed(self, name: str) -> Tensor | None:
        """Return the product of a weight of nn.MultiheadAttention with its inputs, (samples, units).

        No module puts it out. Queries, keys and values may have different inputs.
        """
        module, _, leaf = name.rpartition(".")
        if leaf not in READS or (queries := self.samples(module, INPUT)) is None:
            return None
        given = [self.samples(module, input_side(number)) for number in READS[leaf]]
        inputs = [queries if one is None else one for one in given]
        weight, bias = self.model.read(name).to(queries), f"{module}.in_proj_bias"
        has_bias = bias in self.architecture.tensors
        shifts = self.model.read(bias).to(weight).chunk(3) if has_bias else [weight.new_zeros(())] * 3
        parts = zip(weight.chunk(len(inputs)), inputs, READS[leaf], strict=True)
        count = min(len(one) for one in inputs)
        return torch.cat([one[:count] @ part.T + shifts[number] for part, one, number in parts], dim=1)


# ── two models ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AxisPiece:
    """Activations of A and B, with one dimension per axis and the samples last."""

    axes: tuple[str, ...]
    a: Tensor
    b: Tensor
    side: str
    """Whether they are inputs or outputs of a module."""

    @classmethod
    def of(cls, axes: tuple[str, ...], a: Tensor, b: Tensor, side: str) -> AxisPiece:
        """Convert activations to the type in which their axes are compared."""
        exact = precision(max(prod(a.shape[:-1]), prod(b.shape[:-1])))
        return cls(axes, a.to(exact), b.to(exact), side)


@dataclass(frozen=True)
class ActivationPair:
    """The activations of two models on the same probes. Apart from `held_out`, for models of one shape."""

    a: RecordedModel
    b: RecordedModel
    about: str = ""
    """A description of the probes."""

    @cached_property
    def held_out(self) -> ActivationPair:
        """Activations on held-out probes."""
        return replace(self, a=self.a.held_out, b=self.b.held_out)

    def under(self, policy: Policy) -> ActivationPair:
        """Return the same samples for the axes of another policy."""
        a, b = (replace(one, model=one.model.under(policy)) for one in (self.a, self.b))
        return replace(self, a=a, b=b)

    @property
    def architecture(self) -> Architecture:
        return self.a.architecture

    @property
    def sizes(self) -> dict[str, int]:
        return self.a.architecture.sizes

    def pair(self, module: str, side: str) -> tuple[Tensor, Tensor] | None:
        """Return the samples of one module in both models, (samples, units), if both were recorded."""
        return self._both(*(one.samples(module, side) for one in (self.a, self.b)))

    def on_stream(self, point: str) -> tuple[Tensor, Tensor] | None:
        """Return a point of the stream in both models, (samples, units)."""
        return self._both(*(one.stream(point) for one in (self.a, self.b)))

    @staticmethod
    def _both(a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor] | None:
        return None if a is None or b is None or a.shape != b.shape else comparable(a, b)

    @cached_property
    def folds(self) -> dict[str, NormFold]:
        """For every tensor that reads the stream through a norm before a branch, the norm."""
        tensors = self.architecture.tensors.items()
        found = {name: self.a.fold_of(name.rpartition(".")[0], layout) for name, layout in tensors}
        return {
            name: fold
            for name, fold in found.items()
            if fold is not None and self.b.store.has(fold.norm, OUTPUT)
        }

    # ── pieces of an axis ────────────────────────────────────────────────────────────────────

    @cached_property
    def moving(self) -> frozenset[str]:
        """The axes that may move."""
        return frozenset(space.id for space in self.architecture.moving())

    @cached_property
    def parent_axes(self) -> list[str]:
        """The axes that have children (mostly heads), where either may move."""
        parents = self.architecture.parents
        found: dict[str, None] = {}
        for layout in self.architecture.tensors.values():
            for item in layout.items:
                for first, *rest in _products(item):
                    within = {name for name in rest if parents.get(name) == first}
                    if parents.get(first) is None and (first in self.moving or within & self.moving):
                        found.setdefault(first)
        return list(found)

    def pieces(self, id: str) -> Iterator[AxisPiece]:
        """Yield all activations with an axis: outputs of modules that produce it, inputs of its readers."""
        for name, layout in self.architecture.tensors.items():
            if layout.arrow is None or len(layout.outputs) != 1:
                continue
            for side, dims in ((OUTPUT, layout.outputs), (INPUT, layout.inputs)):
                yield from self._pieces_of_module(name, dims[0], id, side)
        for output, space in self.architecture.outputs.items():
            if space == id and (pair := self.pair(output, OUTPUT)) is not None:
                yield AxisPiece.of((id,), pair[0].T, pair[1].T, INPUT)

    def _pieces_of_module(self, name: str, dim: int, id: str, side: str) -> Iterator[AxisPiece]:
        """Yield the activations of one side of a module. They are dropped before the next ones are read."""
        item, (module, _, leaf) = self.architecture.tensors[name].items[dim], name.rpartition(".")
        if id not in names_in(item):
            return
        if leaf == "weight":
            pair = self.pair(module, side)
        elif side == OUTPUT:
            pair = self._both(*(one.computed(name) for one in (self.a, self.b)))
        else:
            pair = None
        if pair is None or pair[0].shape[1] != self.a.model.info(name).shape[dim]:
            return
        layout = Layout((Name(ANONYMOUS), item))
        cuts = [explode(one, layout, self.sizes) for one in pair]
        for (a, factors), (b, _) in zip(*cuts, strict=True):
            axes = tuple(factor.name for factor in factors[1:])
            if id in axes:
                yield AxisPiece.of(axes, a.movedim(0, -1), b.movedim(0, -1), side)

    # ── weights beside activations ───────────────────────────────────────────────────────────

    def weight_covariance(self, id: str, maps: Mapping[str, Map]) -> Tensor | None:
        """Return the covariance of B's units of a point and A's in the weights that read or write it.

        Only weights whose other axes are mapped already, or never move, count.
        """
        total: Tensor | None = None
        a, b = self.a.model, self.b.model
        for name, layout in self.architecture.tensors.items():
            if layout.arrow is None or name not in b.architecture.tensors:
                continue
            dims = [dim for dim, item in enumerate(layout.items) if item == Name(id)]
            free = (set(layout.names()) - {id}) & self.moving
            if len(dims) != 1 or free - maps.keys() or a.info(name).shape != b.info(name).shape:
                continue
            squares = torch.zeros(2, dtype=torch.float64)
            table: Tensor | None = None
            for of_b, of_a in self._units_in_weights(name, id, dims[0], maps):
                # (units of B, units of A)
                table = of_b @ of_a.T if table is None else table.addmm_(of_b, of_a.T)
                sizes = [torch.linalg.vector_norm(one).double() ** 2 for one in (of_b, of_a)]
                squares += torch.stack(sizes).cpu()
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
        layout, models = self.architecture.tensors[name], (self.b.model, self.a.model)
        if dim == 1 and len(layout.items) == 2 and not set(layout.names()) & maps.keys() - {id}:
            for rows in row_blocks(self.a.model.info(name).shape, NUMBERS):
                b, a = (self._scaled(model, name, self.sizes[id], rows) for model in models)
                yield b.T, a.T
            return
        b, a = (self._scaled(model, name, self.sizes[id]) for model in models)
        a = move_tensor(a, layout, maps, self.sizes, self.architecture.parents)
        yield b.movedim(dim, 0).flatten(1), a.movedim(dim, 0).flatten(1)

    def _scaled(self, model: Model, name: str, units: int, rows: slice | None = None) -> Tensor:
        """Return a weight, or some of its rows, with the scale of the norm that it reads through, as exact as
        ``units`` ask for.
        """
        read = model.read(name) if rows is None else model.raw(name, rows)
        value = read.to(self.a.device, precision(units))
        if (fold := self.folds.get(name)) is not None:
            shape = [1] * value.ndim
            shape[self.architecture.tensors[name].inputs[0]] = -1
            value = value * (model.read(f"{fold.norm}.weight").to(value) + fold.offset).reshape(shape)
        return value


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


# ── running both models ──────────────────────────────────────────────────────────────────────


@contextmanager
def run_on_probes(
    a: Model, b: Model, options: FunctionalOptions, seed: int = 0, run_config: RunConfig = WHOLE
) -> Iterator[ActivationPair]:
    """Run two models of one shape one after the other; yield their activations, on disk for the block."""
    require_device(run_config.device, torch.float64)
    with TemporaryDirectory() as folder:
        of_a, probes = _recorded(a, options, seed, run_config, Path(folder) / "a", None)
        of_b, _ = _recorded(b, options, seed, run_config, Path(folder) / "b", probes)
        store = replace(of_b.store, shown=of_a.store.shown)  # A says which norms only branches read
        yield ActivationPair(of_a, replace(of_b, store=store), probes.about)


def _recorded(
    model: Model,
    options: FunctionalOptions,
    seed: int,
    run_config: RunConfig,
    folder: Path,
    probes: Probes | None,
) -> tuple[RecordedModel, Probes]:
    """Run one model; the first one decides on the probes."""
    folder.mkdir()
    with run_config.opened(model) as running:
        if probes is None:
            subject = ProbedModel(model, running.module, running.each)
            count = enough_probes(subject, options.probes, options.samples)
            probes = make_probes(subject, count, seed, options.calibrate)
        batches = split_batches(probes.batches)
        store = record_activations(model, running, batches, folder, options.samples)
    return RecordedModel(model, store, run_config.device), probes


@contextmanager
def run_both(
    a: Model, b: Model, options: FunctionalOptions, seed: int, device: str = "cpu"
) -> Iterator[ActivationPair]:
    """Run two models of different shapes; yield their activations, on disk for the block."""
    require_device(device, torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        subjects = [ProbedModel(model, build(model, torch.float32).to(device)) for model in (a, b)]
        threads = torch.get_num_threads()
        own = None if options.calibrate is None else Path(options.calibrate)
        probes = paired_probes(subjects[0], subjects[1], options.probes, seed, own)
        recorded = []
        for subject, shown, name in zip(subjects, (probes.of_a, probes.of_b), "ab", strict=True):
            running = RunningModel(subject.module, subject.model.family, threads, device)
            (place := Path(folder) / name).mkdir()
            store = record_activations(
                subject.model,
                running,
                shown.batches,
                place,
                options.samples,
                places=shown.places,
                branches=True,
            )
            recorded.append(RecordedModel(subject.model, store, device))
        del subjects, subject, running
        yield ActivationPair(recorded[0], recorded[1], probes.about)


def split_batches(batches: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
    """Divide inputs into at least ten batches, so that a fifth of the inputs can be held out."""
    counts = [len(next(iter(batch.values()))) for batch in batches]
    size = max(1, sum(counts) // (2 * HELD_OUT))
    return [
        {name: one[start : start + size] for name, one in batch.items()}
        for batch, count in zip(batches, counts, strict=True)
        for start in range(0, count, size)
    ]


def running_within_memory(a: Model, b: Model, options: FunctionalOptions, resources: Resources) -> Resources:
    """Return the resources with as many threads as fit, where models run layer by layer.

    In memory are the library, the largest layer, and the hidden states of all probes; then, for every thread,
    the matrices of an axis while its map is found.
    """
    if resources.memory is None:
        return resources
    layers, states = [], []
    for model in (a, b):
        module = skeleton(model)
        subject = ProbedModel(model, module)
        tokens = enough_probes(subject, options.probes, options.samples) * tokens_of_a_probe(subject)
        width = max((space.size for space in model.architecture.spaces.values() if space.stream), default=0)
        layers.append(streamed_bytes(model, module))
        states.append(KEPT_STATES * torch.float32.itemsize * tokens * width)
    units = max((space.size for space in a.architecture.moving()), default=0)
    fixed = LIBRARY + max(layers) + max(states)
    return resources.within_memory(MATRICES * units**2, "running a model layer by layer", fixed)
