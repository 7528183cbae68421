"""The batch size that fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from transfusion.evaluation.batches import Batch, Scorer
from transfusion.runtime.memory_budget import device_memory

MOST = 64
SHARE = 0.25
"""The share of the machine's memory that the outputs of modules may fill."""


def batch_size_for(module: nn.Module, scorer: Scorer, heaviest: Callable[[], Batch], count: int) -> int:
    """Return a power of two, from the bytes of all modules' outputs for one example.

    The bytes are compared with all memory, not with the free part, so that a machine always chooses the same
    size.
    """
    scorer.ready()  # prompts do not depend on the number of examples
    filled = _filled(module, lambda: scorer.answer(heaviest()))
    room = int(SHARE * device_memory(next(module.parameters()).device)) // max(filled, 1)
    size = 1
    while 2 * size <= min(room, MOST) and size < count:
        size *= 2
    return size


def _filled(module: nn.Module, run: Callable[[], object]) -> int:
    """Return the bytes of the outputs of all modules in one run."""
    total = 0

    def count(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal total
        parts = output if isinstance(output, tuple | list) else [output]
        total += sum(part.nbytes for part in parts if isinstance(part, Tensor))

    handles = [one.register_forward_hook(count) for one in module.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return total
