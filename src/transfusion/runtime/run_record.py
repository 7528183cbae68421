"""The record of a run: what every result says of itself, beside its numbers."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from typing import Any

import torch

from transfusion import __version__

RUN = "run"
"""Where a result has its record."""


class RunRecord:
    """Begun before the work, written down after it."""

    def __init__(self, verb: str, command: str | None = None) -> None:
        self.verb = verb
        self.command = command
        self._began = time.perf_counter()

    def head(self) -> dict[str, Any]:
        """The beginning of a result: which verb made it, with which release, by which command."""
        return {"transfusion": __version__, "verb": self.verb, "command": self.command}

    def run(self) -> dict[str, Any]:
        """What differs from run to run: how long it took, how much memory, on which machine."""
        return {
            "seconds": round(time.perf_counter() - self._began, 3),
            "memory": peak_memory(),
            "machine": machine(),
        }

    def of(self, result: dict[str, Any]) -> dict[str, Any]:
        """A result with its record around it."""
        return {**self.head(), **result, RUN: self.run()}


def peak_memory() -> int:
    """The most bytes that this process has had in memory so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine() -> dict[str, Any]:
    """Where it ran."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
