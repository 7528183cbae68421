"""The recorder of activations: what the modules of a live model are given and put out, and gradients.

`on_module_calls` registers the hooks. `record_outputs` keeps whole activations in memory, for `verify` and
optimal transport. `record_activations` keeps samples on disk, for `functional`: the two models are then never
in memory together, and samples (not sums of products) can be paired again after heads have been matched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from transfusion.architecture.naming import Naming, without_part
from transfusion.checkpoint.publishing import write_tensors
from transfusion.data.probes.places import EveryPlace, Places
from transfusion.data.probes.random_inputs import run_model
from transfusion.layouts import ANONYMOUS, Layout, Name
from transfusion.live.live_model import LiveModel
from transfusion.model.model import Model

INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"
HELD_OUT = 5
"""One batch in this number is held out: the last ones."""


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


# ── whole activations, in memory ─────────────────────────────────────────────────────────────


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
            record.outputs[name] = (output_layout(weight, output.ndim), output.clone())

    modules = {
        name: module
        for name, module in live.modules().items()
        if name in entries or f"{name}.weight" in tensors
    }
    with on_module_calls(modules, keep):
        yield record


def output_layout(weight: Layout, ndim: int) -> Layout:
    """Return the layout of a module's output: its weight's output axis, last or, if it convolves, second."""
    axis = weight.items[weight.outputs[0]] if weight.arrow else weight.items[0]
    place = 1 if len(weight.inputs) > 1 else ndim - 1
    return Layout(tuple(axis if dim == place else Name(ANONYMOUS) for dim in range(ndim)))


# ── samples, on disk ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ActivationStore:
    """Samples of activations on disk, by module and side, and which norm fed which module."""

    files: tuple[Path, ...]
    """One for every batch."""
    keys: frozenset[str] = frozenset()
    fed_by: Mapping[str, str] = field(default_factory=dict)
    """For every module whose input is the output of a norm, the norm."""
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

    def samples(self, module: str, side: str) -> Tensor | None:
        """Return the inputs or outputs of a module, or the gradients of its outputs: (samples, units), in
        float64.

        Of a module that the library has in parts: the outputs of all parts, and the input of the first.
        """
        keys = [key for key in (f"{module}/{side}", f"{module}[0]/{side}") if key in self.keys][:1]
        while side in (OUTPUT, GRADIENT) and keys and (key := f"{module}[{len(keys)}]/{side}") in self.keys:
            keys.append(key)
        if not keys:
            return None
        batches = [torch.cat([_read(file, key) for key in keys], dim=1) for file in self._selected]
        return torch.cat(batches).double()

    @property
    def _selected(self) -> tuple[Path, ...]:
        """The batches to learn from, or the held-out ones; all, where there are too few to divide."""
        split = len(self.files) - len(self.files) // HELD_OUT
        return (self.files[split:] or self.files) if self.held_out else self.files[:split]


def _read(file: Path, key: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(key)
    return tensor


def record_activations(
    model: Model,
    module: nn.Module,
    probes: Sequence[Mapping[str, Tensor]],
    folder: Path,
    samples: int,
    *,
    places: Sequence[Places] = (),
    gradients: bool = False,
) -> ActivationStore:
    """Run a model on all probes and keep samples; of each batch, the same rows are kept in every model.

    ``places`` are those of every batch that another model has too; all, if there are none.
    With ``gradients``, one random cotangent per batch, the same in every model, is sent back from the logits.
    """
    sampler = _Sampler(model, samples // max(1, len(probes)), places, gradients)
    files: list[Path] = []
    with on_module_calls(sampler.modules(module), sampler.keep_call):
        for number, inputs in enumerate(probes):
            sampler.begin(number)
            sampler.end(run_model(module, model.family, inputs, double=False, gradients=gradients))
            files.append(folder / f"{number}.safetensors")
            write_tensors(files[-1], {key: torch.cat(parts) for key, parts in sampler.kept.items()})
    return ActivationStore(
        tuple(files), frozenset(sampler.kept), sampler.fed_by, frozenset(sampler.shown), sampler.ends
    )


class _Sampler:
    """Samples the activations of every module that owns a tensor of the table."""

    def __init__(
        self, model: Model, per_batch: int, places: Sequence[Places] = (), gradients: bool = False
    ) -> None:
        self.naming = Naming(model.family, live=True)
        self.places = places
        self.architecture = model.architecture
        self.per_batch = max(1, per_batch)
        self.kept: dict[str, list[Tensor]] = {}
        """Of this batch."""
        self.fed_by: dict[str, str] = {}
        self.shown: set[str] = set()
        self.ends: dict[str, int] = {}
        self._gradients = gradients
        self._batch = 0
        self._normed: list[tuple[int, str, Tensor]] = []
        """Outputs of norms in this batch: kept, so that no other tensor can get their place in memory."""
        self._written: list[tuple[str, Tensor]] = []
        """Outputs of modules in this batch, whose gradients are wanted."""

    def modules(self, module: nn.Module) -> dict[str, nn.Module]:
        owners = {name.rpartition(".")[0] for name in self.architecture.tensors}
        named = ((self.naming.canonical(name), part) for name, part in module.named_modules())
        return {name: part for name, part in named if without_part(name)[0] in owners}

    def begin(self, number: int) -> None:
        self._batch, self._normed, self._written, self.kept = number, [], [], {}

    def end(self, outputs: Mapping[str, Tensor]) -> None:
        places = {_place(one) for one in outputs.values()}
        self.shown |= {norm for where, norm, _ in self._normed if where in places}
        for name, one in outputs.items():
            if _is_activation(one):
                self._keep(f"{name}/{OUTPUT}", one)
        if self._gradients:
            self._send_back(outputs)
        self._normed, self._written = [], []

    def _send_back(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep the gradients of a random weighting of the logits, the same in every model."""
        ends = {
            name: one
            for name, one in sorted(outputs.items())
            if self._is_shared(name) and _is_activation(one) and one.requires_grad
        }
        self.ends = {name: one.shape[-1] for name, one in ends.items()}
        if not ends:
            return
        generator = torch.Generator().manual_seed(self._batch)
        cotangents = [torch.randn(one.shape, generator=generator).to(one) for one in ends.values()]
        written = [one for _, one in self._written]
        found = torch.autograd.grad([*ends.values()], written, cotangents, allow_unused=True)
        for (name, one), gradient in zip(self._written, found, strict=True):
            value = torch.zeros_like(one) if gradient is None else gradient
            self._keep(f"{name}/{GRADIENT}", value.movedim(1, -1) if self._convolves(name) else value)

    def keep_call(self, name: str, given: list[Tensor], output: Any) -> None:
        whole, _ = without_part(name)
        weight, convolves = self._weight(name), self._convolves(name)
        inputs = [one for one in given if _is_activation(one)]
        for number, one in enumerate(inputs[:3] if weight is None else inputs[:1]):
            self._keep(f"{name}/{INPUT}{number or ''}", one.movedim(1, -1) if convolves else one)
        if inputs:
            for where, norm, _ in self._normed:
                if where == _place(inputs[0]) and norm != name:
                    self.fed_by[whole] = norm
        first = output[0] if weight is not None and isinstance(output, tuple) else output
        if _is_activation(first):
            self._keep(f"{name}/{OUTPUT}", first.movedim(1, -1) if convolves else first)
            if self._gradients and first.requires_grad:
                self._written.append((name, first))
            if f"{whole}.weight" in self.architecture.scales:
                self._normed.append((_place(first), name, first))

    def _is_shared(self, name: str) -> bool:
        """Return whether an output is one of logits, which two models may share; embeddings are not shared.

        The only output of a module without names is one of logits, unless it lies on an axis of the table.
        """
        return ("logits" in name or name == "output") and name not in self.architecture.outputs

    def _weight(self, name: str) -> Layout | None:
        return self.architecture.tensors.get(f"{without_part(name)[0]}.weight")

    def _convolves(self, name: str) -> bool:
        weight = self._weight(name)
        return weight is not None and len(weight.inputs) > 1

    def _keep(self, key: str, value: Tensor) -> None:
        places = self.places[self._batch] if self.places else EveryPlace()
        rows = places.rows(value.detach())
        if rows is None:
            return
        if len(rows) > self.per_batch:
            generator = torch.Generator().manual_seed(self._batch)
            rows = rows[torch.randperm(len(rows), generator=generator)[: self.per_batch]]
        self.kept.setdefault(key, []).append(rows.float().clone())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2
