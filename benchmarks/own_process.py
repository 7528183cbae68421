"""Run a command in a process of its own, and tell what it took.

Between the benchmark and the command stands a small process without torch: the system counts the memory of
whoever starts a program as that program's, until it has begun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_WATCH = """
import json, resource, subprocess, sys, time
begun = time.perf_counter()
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
seconds = time.perf_counter() - begun
used = resource.getrusage(resource.RUSAGE_CHILDREN)
peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
taken = [seconds, used.ru_utime + used.ru_stime, peak]
print(json.dumps([*taken, done.returncode, done.stdout, done.stderr]))
"""


class OwnProcess(NamedTuple):
    """What one run took."""

    seconds: float
    processor: float
    """Seconds of all cores: what a busy machine changes least."""
    peak: float
    """The largest resident memory, in bytes."""
    code: int
    output: str
    errors: str

    def require(self) -> OwnProcess:
        """Refuse a run that failed."""
        if self.code:
            raise SystemExit(f"a run failed with {self.code}: {self.errors.strip() or self.output.strip()}")
        return self


def run_alone(command: Sequence[str], environment: Mapping[str, str] | None = None) -> OwnProcess:
    """Run a command, offline, and return what it took."""
    known = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    info = subprocess.check_output([sys.executable, "-c", _WATCH, *command], text=True, env=known)
    return OwnProcess(*json.loads(info))
