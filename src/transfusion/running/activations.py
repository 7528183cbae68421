"""The recorder of activations: keeps samples of what modules are given and put out, while a model runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from transfusion.architecture.architecture import Architecture, Space
from transfusion.architecture.layouts import ANONYMOUS, Layout, Name, names_in, size_of
from transfusion.architecture.naming import Naming, without_part
from transfusion.errors import AlignmentError
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.live_model import LiveModel, RunningModel
from transfusion.running.probes.calibration import LARGEST
from transfusion.running.probes.pairs import EveryPlace, Places
from transfusion.runtime.progress import phase


def record_activations(
    model: Model,
    running: RunningModel,
    probes: Sequence[Mapping[str, Tensor]],
    folder: Path,
    samples: int,
    *,
    places: Sequence[Places] = (),
    gradients: bool = False,
    branches: bool = False,
) -> ActivationStore:
    """Run a model on all probes and keep samples; of each batch, the same rows are kept in every model.

    ``places`` are those of every batch that another model has too; all, if there are none.
    With ``gradients``, one random cotangent per batch, the same in every model, is sent back from the logits.
    With ``branches``, what branches add to the residual stream is kept, too.
    """
    per_batch = max(1, samples // max(1, len(probes)))
    recorder = _Recorder(model, folder, per_batch, places, gradients, branches)

    def run(number: int) -> None:
        with recorder.batch(number) as batch:
            batch.end(running.outputs(probes[number], gradients=gradients))
        advance(text)

    text = f"batches of probes through {Path(model.label).name}"
    with (
        phase(text, len(probes)) as advance,
        on_module_calls(recorder.modules(running.module), recorder.keep_call),
        recorder.short_logits(running.module),
    ):
        running.each(run, len(probes))
    if not recorder.active:
        raise AlignmentError(
            f"{model.label}: all activations are zero, so that its units cannot be compared with others",
            hint="its weights may be zero: check the checkpoint",
        )
    return recorder.store(len(probes))


class _Recorder:
    """Keeps samples of the activations of every module that owns a tensor of the table."""

    def __init__(
        self,
        model: Model,
        folder: Path,
        per_batch: int,
        places: Sequence[Places] = (),
        gradients: bool = False,
        branches: bool = False,
    ) -> None:
        self.label, self.naming = model.label, Naming(model.family, live=True)
        self.architecture: Architecture = model.architecture
        self.per_batch, self.places = per_batch, places
        self.gradients, self.branches = gradients, branches
        self.fed_by: dict[str, str] = {}
        self.same: dict[str, str] = {}
        self.shown: set[str] = set()
        self.ends: dict[str, int] = {}
        self._folder, self._lock, self._here = folder, threading.Lock(), threading.local()
        self._short: frozenset[str] = frozenset()
        """Projections to the vocabulary that compute the last token alone."""
        self._segments: dict[str, list[Segment]] = {}
        self.active = False
        """Whether any module put out anything but zeros."""

    def store(self, batches: int) -> ActivationStore:
        return ActivationStore(
            self._folder,
            self._segments,
            batches,
            self.fed_by,
            {key: first for key, first in self.same.items() if key not in self._segments},
            frozenset(self.shown),
            self.ends,
        )

    def modules(self, module: nn.Module) -> dict[str, nn.Module]:
        owners = {name.rpartition(".")[0] for name in self.architecture.tensors}
        named = ((self.naming.canonical(name), part) for name, part in module.named_modules())
        return {name: part for name, part in named if without_part(name)[0] in owners}

    @contextmanager
    def batch(self, number: int) -> Iterator[_Batch]:
        """Within the block, the modules that this thread calls are those of one batch."""
        self._here.batch = batch = _Batch(self, number)
        try:
            yield batch
        finally:
            del self._here.batch

    def keep_call(self, name: str, given: list[Tensor], output: Any) -> None:
        batch: _Batch = self._here.batch
        if name not in self._short:
            batch.keep_inputs(name, given)
        batch.keep_output(name, output)

    @contextmanager
    def short_logits(self, module: nn.Module) -> Iterator[None]:
        """Within the block, logits of the vocabulary are computed for the last token alone.

        They may be larger than all activations together, and nobody looks at them, unless for gradients.
        """
        parts = {} if self.gradients else self.modules(module)
        heads = {
            name: part
            for name, part in parts.items()
            if isinstance(part, nn.Linear) and self.of_vocabulary(name)
        }
        self._short = frozenset(heads)
        handles = [head.register_forward_pre_hook(self._shortening(name)) for name, head in heads.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _shortening(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        def keep_and_cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            first = args[0]
            self._here.batch.keep_inputs(name, [first])
            return (first[..., -1:, :], *args[1:]) if first.ndim >= 3 else args

        return keep_and_cut

    def weight(self, name: str) -> Layout | None:
        return self.architecture.tensors.get(f"{without_part(name)[0]}.weight")

    def of_vocabulary(self, name: str) -> bool:
        """Return whether a module puts out one number for every token of the vocabulary."""
        return any(space.axis == VOCABULARY for space in self._put_out(name))

    def is_wanted(self, name: str) -> bool:
        """Return whether anybody looks at the outputs of a module: norms show the stream better than what is
        added to it.
        """
        adds = not self.branches and any(space.stream is not None for space in self._put_out(name))
        return not adds and not self.of_vocabulary(name)

    def _put_out(self, name: str) -> list[Space]:
        """Return the axes that a module with inputs of another axis puts out whole."""
        weight = self.weight(name)
        items = (
            [] if weight is None or weight.arrow is None else [weight.items[dim] for dim in weight.outputs]
        )
        spaces = [self.architecture.spaces.get(item.text) for item in items if isinstance(item, Name)]
        return [space for space in spaces if space is not None]

    def write(self, key: str, number: int, rows: Tensor) -> None:
        values = rows.float().cpu().contiguous().numpy()
        with self._lock:
            with file_of(self._folder, key).open("ab") as file:
                start = file.tell() // values.itemsize
                file.write(values.data.cast("B"))
            self._segments.setdefault(key, []).append(Segment(number, start, *values.shape))


class _Batch:
    """The activations of one batch, on the thread that runs it."""

    def __init__(self, recorder: _Recorder, number: int) -> None:
        self.of, self.number = recorder, number
        self._normed: list[tuple[StorageWeakRef, str, torch.Size]] = []
        """Outputs of norms. A weak reference keeps their place from being taken, and their memory free."""
        self._outputs: list[tuple[str, Tensor]] = []
        """Outputs of modules whose gradients are wanted."""

    def end(self, outputs: Mapping[str, Tensor]) -> None:
        places = [_place(one) for one in outputs.values()]
        self.of.shown |= {norm for where, norm, _ in self._normed if where in places}
        for name, one in outputs.items():
            if _is_activation(one) and self.of.architecture.output_space(name):
                self._keep(f"{name}/{OUTPUT}", one)
        if self.of.gradients:
            self._send_back(outputs)

    def _send_back(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep the gradients of a random weighting of the logits, the same in every model."""
        ends = {
            name: one
            for name, one in sorted(outputs.items())
            if self._is_shared(name) and _is_activation(one) and one.requires_grad
        }
        self.of.ends = {name: one.shape[-1] for name, one in ends.items()}
        if not ends:
            return
        generator = torch.Generator().manual_seed(self.number)
        cotangents = [torch.randn(one.shape, generator=generator).to(one) for one in ends.values()]
        written = [one for _, one in self._outputs]
        found = torch.autograd.grad([*ends.values()], written, cotangents, allow_unused=True)
        for (name, one), gradient in zip(self._outputs, found, strict=True):
            value = torch.zeros_like(one) if gradient is None else gradient
            self._keep(f"{name}/{GRADIENT}", value.movedim(1, -1) if self._convolves(name) else value)

    def keep_inputs(self, name: str, given: list[Tensor]) -> None:
        whole, _ = without_part(name)
        weight, convolves = self.of.weight(name), self._convolves(name)
        inputs = [one for one in given if _is_activation(one)]
        norm = self._norm_of(inputs[0], name) if inputs else None
        if norm is not None:
            self.of.fed_by[whole] = norm[0]
        for number, one in enumerate(inputs[:3] if weight is None else inputs[:1]):
            key = f"{name}/{INPUT}{number or ''}"
            if number == 0 and norm is not None and norm[1] == one.shape and not convolves:
                self.of.same[key] = f"{norm[0]}/{OUTPUT}"
            else:  # of several inputs, the others may be masks
                self._keep(key, one.movedim(1, -1) if convolves else one, bounded=number == 0)

    def keep_output(self, name: str, output: Any) -> None:
        whole, _ = without_part(name)
        weight, convolves = self.of.weight(name), self._convolves(name)
        first = output[0] if weight is not None and isinstance(output, tuple) else output
        if _is_activation(first):
            if self.of.is_wanted(name):
                self._keep(f"{name}/{OUTPUT}", first.movedim(1, -1) if convolves else first)
            if self.of.gradients and first.requires_grad:
                self._outputs.append((name, first))
            if f"{whole}.weight" in self.of.architecture.scales:
                self._normed.append((_place(first), name, first.shape))

    def _norm_of(self, value: Tensor, reader: str) -> tuple[str, torch.Size] | None:
        """Return the last norm whose output a value is, and the shape of that output."""
        place = _place(value)
        found = [(norm, shape) for where, norm, shape in self._normed if where == place and norm != reader]
        return found[-1] if found else None

    def _is_shared(self, name: str) -> bool:
        """Return whether an output is one of logits, which two models may share; embeddings are not shared.

        The only output of a module without names is one of logits, unless it lies on an axis of the table.
        """
        return ("logits" in name or name == "output") and self.of.architecture.output_space(name) == ""

    def _convolves(self, name: str) -> bool:
        weight = self.of.weight(name)
        return weight is not None and len(weight.inputs) > 1

    def _keep(self, key: str, value: Tensor, *, bounded: bool = True) -> None:
        places = self.of.places[self.number] if self.of.places else EveryPlace()
        rows = places.rows(value.detach())
        if rows is None:
            return
        if len(rows) > self.of.per_batch:
            generator = torch.Generator().manual_seed(self.number)
            chosen = torch.randperm(len(rows), generator=generator)[: self.of.per_batch]
            rows = rows[chosen.to(rows.device)]
        if bounded and rows.numel():
            self._require_moderate(key, float(rows.abs().max()))
        self.of.write(key, self.number, rows)

    def _require_moderate(self, key: str, largest: float) -> None:
        """Refuse activations that cannot be compared: too large, infinite, or NaN."""
        if not largest < LARGEST:
            module = key.rpartition("/")[0]
            raise AlignmentError(
                f"{self.of.label}: the activations of {module} reach {largest:.0e}, which is too large to"
                " compare",
                hint="check its weights, and the inputs if they are your own",
            )
        if largest > 0 and key.endswith(OUTPUT):
            self.of.active = True


