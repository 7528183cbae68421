"""How many examples at a time fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from transfusion.evaluation.batches import Batch, Scorer
from transfusion.runtime.memory_budget import device_memory

MOST = 64
SHARE = 0.25
"""So much of the machine's memory may be filled by what modules give out."""


def batch_size_for(module: nn.Module, scorer: Scorer, heaviest: Callable[[], Batch], count: int) -> int:
    """A power of two: what one example fills is counted, module by module, and compared with all memory.

    All memory, not what happens to be free: the same machine chooses the same size every time.
    """
    scorer.ready()  # what it reads beforehand does not depend on how many examples there are
    filled = _filled(module, lambda: scorer.answer(heaviest()))
    room = int(SHARE * device_memory(next(module.parameters()).device)) // max(filled, 1)
    size = 1
    while 2 * size <= min(room, MOST) and size < count:
        size *= 2
    return size


def _filled(module: nn.Module, run: Callable[[], object]) -> int:
    """The bytes of everything that any module gives out in a run."""
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
