"""Trials: a fine-tune is moved in several ways, and each way is measured beside an expectation.

The share of the gap is 0 where B stays as it is, and 1 where it is as good as the ceiling: B fine-tuned with
the data, or the fine-tune itself where others made it and its data are gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import transfusion
from transfusion.errors import TransfusionError
from zoo.packages import ZOO

Score = Callable[[nn.Module], float]
WAYS: dict[str, dict[str, Any]] = {
    "unchanged": {"method": "naive"},
    "default": {"method": "guarded"},
    "functional": {"method": "functional"},
    "refined": {"refine": True},
}
"""The ways to move a fine-tune that the table shows, and what they are called in Python."""


BETWEEN_SHAPES = {name: WAYS[name] for name in ("functional", "refined")}


class Skipped(Exception):  # noqa: N818
    """A trial cannot run on this machine: says what it lacks."""


@dataclass(frozen=True)
class Way:
    """What one way brought."""

    share: float | None
    """Of the gap; None if the tool refused."""
    support: float | None
    """The change of what B could do before, in points; None where nothing is known of it."""
    seconds: float
    """Processor time."""
    said: str = ""
    """The refusal."""


@dataclass(frozen=True)
class Trial:
    """One row of the zoo's table."""

    name: str
    a: str
    b: str
    finetune: str
    """What was fine-tuned, and by whom."""
    relation: str
    """How A and B are related: the same lineage, apart, other shapes, other families."""
    measured: str
    """What the score is, and on what."""
    expects: Mapping[str, float]
    """For some ways, the least share that is expected of them."""
    run: Callable[[], Mapping[str, Way]]


@dataclass
class Measure:
    """Moves a fine-tune in several ways and measures each."""

    finetuned: Any
    base: Any
    onto: Any
    score: Score
    """How good a module is at the task."""
    ceiling: float
    """The score of B fine-tuned with data, or of the fine-tune itself."""
    support: Score | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of every transport."""
    ways: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: WAYS)
    module_of: Callable[[Any], nn.Module] = lambda output: output.module()
    """Makes a module of a moved fine-tune."""

    def of_b(self) -> nn.Module:
        """Return B as the module that is scored: with the fine-tune's head, if it has one, and α = 0."""
        method = "naive" if "unchanged" in self.ways else "functional"  # between shapes
        settings = {**self.options, "method": method, "alpha": 0.0, "force_unrelated": True}
        moved = transfusion.transport(self.finetuned, base=self.base, onto=self.onto, **settings)
        return self.module_of(moved).eval()

    def all(self) -> dict[str, Way]:
        """Measure every way."""
        b = self.of_b()
        zero, kept = self.score(b), None if self.support is None else self.support(b)
        found = {}
        for name, settings in self.ways.items():
            found[name] = self._one(zero, kept, {**self.options, **settings})
            print(f"  {name}: {found[name]}", flush=True)
        return found

    def _one(self, zero: float, kept: float | None, settings: Mapping[str, Any]) -> Way:
        began = time.process_time()
        try:
            moved = transfusion.transport(self.finetuned, base=self.base, onto=self.onto, **settings)
            module = self.module_of(moved).eval()
        except TransfusionError as error:
            return Way(None, None, time.process_time() - began, error.message)
        seconds = time.process_time() - began
        share = (self.score(module) - zero) / (self.ceiling - zero)
        change = None if self.support is None or kept is None else 100 * (self.support(module) - kept)
        return Way(share, change, seconds)


def trained(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of something that was trained here, once."""
    place = ZOO / "trained" / name
    if not place.exists():
        staged = place.with_name(f".{name}")
        staged.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        make(staged)
        staged.rename(place)
    return place
