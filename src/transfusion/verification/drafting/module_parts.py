"""Parts: the modules that own parameters, and the dimensions that their inputs and outputs run along.

The kind of a module follows from its inputs and outputs in a run, not from the name of its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import torch
from torch import Tensor, nn

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
