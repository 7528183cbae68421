"""Probe models: random copies of a module, run with some parameters permuted and all calls recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from transfusion.architecture.table import Family, Table
from transfusion.errors import ArchitectureError, listing
from transfusion.running.probes.inputs import run_model
from transfusion.verification.certify import randomise

Slot: TypeAlias = tuple[str, int]
"""One dimension of one parameter: the name and the dimension."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its first tensor argument, and its output."""

    module: str
    input: Tensor
    output: Tensor


class PartKind(StrEnum):
    """The operation of a part."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    CONVOLUTION = "convolution"
    ELEMENTWISE = "elementwise"
    BARE = "bare"
    """A parameter with an unknown use inside its module."""


@dataclass(frozen=True)
class ModulePart:
    """A module that owns parameters, or a single bare parameter of a module."""

    module: str
    kind: PartKind
    inputs: tuple[Slot, ...] = ()
    """The dimensions that its input runs along."""
    outputs: tuple[Slot, ...] = ()
    """The dimensions that its output runs along; for a norm, those of its input."""
    rows: tuple[Slot, ...] = ()
    """The dimension of the ids of an embedding, or the window of a convolution."""
    parameter: str = ""
    """The parameter of a bare part."""

    @property
    def is_called(self) -> bool:
        return self.kind is not PartKind.BARE

    @property
    def channel(self) -> int:
        """The dimension of the activations that the axis runs along."""
        return 1 if self.kind is PartKind.CONVOLUTION else -1


def find_parts(
    modules: Mapping[str, nn.Module], names: Mapping[str, str], calls: Sequence[ModuleCall]
) -> tuple[ModulePart, ...]:
    """Return the parts of all modules that own parameters, in the order of execution."""
    first = {call.module: call for call in reversed(calls)}
    order = [call.module for call in calls]
    called = sorted(first, key=order.index)
    never = [name for name in modules if name not in first]
    return tuple(part for name in (*called, *never) for part in _parts(name, modules[name], names, first))


def _parts(
    name: str, module: nn.Module, names: Mapping[str, str], calls: Mapping[str, ModuleCall]
) -> Iterator[ModulePart]:
    prefix = f"{name}." if name else ""
    owned = {own: parameter.data for own, parameter in module.named_parameters(recurse=False)}
    slot = {own: names[prefix + own] for own in owned}
    part = _known_part(name, module, owned, slot, calls[name]) if name in calls else None
    if part is not None:
        yield part
        return
    for own in owned:
        yield ModulePart(name, PartKind.BARE, parameter=slot[own])


def _known_part(
    name: str, module: nn.Module, owned: Mapping[str, Tensor], slot: Mapping[str, str], call: ModuleCall
) -> ModulePart | None:
    """Return the part of a module whose output is a known function of its input, or None."""
    weight, bias = owned.get("weight"), owned.get("bias")
    if weight is None:
        weight = next(iter(owned.values()), None)
    if weight is None or any(True for child in module.children() for _ in child.parameters()):
        return None
    weight_name = slot[next(own for own, tensor in owned.items() if tensor is weight)]
    bias_slots = ((slot["bias"], 0),) if bias is not None else ()
    known = set(owned) <= {"weight", "bias"}
    given, output = call.input, call.output
    if known and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
        window = tuple((weight_name, dim) for dim in range(2, weight.ndim))
        outputs = ((weight_name, 0), *bias_slots)
        return ModulePart(name, PartKind.CONVOLUTION, ((weight_name, 1),), outputs, window)
    by_id = isinstance(module, nn.Embedding) or not given.is_floating_point()
    if known and by_id and weight.ndim == 2 and output.shape[-1:] == weight.shape[1:]:
        return ModulePart(name, PartKind.EMBEDDING, (), ((weight_name, 1),), ((weight_name, 0),))
    if known and weight.ndim == 2 and given.is_floating_point():
        for read, written in ((1, 0), (0, 1)):
            if _is_linear(weight.transpose(written, 0), bias, given, output):
                return ModulePart(
                    name, PartKind.LINEAR, ((weight_name, read),), ((weight_name, written), *bias_slots)
                )
    widths = {tensor.shape for tensor in owned.values()}
    if given.shape == output.shape and widths == {given.shape[-1:]}:
        slots = tuple((slot[own], 0) for own in owned)
        return ModulePart(name, PartKind.ELEMENTWISE, slots, slots)
    return None


def _is_linear(matrix: Tensor, bias: Tensor | None, given: Tensor, output: Tensor) -> bool:
    """Whether the output is the matrix times the input, plus the bias."""
    if given.shape[-1] != matrix.shape[1] or output.shape[-1] != matrix.shape[0]:
        return False
    expected = nn.functional.linear(given, matrix.to(given.dtype), bias)
    return expected.numel() == output.numel() and torch.allclose(expected.reshape(output.shape), output)


Moves: TypeAlias = Mapping[Slot, Tensor]
"""Permutations of some dimensions of parameters."""

CLOSE = 1e-9
"""The relative tolerance for equal activations."""

MODEST = 32
"""The largest width for parameters as `randomise` draws them; wider ones are scaled down."""


@dataclass
class Trace:
    """The record of one run: the calls of parts in order, and the outputs of the model."""

    calls: list[ModuleCall] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)


class _EndOfRun(Exception):  # noqa: N818 - control flow, not an error
    pass


class ProbeModel:
    """A float64 copy of a module with random parameters, and a reference run of it."""

    def __init__(self, module: nn.Module, library: str, inputs: Mapping[str, Tensor], seed: int = 1) -> None:
        self.module = drawn(module, seed)
        self.family = empty_family(library)
        self.inputs = inputs
        self.generator = torch.Generator().manual_seed(seed)
        self.modules = dict(self.module.named_modules())
        self.parameters = dict(self.module.named_parameters())
        self.names = {
            second: next(name for name, one in self.parameters.items() if one is parameter)
            for second, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        """For every name of a parameter its first name; tied tensors have several."""
        owners = [name for name, one in self.modules.items() if any(True for _ in one.parameters(False))]
        self.watched = frozenset(owners)
        self.began: dict[str, int] = {"": 0}
        """For every module that was called, the number of calls of parts before it."""
        try:
            first = self.run()
        except Exception as error:
            raise ArchitectureError(
                f"the model does not run on {listing(inputs)} ({type(error).__name__}: {error})",
                hint="give the inputs of its forward, by name",
            ) from error
        self.parts = find_parts(self.modules, self.names, first.calls)
        self.watched = frozenset(part.module for part in self.parts if part.is_called)
        self.began.clear()
        self.original = self.run()

    # ── running ──────────────────────────────────────────────────────────────────────────────

    def run(
        self,
        moves: Moves | None = None,
        *,
        until: int | None = None,
        silenced: frozenset[str] = frozenset(),
        added: Mapping[str, Tensor] | None = None,
    ) -> Trace:
        """Run the model and record the calls of its parts.

        Args:
            moves: Dimensions to permute.
            until: The index of the last call to record; the run ends there.
            silenced: Modules whose outputs become zeros.
            added: Tensors to add to the outputs of modules.
        """
        trace = Trace()
        handles = self._note_beginnings(trace) if not self.began else []
        for name in {*self.watched, *silenced, *(added or {})}:
            hook = self._watch(name, trace, until, name in silenced, (added or {}).get(name))
            handles.append(self.modules[name].register_forward_hook(hook, with_kwargs=True))
        try:
            with self._moved(moves or {}):
                trace.outputs = run_model(self.module, self.family, self.inputs)
        except _EndOfRun:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return trace

    def _note_beginnings(self, trace: Trace) -> list[Any]:
        def begin(name: str) -> Callable[..., None]:
            def note(*_: object) -> None:
                self.began.setdefault(name, len(trace.calls))

            return note

        return [module.register_forward_pre_hook(begin(name)) for name, module in self.modules.items()]

    def _watch(self, name: str, trace: Trace, until: int | None, silent: bool, extra: Tensor | None) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            main = output[0] if isinstance(output, tuple) else output
            if name in self.watched and given is not None and isinstance(main, Tensor):
                trace.calls.append(ModuleCall(name, given, main.clone()))  # it may be changed in place
                if until is not None and len(trace.calls) > until:
                    raise _EndOfRun
            if silent or extra is not None:
                main = torch.zeros_like(main) if silent else main + extra
                return (main, *output[1:]) if isinstance(output, tuple) else main
            return None

        return hook

    @contextmanager
    def _moved(self, moves: Moves) -> Iterator[None]:
        kept = {name: self.parameters[name].data for name, _ in moves}
        try:
            for (name, dim), index in moves.items():
                self.parameters[name].data = self.parameters[name].data.index_select(dim, index)
            yield
        finally:
            for name, data in kept.items():
                self.parameters[name].data = data

    # ── trials ───────────────────────────────────────────────────────────────────────────────

    def permutation(self, size: int) -> Tensor:
        """Return a random permutation other than the identity."""
        while size > 1:
            index = torch.randperm(size, generator=self.generator)
            if not torch.equal(index, torch.arange(size)):
                return index
        return torch.zeros(1, dtype=torch.long)

    def extent(self, slot: Slot) -> int:
        return self.parameters[slot[0]].shape[slot[1]]

    def part(self, module: str) -> ModulePart:
        return next(part for part in self.parts if part.module == module and part.is_called)

    def changes(self, slots: Sequence[Slot]) -> bool:
        """Whether permuting only these dimensions changes any output."""
        index = self.permutation(self.extent(slots[0]))
        outputs = self.run(dict.fromkeys(slots, index)).outputs
        return not all(same(value, outputs[name]) for name, value in self.original.outputs.items())


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


def permuted(original: Tensor, now: Tensor, index: Tensor, dim: int) -> bool:
    """Whether an activation is the original with one dimension permuted."""
    if original.shape != now.shape or original.ndim < abs(dim) or original.shape[dim] != len(index):
        return False
    return original.is_floating_point() and same(original.index_select(dim, index), now)


def empty_family(library: str, inputs: tuple[str, ...] = ()) -> Family:
    """Return a family with an empty table, for a model without one."""
    return Family("draft", library, lambda config, names: Table(()), inputs=inputs)
