"""Models measured on a task and on a support, one beside the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from transfusion.dataset import Dataset
from transfusion.errors import SettingError
from transfusion.evaluation.data import Data
from transfusion.evaluation.meters import Meter
from transfusion.evaluation.scores import Score, gain
from transfusion.examples import Examples
from transfusion.model import Model, Reference

Given = str | Path | Dataset | Examples | Data


@dataclass(frozen=True)
class Row:
    """One model, and how good it is."""

    model: str
    task: Score
    support: Score | None


@dataclass(frozen=True)
class Evaluation:
    """What was measured of some models."""

    rows: tuple[Row, ...]
    task: dict[str, Any]
    support: dict[str, Any] | None
    reference: Row | None
    """The model that gains are relative to."""
    notes: tuple[str, ...] = ()

    def gains(self, row: Row) -> dict[str, float | None] | None:
        """How much better than the reference a model is; nothing without a reference."""
        base = self.reference
        if base is None:
            return None
        both = row.support is not None and base.support is not None
        return {
            "task": gain(row.task, base.task),
            "support": gain(row.support, base.support) if both else None,  # type: ignore[arg-type]
        }

    def story(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
        return {
            "task": self.task,
            "support": self.support,
            "against": self.reference.model if self.reference else None,
            "models": [
                {
                    "model": row.model,
                    "task": row.task.story(),
                    "support": row.support.story() if row.support else None,
                    "gain": self.gains(row),
                }
                for row in self.rows
            ],
        }


def evaluate(
    models: Model | Reference | Sequence[Model | Reference],
    *,
    data: Given,
    support: Given | None = None,
    against: Model | Reference | None = None,
    batch: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    on_examples: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Evaluation:
    """How good models are at a task and at a support; gains are relative to ``against``.

    ``on_examples`` is told what is measured, and how many examples of how many are done.

    >>> found = transfusion.evaluate(["models/tuned"], data="data.safetensors", against="models/a")
    >>> [row.model for row in found.rows], found.task["question"]
    (['models/a', 'models/tuned'], 'class of every example')
    >>> found.rows[1].task.accuracy - found.rows[0].task.accuracy == found.gains(found.rows[1])["task"] / 100
    True
    """
    if dtype not in (torch.float32, torch.float64):
        raise SettingError(f"dtype = {dtype}: too coarse here", hint="choose float32 or float64")
    given = list(models) if isinstance(models, list | tuple) else [models]
    if not given:
        raise SettingError("no models to measure", hint="give at least one")
    opened = [one if isinstance(one, Model) else Model.open(one) for one in given]  # type: ignore[arg-type]
    base = None
    if against is not None:
        base = against if isinstance(against, Model) else Model.open(against)
        opened = [base, *(one for one in opened if one.label != base.label)]
    asked = [Data.of(data), *([] if support is None else [Data.of(support)])]
    rows: list[Row] = []
    about: list[dict[str, Any]] = []
    notes: list[str] = []
    for model in opened:
        scores: list[Score] = []
        about = []
        live = asked[0].live(model, dtype, device)
        for one in asked:
            if one.head != asked[0].head:
                live = one.live(model, dtype, device)
            meter = one.meter(model, live, dtype=dtype, batch=batch)
            about.append(meter.story())
            notes += meter.notes
            scores.append(_followed(meter, model.label, on_examples).measure())
        rows.append(Row(model.label, scores[0], scores[1] if len(scores) > 1 else None))
    return Evaluation(
        tuple(rows),
        about[0],
        about[1] if len(about) > 1 else None,
        rows[0] if base is not None else None,
        tuple(dict.fromkeys(notes)),
    )


def _followed(meter: Meter, label: str, tell: Callable[[str, int, int], None]) -> Meter:
    what = f"{label} · {meter.feed.label}"
    return meter.following(lambda done: tell(what, done, len(meter)))
