"""Activations of modules while a model runs: samples on disk, and whole outputs in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import ANONYMOUS, Layout, Name, names_in, size_of
from transfusion.architecture.naming import Naming, without_part
from transfusion.errors import AlignmentError
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.calibration import LARGEST
from transfusion.running.probes.pairs import Places, every_place
from transfusion.running.streaming import RunningModel
from transfusion.runtime.progress import phase

INPUT, OUTPUT = "input", "output"
READS = {"in_proj_weight": (0, 1, 2), "q_proj_weight": (0,), "k_proj_weight": (1,), "v_proj_weight": (2,)}
"""The weights of nn.MultiheadAttention, and the numbers of the inputs that they read."""
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


def input_side(number: int) -> str:
    """Return the key of a module's input of this number."""
    return f"{INPUT}{number or ''}"


def input_of(tensor: str) -> str:
    """Return the key of the input that a tensor reads."""
    return input_side(READS.get(tensor.rpartition(".")[2], (0,))[0])


@dataclass(frozen=True)
class ActivationStore:
    """Samples of activations on disk, by module and side, and which norm fed which module."""

    folder: Path
    batches: int
    recorded: dict[str, list[int]] = field(default_factory=dict)
    """By key, the batch of every call with samples; each call has a file of its own."""
    widths: dict[str, int] = field(default_factory=dict)
    """By key, the number of units."""
    fed_by: dict[str, str] = field(default_factory=dict)
    """For every module whose input is the output of a norm, the norm."""
    same: dict[str, str] = field(default_factory=dict)
    """For inputs that are outputs of a norm, the key of those outputs: they are kept once."""
    shown: set[str] = field(default_factory=set)
    """The norms whose outputs are outputs of the model."""
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
        """Return the inputs or outputs of a module: (samples, units), in float32 as they were recorded.

        Of a module that the library has in parts: the outputs of all parts, and the input of the first.
        """
        names = (f"{module}/{side}", f"{module}[0]/{side}")
        keys = [key for name in names if (key := self._stored(name)) is not None][:1]
        while side == OUTPUT and keys:
            key = self._stored(f"{module}[{len(keys)}]/{side}")
            if key is None:
                break
            keys.append(key)
        if not keys:
            return None
        parts = [self._read(key) for key in keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _stored(self, key: str) -> str | None:
        key = key if key in self.recorded else self.same.get(key, key)
        return key if key in self.recorded else None

    def _read(self, key: str) -> Tensor:
        """Read the batches to learn from, or the held-out ones; all, where there are too few to divide."""
        split = self.batches - self.batches // HELD_OUT
        chosen = range(split % self.batches, self.batches) if self.held_out else range(split)
        calls = self.recorded[key]
        files = [
            self._file(key, batch, call)
            for batch in sorted({*calls}.intersection(chosen))
            for call in range(calls.count(batch))
        ]
        rows = [np.memmap(file, np.float32, "r") for file in files if file.stat().st_size]
        together = np.concatenate(rows) if rows else np.zeros(0, np.float32)
        return torch.from_numpy(together).reshape(-1, self.widths[key])  # (samples, units)

    def _file(self, key: str, batch: int, call: int) -> Path:
        return self.folder / f"{key.replace('/', '-')}-{batch}-{call}"

    def write(self, key: str, batch: int, rows: Tensor) -> None:
        """Keep the samples of one call of a module, on one batch; only one thread runs a batch."""
        calls = self.recorded.setdefault(key, [])
        with self._file(key, batch, calls.count(batch)).open("wb") as file:
            file.write(rows.float().cpu().contiguous().numpy().data)
        self.widths[key] = rows.shape[-1]
        calls.append(batch)


# ── samples on disk ──────────────────────────────────────────────────────────────────────────


def record_activations(
    model: Model,
    running: RunningModel,
    probes: Sequence[Mapping[str, Tensor]],
    folder: Path,
    samples: int,
    *,
    places: Sequence[Places] = (),
    branches: bool = False,
) -> ActivationStore:
    """Run a model on all probes and keep samples; of each batch, the same rows are kept in every model.

    ``places`` are those of every batch that another model has too; all, if there are none.
    With ``branches``, what branches add to the residual stream is kept, too.
    """
    store = ActivationStore(folder, len(probes))
    recorder = _Recorder(model, store, max(1, samples // max(1, len(probes))), places, branches)
    text = f"batches of probes through {Path(model.label).name}"

    def run(number: int) -> None:
        recorder.begin(number)
        recorder.end(running.outputs(probes[number]))
        advance(text)

    with phase(text, len(probes)) as advance, recorder.hooked(running.module):
        running.each(run, len(probes))
    if not recorder.active:
        raise AlignmentError(
            f"{model.label}: all activations are zero, so that its units cannot be compared with others",
            hint="its weights may be zero: check the checkpoint",
        )
    return store


@dataclass(frozen=True)
class _Recorded:
    """What is recorded of a module that owns a tensor of the table."""

    name: str
    has_weight: bool
    convolves: bool
    is_norm: bool
    projects_to_vocabulary: bool
    """Whether it puts out one number for every token of the vocabulary."""
    adds_to_stream: bool

    @classmethod
    def of(cls, name: str, architecture: Architecture) -> _Recorded:
        weight_name = f"{without_part(name)[0]}.weight"
        weight = architecture.tensors.get(weight_name)
        items = [weight.items[dim] for dim in weight.outputs] if weight and weight.arrow else []
        spaces = [architecture.spaces.get(item.text) for item in items if isinstance(item, Name)]
        return cls(
            name,
            weight is not None,
            weight is not None and len(weight.inputs) > 1,
            weight_name in architecture.scales,
            any(space is not None and space.axis == VOCABULARY for space in spaces),
            any(space is not None and space.stream is not None for space in spaces),
        )


class _Recorder:
    """Keeps samples of the activations of every module that owns a tensor of the table."""

    def __init__(
        self,
        model: Model,
        store: ActivationStore,
        per_batch: int,
        places: Sequence[Places],
        branches: bool,
    ) -> None:
        self.model, self.store, self.per_batch = model, store, per_batch
        self.places, self.branches = places, branches
        self.active = False
        """Whether any module put out anything but zeros."""
        self._here = threading.local()
        """The batch that this thread runs: its number, and the outputs of its norms. A weak reference keeps
        the place of a norm's output from being taken, and its memory free.
        """

    def begin(self, number: int) -> None:
        """Let the modules that this thread calls from now on be those of one batch."""
        self._here.number = number
        self._here.normed = list[tuple[StorageWeakRef, str, torch.Size]]()

    @contextmanager
    def hooked(self, module: nn.Module) -> Iterator[None]:
        """Within the block, record what the modules are given and put out.

        Logits of the vocabulary are computed for the last token alone: they may be larger than all
        activations together, and nobody looks at them.
        """
        naming, architecture = Naming(self.model.family, live=True), self.model.architecture
        owners = {name.rpartition(".")[0] for name in architecture.tensors}
        named = {naming.canonical(name): part for name, part in module.named_modules()}
        modules = {name: part for name, part in named.items() if without_part(name)[0] in owners}
        about = {name: _Recorded.of(name, architecture) for name in modules}
        short = {
            name: part
            for name, part in modules.items()
            if isinstance(part, nn.Linear) and about[name].projects_to_vocabulary
        }

        def keep(name: str, given: list[Tensor], output: Any) -> None:
            if name not in short:
                self._keep_inputs(about[name], given)
            self._keep_output(about[name], output)

        def keep_and_cut(one: _Recorded, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self._keep_inputs(one, [args[0]])
            return (args[0][..., -1:, :], *args[1:]) if args[0].ndim >= 3 else args

        with on_module_calls(modules, keep), ExitStack() as handles:
            for name, part in short.items():
                handle = part.register_forward_pre_hook(partial(keep_and_cut, about[name]))
                handles.callback(handle.remove)
            yield

    def _keep_inputs(self, one: _Recorded, given: list[Tensor]) -> None:
        inputs = [value for value in given if _is_activation(value)]
        norm, shape = self._norm_of(inputs[0], one.name) if inputs else (None, None)
        if norm is not None:
            self.store.fed_by[without_part(one.name)[0]] = norm
        for number, value in enumerate(inputs[:1] if one.has_weight else inputs[:3]):
            key = f"{one.name}/{input_side(number)}"
            if number == 0 and norm is not None and shape == value.shape and not one.convolves:
                self.store.same[key] = f"{norm}/{OUTPUT}"
            else:  # of several inputs, the others may be masks
                self._keep(key, value.movedim(1, -1) if one.convolves else value, bounded=number == 0)

    def _norm_of(self, value: Tensor, reader: str) -> tuple[str | None, torch.Size | None]:
        """Return the last norm whose output a value is, and the shape of that output."""
        place = _place(value)
        for where, norm, shape in reversed(self._here.normed):
            if where == place and norm != reader:
                return norm, shape
        return None, None

    def _keep_output(self, one: _Recorded, output: Any) -> None:
        first = output[0] if one.has_weight and isinstance(output, tuple) else output
        if not _is_activation(first):
            return
        shown = self.branches or not one.adds_to_stream  # norms show the stream better than what is added
        if shown and not one.projects_to_vocabulary:
            self._keep(f"{one.name}/{OUTPUT}", first.movedim(1, -1) if one.convolves else first)
        if one.is_norm:
            self._here.normed.append((_place(first), one.name, first.shape))

    def end(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep the outputs of the model on this batch."""
        places = [_place(value) for value in outputs.values()]
        self.store.shown.update(norm for where, norm, _ in self._here.normed if where in places)
        for name, value in outputs.items():
            if _is_activation(value) and self.model.architecture.output_space(name):
                self._keep(f"{name}/{OUTPUT}", value)

    def _keep(self, key: str, value: Tensor, *, bounded: bool = True) -> None:
        """Keep some rows; refuse activations that cannot be compared: too large, infinite, or NaN."""
        number = self._here.number
        rows = (self.places[number] if self.places else every_place)(value.detach())
        if rows is None or not rows.numel():
            return
        if len(rows) > self.per_batch:
            generator = torch.Generator().manual_seed(number)
            chosen = torch.randperm(len(rows), generator=generator)[: self.per_batch]
            rows = rows[chosen.to(rows.device)]
        largest = float(rows.abs().max()) if bounded else 0.0
        if not largest < LARGEST:
            raise AlignmentError(
                f"{self.model.label}: the activations of {key.rpartition('/')[0]} reach {largest:.0e}, which"
                " is too large to compare",
                hint="check its weights, and the inputs if they are your own",
            )
        if largest > 0 and key.endswith(OUTPUT):
            self.active = True
        self.store.write(key, number, rows)


def _place(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2


# ── whole outputs in memory ──────────────────────────────────────────────────────────────────


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
