"""The record of a run: verb, release, command, time, memory and machine, stored beside every result."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from contextvars import ContextVar
from typing import Any

from transfusion import __version__

RUN = "run"
"""The key of a result's record."""
COMMAND: ContextVar[str | None] = ContextVar("COMMAND", default=None)
"""The command that the user typed; None in Python."""


class RunRecord:
    """Start the clock before the work; read the record after it."""

    def __init__(self, verb: str, command: str | None = None) -> None:
        self.verb = verb
        self.command = command or COMMAND.get()
        self._began = time.perf_counter()

    def head(self) -> dict[str, Any]:
        """Return the first keys of a result: release, verb and command."""
        return {"transfusion": __version__, "verb": self.verb, "command": self.command}

    def run(self) -> dict[str, Any]:
        """Return what differs from run to run: seconds, peak memory and machine."""
        return {
            "seconds": round(time.perf_counter() - self._began, 3),
            "memory": peak_memory(),
            "machine": machine(),
        }

    def of(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return a result with its record around it."""
        return {**self.head(), **result, RUN: self.run()}


def peak_memory() -> int:
    """Return the largest number of bytes that this process has had in memory so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine() -> dict[str, Any]:
    """Describe this machine."""
    import torch

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
