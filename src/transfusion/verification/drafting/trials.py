"""Trials on a random copy of a module: permute dimensions of its parameters, run it, compare its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from transfusion.architecture.table import Family, Table
from transfusion.errors import ArchitectureError, listing
from transfusion.running.probes.inputs import run_model
from transfusion.verification.certify import randomise
from transfusion.verification.drafting.split_attention import (
    SplitAttention,
    every_module_called,
    split_attentions,
)

Slot: TypeAlias = tuple[str, int]
"""One dimension of one parameter: the name and the dimension."""
Place: TypeAlias = int | str
"""The number of a call, whose input is meant, or the name of an output of the model."""
CLOSE = 1e-9
"""The relative tolerance for equal activations."""
MODEST = 32
"""The largest width for parameters as `randomise` draws them; wider ones are scaled down."""


class Kind(StrEnum):
    """What a part does to its input."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    CONVOLUTION = "convolution"
    ELEMENTWISE = "elementwise"
    BARE = "bare"
    """A parameter with an unknown use inside its module."""


@dataclass(frozen=True)
class Part:
    """A module that owns parameters, or a single bare parameter of a module."""

    module: str
    kind: Kind
    inputs: tuple[Slot, ...] = ()
    """The dimensions that its input runs along."""
    outputs: tuple[Slot, ...] = ()
    """The dimensions that its output runs along; for a norm, those of its input."""
    rows: tuple[Slot, ...] = ()
    """The ids of an embedding, the window of a convolution, or all dimensions of a bare parameter."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inputs, *self.outputs, *self.rows)


@dataclass(frozen=True)
class Call:
    """One call of a module: its first tensor argument, and its output."""

    module: str
    input: Tensor
    output: Tensor


@dataclass
class Trace:
    """The record of one run: the calls of parts in order, and the outputs of the model."""

    calls: list[Call] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def at(self, place: Place) -> Tensor:
        """Return the input of a call, or an output of the model."""
        return self.outputs[place] if isinstance(place, str) else self.calls[place].input


class _EndOfRun(Exception):  # noqa: N818 - control flow, not an error
    pass


class Trials:
    """A float64 copy of a module with random parameters, and a reference run of it."""

    def __init__(self, module: nn.Module, library: str, inputs: Mapping[str, Tensor], seed: int = 1) -> None:
        self.module = split_attentions(drawn(module, seed))
        self.family = empty_family(library)
        self.inputs = inputs
        self.generator = torch.Generator().manual_seed(seed)
        self.modules = dict(self.module.named_modules())
        self.parameters = dict(self.module.named_parameters())
        first = {parameter: name for name, parameter in self.parameters.items()}
        self.names = {
            name: first[parameter] for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        """For every name of a parameter its first name; tied tensors have several."""
        owners = [name for name, one in self.modules.items() if any(True for _ in one.parameters(False))]
        self.watched = set(owners)
        self.began: dict[str, int] = {}
        """For every module that was called, the number of calls of parts before it."""
        self.ended: dict[str, int] = {}
        """The same, for its end."""
        try:
            calls = self.run().calls
        except Exception as error:
            raise ArchitectureError(
                f"the model does not run on {listing(inputs)} ({type(error).__name__}: {error})",
                hint="give the inputs of its forward, by name; a file of your own does so with make_inputs",
            ) from error
        first_call = {call.module: call for call in reversed(calls)}
        ordered = dict.fromkeys([*(call.module for call in calls), *owners])
        self.parts = tuple(part for name in ordered for part in self._parts(name, first_call.get(name)))
        self.part = {part.module: part for part in self.parts if part.kind is not Kind.BARE}
        self.watched = set(self.part)
        self.began.clear()
        self.original = self.run()

    def split(self) -> dict[str, SplitAttention]:
        """Return the modules that stand for an ``nn.MultiheadAttention``, by name."""
        return {name: one for name, one in self.modules.items() if isinstance(one, SplitAttention)}

    def in_memory(self, name: str) -> str:
        """Return a module's name in the model: that of the fused attention for the parts of one."""
        above = name.rpartition(".")[0]
        return above if isinstance(self.modules.get(above), SplitAttention) else name

    # ── parts ────────────────────────────────────────────────────────────────────────────────

    def _parts(self, name: str, call: Call | None) -> Iterator[Part]:
        """Yield the part of a module, or of each of its parameters if it is no known function."""
        owned = {
            own: (self.names[f"{name}.{own}".removeprefix(".")], parameter.data)
            for own, parameter in self.modules[name].named_parameters(recurse=False)
        }
        if call is not None and (part := _known_part(name, self.modules[name], owned, call)):
            yield part
            return
        for tensor, value in owned.values():
            yield Part(name, Kind.BARE, rows=tuple((tensor, dim) for dim in range(value.ndim)))

    # ── running ──────────────────────────────────────────────────────────────────────────────

    def run(
        self,
        moves: Mapping[Slot, Tensor] | None = None,
        *,
        until: Place | None = None,
        changed: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> Trace:
        """Run the model and record the calls of its parts.

        Args:
            moves: Dimensions to permute.
            until: The number of the last call to record; the run ends there.
            changed: Functions of the outputs of modules.
        """
        trace, changed = Trace(), changed or {}
        handles = [] if self.began else self._note_times(trace)

        def watch(name: str) -> Callable[..., Any]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
                given = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
                main = output[0] if isinstance(output, tuple) else output
                if name in self.watched and given is not None and isinstance(main, Tensor):
                    trace.calls.append(Call(name, given, main.clone()))  # it may be changed in place
                    if isinstance(until, int) and len(trace.calls) > until:
                        raise _EndOfRun
                if name not in changed:
                    return None
                main = changed[name](main)
                return (main, *output[1:]) if isinstance(output, tuple) else main

            return hook

        for name in {*self.watched, *changed}:
            handles.append(self.modules[name].register_forward_hook(watch(name), with_kwargs=True))
        try:
            with self._moved(moves or {}), every_module_called():
                trace.outputs = run_model(self.module, self.family, self.inputs)
        except _EndOfRun:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return trace

    def _note_times(self, trace: Trace) -> list[Any]:
        def begin(name: str, *_: object) -> None:
            self.began.setdefault(name, len(trace.calls))

        def end(name: str, *_: object) -> None:
            self.ended[name] = len(trace.calls)

        modules = self.modules.items()
        begins = [module.register_forward_pre_hook(partial(begin, name)) for name, module in modules]
        return begins + [module.register_forward_hook(partial(end, name)) for name, module in modules]

    @contextmanager
    def _moved(self, moves: Mapping[Slot, Tensor]) -> Iterator[None]:
        kept = {name: self.parameters[name].data for name, _ in moves}
        try:
            for (name, dim), index in moves.items():
                self.parameters[name].data = self.parameters[name].data.index_select(dim, index)
            yield
        finally:
            for name, data in kept.items():
                self.parameters[name].data = data

    # ── comparing ────────────────────────────────────────────────────────────────────────────

    def permutation(self, size: int) -> Tensor:
        """Return a random permutation other than the identity."""
        while size > 1:
            index = torch.randperm(size, generator=self.generator)
            if not torch.equal(index, torch.arange(size)):
                return index
        return torch.zeros(1, dtype=torch.long)

    def extent(self, slot: Slot) -> int:
        return self.parameters[slot[0]].shape[slot[1]]

    def first_call(self, part: Part) -> int:
        """Return the number of the first call of a part."""
        return next(number for number, call in enumerate(self.original.calls) if call.module == part.module)

    def is_permuted(self, place: Place, trace: Trace, index: Tensor) -> bool:
        """Whether the activation at a place is the original one with its channels permuted."""
        call = None if isinstance(place, str) else self.part[self.original.calls[place].module]
        dim = 1 if call is not None and call.kind is Kind.CONVOLUTION else -1
        original, now = self.original.at(place), trace.at(place)
        if original.shape != now.shape or original.ndim < abs(dim) or original.shape[dim] != len(index):
            return False
        return original.is_floating_point() and same(original.index_select(dim, index), now)

    def is_same(self, place: Place, trace: Trace) -> bool:
        """Whether the activation at a place is the original one."""
        return same(self.original.at(place), trace.at(place))


def _known_part(
    name: str, module: nn.Module, owned: Mapping[str, tuple[str, Tensor]], call: Call
) -> Part | None:
    """Return the part of a module whose output is a known function of its input, or None."""
    if not owned or any(True for child in module.children() for _ in child.parameters()):
        return None
    tensor, weight = owned.get("weight") or next(iter(owned.values()))
    bias_name, bias = owned.get("bias", ("", None))
    bias_slots = ((bias_name, 0),) if bias is not None else ()
    known = set(owned) <= {"weight", "bias"}
    given, output = call.input, call.output
    if known and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
        window = tuple((tensor, dim) for dim in range(2, weight.ndim))
        return Part(name, Kind.CONVOLUTION, ((tensor, 1),), ((tensor, 0), *bias_slots), window)
    by_id = isinstance(module, nn.Embedding) or not given.is_floating_point()
    if known and by_id and weight.ndim == 2 and output.shape[-1:] == weight.shape[1:]:
        return Part(name, Kind.EMBEDDING, (), ((tensor, 1),), ((tensor, 0),))
    if known and weight.ndim == 2 and given.is_floating_point():
        for read, written in ((1, 0), (0, 1)):
            if _is_linear(weight.transpose(written, 0), bias, given, output):
                return Part(name, Kind.LINEAR, ((tensor, read),), ((tensor, written), *bias_slots))
    if given.shape == output.shape and {one.shape for _, one in owned.values()} == {given.shape[-1:]}:
        slots = tuple((tensor, 0) for tensor, _ in owned.values())
        return Part(name, Kind.ELEMENTWISE, slots, slots)
    return None


def _is_linear(matrix: Tensor, bias: Tensor | None, given: Tensor, output: Tensor) -> bool:
    """Whether the output is the matrix times the input, plus the bias."""
    if given.shape[-1] != matrix.shape[1] or output.shape[-1] != matrix.shape[0]:
        return False
    expected = nn.functional.linear(given, matrix.to(given.dtype), bias)
    return expected.numel() == output.numel() and torch.allclose(expected.reshape(output.shape), output)


def drawn(module: nn.Module, seed: int) -> nn.Module:
    """Return a float64 copy with random parameters; smaller in wide models, to keep rounding small."""
    copy = randomise(deepcopy(module).double().eval(), seed)
    for parameter in copy.parameters():
        if parameter.ndim > 1:
            width = min(parameter.shape[0], parameter.numel() // parameter.shape[0])
            parameter.data *= min(1.0, (MODEST / width) ** 0.5)
    return copy


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two activations are equal up to rounding."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    return bool((first - second).abs().max() <= CLOSE * (1 + first.abs().max()))


def empty_family(library: str, inputs: tuple[str, ...] = ()) -> Family:
    """Return a family with an empty table, for a model without one."""
    return Family("draft", library, lambda config, names: Table(), inputs=inputs)
