"""What goes on inside a live model while it runs: what its modules put out, what enters its branches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from transfusion.layouts import ANONYMOUS, Layout, Name
from transfusion.live.live_model import LiveModel


@contextmanager
def record_outputs(live: LiveModel) -> Iterator[dict[str, tuple[Layout, Tensor]]]:
    """Within the block, what the modules of the table put out, with its layout, in order."""
    record: dict[str, tuple[Layout, Tensor]] = {}

    def keep(name: str, weight: Layout) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                record[name] = (output_layout(weight, output.ndim), output.clone())

        return hook

    handles = [
        module.register_forward_hook(keep(name, live.architecture.tensors[f"{name}.weight"]))
        for name, module in live.modules().items()
        if f"{name}.weight" in live.architecture.tensors
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_streams(live: LiveModel) -> Iterator[dict[str, Tensor]]:
    """Within the block, the residual stream as it enters each branch, by the entry's name."""
    record: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = (*args, *kwargs.values())
            record[name] = next(value for value in values if isinstance(value, Tensor)).clone()

        return hook

    modules = live.modules()
    handles = [
        modules[entry].register_forward_pre_hook(keep(entry), with_kwargs=True)
        for entry in dict.fromkeys(cut.entry for cut in live.architecture.shortcuts)
        if entry in modules
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def output_layout(weight: Layout, ndim: int) -> Layout:
    """The layout of what a module puts out: its weight's output axis, last or, if it convolves, second."""
    axis = weight.items[weight.outputs[0]] if weight.arrow else weight.items[0]
    place = 1 if len(weight.inputs) > 1 else ndim - 1
    return Layout(tuple(axis if dim == place else Name(ANONYMOUS) for dim in range(ndim)))
