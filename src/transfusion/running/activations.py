"""Whole activations, in memory: what the modules of a live model are given and put out.

`on_module_calls` registers the hooks. `record_outputs` serves `verify` and optimal transport. The samples of
`functional` are on disk: see `activation_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import ANONYMOUS, Layout, Name, names_in, size_of
from transfusion.running.live_model import LiveModel


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