def _place(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2


# ── Whole activations, in memory: what the modules of a live model are given and … ──────────────────


@contextmanager
def on_module_calls(
    modules: Mapping[str, nn.Module], on_call: Callable[[str, list[Tensor], Any], None]
) -> Iterator[None]:
    """Within the block, call ``on_call(name, tensors given, output)`` after each call of a module."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            on_call(name, [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)], output)

        return hook

    handles = [
        module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class ModuleRecord:
    """Activations of one run; of a module that was called several times, those of the last call."""

    outputs: dict[str, tuple[Layout, Tensor]] = field(default_factory=dict)
    """The output of every module with a weight, with its layout, in the order of the calls."""
    streams: dict[str, Tensor] = field(default_factory=dict)
    """The residual stream at the entry of every branch, by the entry's name."""


@contextmanager
def record_outputs(live: LiveModel) -> Iterator[ModuleRecord]:
    """Within the block, record what the modules of the table put out, and the residual stream."""
    record, tensors = ModuleRecord(), live.architecture.tensors
    entries = {cut.entry for cut in live.architecture.shortcuts}

    def keep(name: str, given: list[Tensor], output: Any) -> None:
        if name in entries:
            record.streams[name] = given[0].clone()
        weight = tensors.get(f"{name}.weight")
        if weight is not None and isinstance(output, Tensor):
            record.outputs[name] = (output_layout(weight, output.shape, live.architecture), output.clone())

    modules = {
        name: module
        for name, module in live.modules().items()
        if name in entries or f"{name}.weight" in tensors
    }
    with on_module_calls(modules, keep):
        yield record


def output_layout(weight: Layout, shape: Sequence[int], architecture: Architecture) -> Layout:
    """Return the layout of a module's output: its weight's output axis, last, or second among channels.

    Channels are second behind a convolution, also one of each channel alone, and behind a norm of channels.
    """
    axis = weight.items[weight.outputs[0]] if weight.arrow else weight.items[0]
    last = len(shape) - 1
    of_channels = (
        weight.arrow is None
        and last > 1
        and ANONYMOUS not in names_in(axis)
        and shape[last] != size_of(axis, architecture.sizes)
    )
    place = 1 if len(weight.inputs) > 1 or of_channels else last
    return Layout(tuple(axis if dim == place else Name(ANONYMOUS) for dim in range(len(shape))))


# ── Samples of activations, on disk: what the modules of a model are given and pu… ──────────────────


INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"
HELD_OUT = 5
"""One batch in this number is held out: the last ones."""
EXACT = 512
"""Axes of at most so many units are compared and solved in float64, others in float32."""


def precision(units: int) -> torch.dtype:
    """Return the type in which an axis of so many units is compared.

    The axis decides, not the tensor that it was cut from: a fused projection is wider than its parts.
    """
    return torch.float64 if units <= EXACT else torch.float32


def comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples of an axis of A and of B, (samples, units), in one type: that of the larger axis."""
    exact = precision(max(a.shape[1], b.shape[1]))
    return a.to(exact), b.to(exact)


class Segment(NamedTuple):
    """Some samples in a file."""

    batch: int
    start: int
    """In numbers, from the beginning of the file."""
    rows: int
    units: int


@dataclass(frozen=True)
class ActivationStore:
    """Samples of activations on disk, by module and side, and which norm fed which module."""

    folder: Path
    segments: Mapping[str, Sequence[Segment]]
    """By key; every key has a file of its own."""
    batches: int
    fed_by: Mapping[str, str] = field(default_factory=dict)
    """For every module whose input is the output of a norm, the norm."""
    same: Mapping[str, str] = field(default_factory=dict)
    """For inputs that are outputs of a norm, the key of those outputs: they are kept once."""
    shown: frozenset[str] = frozenset()
    """The norms whose outputs are outputs of the model."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """The outputs that gradients were sent back from, and their sizes; empty without gradients."""
    held_out: bool = False
    """Whether `samples` returns the held-out samples."""

    @property
    def others(self) -> ActivationStore:
        """The same store with the held-out samples."""
        return replace(self, held_out=True)

    def has(self, module: str, side: str) -> bool:
        """Return whether this side of a module was recorded."""
        return self._stored(f"{module}/{side}") is not None

    def samples(self, module: str, side: str) -> Tensor | None:
        """Return the inputs or outputs of a module, or the gradients of its outputs: (samples, units), in
        float32 as they were recorded.

        Of a module that the library has in parts: the outputs of all parts, and the input of the first.
        """
        names = (f"{module}/{side}", f"{module}[0]/{side}")
        keys = [key for name in names if (key := self._stored(name)) is not None][:1]
        while side in (OUTPUT, GRADIENT) and keys:
            key = self._stored(f"{module}[{len(keys)}]/{side}")
            if key is None:
                break
            keys.append(key)
        if not keys:
            return None
        parts = [self._read(key) for key in keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _stored(self, key: str) -> str | None:
        key = self.same.get(key, key)
        return key if key in self.segments else None

    def _read(self, key: str) -> Tensor:
        file, chosen = file_of(self.folder, key), self._selected
        found = sorted(one for one in self.segments[key] if one.batch in chosen)
        values, row = np.empty((sum(one.rows for one in found), found[0].units), np.float32), 0
        with file.open("rb") as opened:
            for one in found:
                opened.seek(values.itemsize * one.start)
                wanted = values[row : row + one.rows]
                if opened.readinto(wanted.data.cast("B")) != wanted.nbytes:
                    raise OSError(f"{file}: the file ends too early")
                row += one.rows
        return torch.from_numpy(values)

    @property
    def _selected(self) -> range:
        """The batches to learn from, or the held-out ones; all, where there are too few to divide."""
        split = self.batches - self.batches // HELD_OUT
        return range(split % self.batches, self.batches) if self.held_out else range(split)


def file_of(folder: Path, key: str) -> Path:
    """Return the file of a key; module names contain no slashes, and may be long."""
    return folder / f"{key.replace('/', '-')}.f32"
