"""Tasks that are known by name: where their texts are, what their classes are called, how they are scored."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownTask:
    """One task of GLUE."""

    name: str
    text: tuple[str, ...]
    classes: tuple[str, ...]
    """In the order of their numbers."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The headline first."""


TASKS = {
    task.name: task
    for task in (
        KnownTask("sst2", ("sentence",), ("negative", "positive")),
        KnownTask("cola", ("sentence",), ("unacceptable", "acceptable"), ("matthews", "accuracy")),
        KnownTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
        KnownTask("rte", ("sentence1", "sentence2"), ("entailment", "not_entailment")),
    )
}

_SPELT = {name: re.compile(rf"(?<![a-z0-9]){name.replace('2', '-?2')}(?![a-z0-9])") for name in TASKS}


def known_task(reference: str, columns: Collection[str]) -> KnownTask | None:
    """The task that a path or a hub id names in its last two parts, if its columns are there."""
    said = "/".join(reference.lower().replace("_", "-").replace("\\", "/").rstrip("/").split("/")[-2:])
    found = [TASKS[name] for name, spelt in _SPELT.items() if spelt.search(said)]
    fitting = [task for task in found if all(column in columns for column in task.text)]
    return fitting[0] if len(fitting) == 1 else None
