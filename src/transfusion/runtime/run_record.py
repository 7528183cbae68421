"""The record of a run: verb, release, command, time, memory and machine, stored beside every result."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from os.path import abspath
from pathlib import Path
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


# ── Texts that are made to be shared, without absolute paths of this machine ────────────────────────


_PATH = re.compile(r"""(?<![^\s"'=(\[,])(?:'/[^'\n]+'|"/[^"\n]+"|/[^\s'",;:()\[\]]+)""")


def shareable_path(path: str, root: Path | None = None) -> str:
    """Return an absolute path relative to ``root``, or its last part if it lies elsewhere.

    Every other name is returned as it is.

    >>> shareable_path("/home/me/work/models/b", Path("/home/me/work"))
    'models/b'
    >>> shareable_path("/data/models/b", Path("/home/me/work")), shareable_path("org/b")
    ('b', 'org/b')
    """
    if not path.startswith("/"):
        return path
    place = Path(abspath(path))
    if root is not None:
        for start, prefix in ((Path(abspath(root)), ""), (Path(abspath(root)).parent, "../")):
            if start != Path("/") and place.is_relative_to(start):
                return f"{prefix}{place.relative_to(start)}"
    return place.name or path


def shareable_text(text: str, root: Path | None = None, known: Iterable[Path] = ()) -> str:
    """Return a text with `shareable_path` in place of every absolute path.

    ``known`` are paths that are recognised even if they contain spaces and are not quoted.

    >>> shareable_text("transfusion report /home/me/moved -o '/home/my page.html'")
    "transfusion report moved -o 'my page.html'"
    """
    if "/" not in text:
        return text
    for path in sorted({abspath(one) for one in known}, key=len, reverse=True):
        if path in text:
            text = re.sub(rf"{re.escape(path)}(?![^\s/'\",;:()])", shareable_path(path, root), text)

    def shortened(found: re.Match[str]) -> str:
        quote = found[0][0] if found[0][0] in "'\"" else ""
        return f"{quote}{shareable_path(found[0].strip(quote or None), root)}{quote}"

    return _PATH.sub(shortened, text)


def shareable(value: Any) -> Any:
    """Return plain data with `shareable_path` in place of every absolute path in its texts."""
    if isinstance(value, Mapping):
        return {key: shareable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(one) for one in value]
    return shareable_text(shareable_path(value)) if isinstance(value, str) else value
