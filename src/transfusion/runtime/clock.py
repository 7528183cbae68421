"""Where the time of a run goes, by phase."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """Seconds by phase, over all threads. The time of a nested phase is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._open = threading.local()

    def __reduce__(self) -> tuple[type[Clock], tuple[()]]:
        """Start at zero in another process, whose seconds come back by `add`."""
        return Clock, ()

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds that another process counted."""
        with self._lock:
            for name, more in seconds.items():
                self.seconds[name] += more

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the ``with`` block."""
        within: list[float] | None = getattr(self._open, "inner", None)
        self._open.inner = inner = [0.0]
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self._open.inner = within
            if within is not None:
                within[0] += took
            with self._lock:
                self.seconds[name] += took - inner[0]

    def summary(self) -> str:
        """Say where the time went; nothing if no phase was counted."""
        total = sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts if total)
        return f"{total:.1f} s of computing over all threads: {shares}" if total else ""
