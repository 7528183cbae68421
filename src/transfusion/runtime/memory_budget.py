"""The memory budget of one process: what fits into a limit, and the error when too little does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfusion.errors import SettingError
from transfusion.runtime.byte_sizes import at_least, format_bytes

if TYPE_CHECKING:
    import torch

PROGRAM = 320 * 2**20
"""Bytes of the program itself. 271 MB were measured with a tiny model; large matrix products take more."""
LIBRARY = 150 * 2**20
"""Bytes of a library that runs models, and of small activations. 140 MB were measured with transformers."""
WORKER = 400 * 2**20
"""Bytes of a Ray worker itself. 354 MB were measured with a tiny model."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that one process may take: this process, or each worker of Ray."""

    limit: int | None = None
    """Bytes; None for no limit."""
    program: int = PROGRAM
    """Bytes that the process takes before it has read a model."""

    @classmethod
    def for_process(cls, limit: int | None, *, local: bool) -> MemoryBudget:
        """Return the budget of this process (``local``), or of each worker of Ray."""
        return cls(limit, PROGRAM if local else WORKER)

    @property
    def room(self) -> int | None:
        """Bytes beside the program; None for no limit."""
        return None if self.limit is None else self.limit - self.program

    def require(self, needed: int, what: str) -> None:
        """Refuse a limit into which ``needed`` bytes do not fit; ``what`` says what needs them."""
        least = self.program + needed
        if self.limit is not None and self.limit < least:
            raise SettingError(
                f"memory of {format_bytes(self.limit)} is too little: {what} takes {format_bytes(needed)},"
                f" and the program itself {format_bytes(self.program)}",
                hint=f"give at least {at_least(least)}",
            )

    def threads(self, wanted: int, each: int, shared: int = 0) -> int:
        """Return how many threads of ``each`` bytes fit beside ``shared`` bytes: 1 to ``wanted``."""
        if self.room is None or not each:
            return wanted
        return max(1, min(wanted, (self.room - shared) // each))


NO_LIMIT = MemoryBudget()
"""The budget of this process without a limit."""


def memory_line(total: int, threads: int, *, local: bool, bounded: bool) -> str:
    """Return the line of a dry run: whose memory, how much of it in all, and on how many threads."""
    return (
        f"{'this process' if local else 'each worker'}: {'at most' if bounded else 'about'}"
        f" {format_bytes(total)} of memory on {threads} thread{'s' * (threads > 1)}"
    )


def device_memory(device: torch.device) -> int:
    """Return all memory of a device, in bytes."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
