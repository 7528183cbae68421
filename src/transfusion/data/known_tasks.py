"""Tasks of GLUE that are known by name: their text columns, class names and metrics."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownTask:
    """One task."""

    name: str
    text: tuple[str, ...]
    classes: tuple[str, ...]
    """In the order of their numbers."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The main metric first."""


TASKS = {
    task.name: task
    for task in (
        KnownTask("sst2", ("sentence",), ("negative", "positive")),
        KnownTask("cola", ("sentence",), ("unacceptable", "acceptable"), ("matthews", "accuracy")),
        KnownTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
        KnownTask("rte", ("sentence1", "sentence2"), ("entailment", "not_entailment")),
    )
}

_PATTERNS = {name: re.compile(rf"(?<![a-z0-9]){name.replace('2', '-?2')}(?![a-z0-9])") for name in TASKS}


def known_task(reference: str, columns: Collection[str]) -> KnownTask | None:
    """Return the task that the last two parts of a path or hub id name, if its columns exist."""
    tail = "/".join(reference.lower().replace("_", "-").replace("\\", "/").rstrip("/").split("/")[-2:])
    found = [TASKS[name] for name, pattern in _PATTERNS.items() if pattern.search(tail)]
    fitting = [task for task in found if all(column in columns for column in task.text)]
    return fitting[0] if len(fitting) == 1 else None
