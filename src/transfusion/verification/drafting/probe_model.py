"""Probe models: random copies of a module, run with some parameters permuted and all calls recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from transfusion.architecture.table import Family, Table
from transfusion.errors import ArchitectureError, listing
from transfusion.running.probes.random_inputs import run_model
from transfusion.verification.certify import randomise
from transfusion.verification.drafting.module_parts import ModuleCall, ModulePart, Slot, find_parts

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
