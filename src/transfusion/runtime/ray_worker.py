"""Hands: what a worker of a cluster does in its process."""

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
"""How many subjects a worker remembers, with what it has kept of them."""


@dataclass(frozen=True)
class WorkerResult:
    """How a piece of work went; what came of it is apart, because it may be large."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went."""
    complaint: tuple[str, str, str | None] | None = None
    """What the user has to know: the kind of error, its message and its hint."""

    def require_success(self, host: str) -> None:
        """Raise what was raised there."""
        if self.complaint is not None:
            kind, message, hint = self.complaint
            raise getattr(errors, kind)(f"on {host}: {message}", hint=hint)


class RayWorker:
    """A worker with one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        give_back_at_once()
        self._subjects: OrderedDict[int, Any] = OrderedDict()

    def greet(self) -> tuple[str, str]:
        """Where this is, and what is installed there."""
        return socket.gethostname(), __version__

    def do(self, number: int, packed: bytes, task: bytes, *parts: Any) -> tuple[WorkerResult, Any]:
        """One piece of work on a subject; parts that other workers made come along."""
        try:
            subject = self._subject(number, packed)
            do, item = pickle.loads(task)
            value = do(subject, list(parts) if parts else item)
        except TransfusionError as error:
            return WorkerResult(complaint=(type(error).__name__, error.message, error.hint)), None
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
    """What the clock of a subject has counted since it was last asked."""
    clock = getattr(subject, "clock", None)
    if clock is None:
        return {}
    seconds = dict(clock.seconds)
    clock.seconds.clear()
    return seconds
