"""The processes of one run: `accelerate launch` starts several, and each trains on its part of a step.

Without it there is one process, and nothing here needs the library.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from transfusion.runtime.optional_libraries import require_library

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """All processes of a run, and which of them this one is."""

    count: int = 1
    index: int = 0
    accelerator: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes the output and speaks to the user."""
        return self.index == 0

    def device(self, asked: str) -> str:
        """Return the device of this process: the one asked for, or its own of several."""
        if self.accelerator is None or ":" in asked or asked == "cpu":
            return asked
        return str(self.accelerator.device)

    def share_of(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's part."""
        return items[self.index :: self.count]

    def passes(self, items: Sequence[T], size: int) -> Iterator[tuple[Sequence[T], bool]]:
        """Yield this process's part, so many at a time, and whether it counts.

        All processes make the same number of passes: a module may be divided among them.
        """
        share = self.share_of(items)
        for start in range(0, -(-len(items) // self.count), size):
            some = share[start : start + size]
            yield some or items[:1], len(some) > 0

    def agreed(self, value: T) -> T:
        """Return the main process's value, which can be pickled."""
        if self.count == 1:
            return value
        accelerate: Any = require_library("accelerate", "refine")
        return accelerate.utils.broadcast_object_list([value])[0]  # type: ignore[no-any-return]

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all processes."""
        if self.count == 1:
            return list(numbers)
        given = torch.tensor(list(numbers), dtype=torch.float64, device=self.accelerator.device)
        return [float(one) for one in self.accelerator.reduce(given, reduction="sum")]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all processes; those of divided parameters are sums already."""
        if self.count > 1:
            for one in parameters:
                if not is_part(one):
                    one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                    one.grad = self.accelerator.reduce(one.grad, reduction="sum")

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            self.accelerator.wait_for_everyone()


def is_part(tensor: Tensor) -> bool:
    """Whether this process holds a part of a tensor, and others the rest."""
    return hasattr(tensor, "full_tensor")


@cache
def processes() -> Processes:
    """Return the processes of this run."""
    count = int(os.environ.get("WORLD_SIZE", "1") or 1)
    if count == 1:
        return Processes()
    accelerate: Any = require_library("accelerate", "refine")
    patience = accelerate.InitProcessGroupKwargs(timeout=timedelta(days=7))  # while one aligns, or asks
    made = accelerate.Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patience])
    atexit.register(made.end_training)
    return Processes(made.num_processes, made.process_index, made)


def is_low_precision(device: str, stored: torch.dtype) -> bool:
    """Whether products are computed in bfloat16: the weights have two bytes, or the device is fast at it."""
    return stored.itemsize == 2 or torch.device(device).type not in ("cpu", "mps")


def low_precision(device: str, stored: torch.dtype) -> AbstractContextManager[Any]:
    """Within the block, compute products in bfloat16 if that is due. What is trained stays in float32."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16) if is_low_precision(device, stored) else nullcontext()
