"""The worker process of a Ray cluster."""

from __future__ import annotations

import pickle
import socket
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from transfusion import __version__, errors
from transfusion.errors import TransfusionError
from transfusion.runtime.scratch import give_back_at_once

SUBJECTS = 2
"""How many subjects a worker keeps, with their cached gains."""


@dataclass(frozen=True)
class WorkerResult:
    """How a task went. Its value is returned separately, because it may be large."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    failure: tuple[str, str, str | None] | None = None
    """An error for the user: its class, message and hint."""

    def require_success(self, host: str) -> None:
        """Raise the error that the worker raised."""
        if self.failure is not None:
            kind, message, hint = self.failure
            raise getattr(errors, kind)(f"on {host}: {message}", hint=hint)


class RayWorker:
    """A worker with one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        give_back_at_once()
        self._subjects: OrderedDict[int, Any] = OrderedDict()

    def greet(self) -> tuple[str, str]:
        """Return the host name and the installed release."""
        return socket.gethostname(), __version__

    def do(self, number: int, packed: bytes, task: bytes, *parts: Any) -> tuple[WorkerResult, Any]:
        """Run one task on a subject; ``parts`` are results of other workers."""
        try:
            subject = self._subject(number, packed)
            do, item = pickle.loads(task)
            value = do(subject, list(parts) if parts else item)
        except TransfusionError as error:
            return WorkerResult(failure=(type(error).__name__, error.message, error.hint)), None
        return WorkerResult(_spent(subject)), value

    def _subject(self, number: int, packed: bytes) -> Any:
        if number not in self._subjects:
            subject = pickle.loads(packed)
            if hasattr(subject, "require_unchanged"):
                subject.require_unchanged()
            while len(self._subjects) >= SUBJECTS:
                self._subjects.popitem(last=False)
            self._subjects[number] = subject
        self._subjects.move_to_end(number)
        return self._subjects[number]


def _spent(subject: Any) -> dict[str, float]:
    """Return the seconds that a subject's clock has counted since the last call."""
    clock = getattr(subject, "clock", None)
    if clock is None:
        return {}
    seconds = dict(clock.seconds)
    clock.seconds.clear()
    return seconds
