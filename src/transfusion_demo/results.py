"""What a demo measured, in the words of `evaluate` and `sweep`, so that a report can show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
Score = dict[str, Any]


class DemoScores(NamedTuple):
    """A model on the task, and on what the base could do before."""

    task: Score
    support: Score


class JudgedModel(NamedTuple):
    """What the task and the support are."""

    task: dict[str, Any]
    support: dict[str, Any]


def data(label: str, examples: int, question: str, classes: int | None) -> dict[str, Any]:
    """What was measured on."""
    return {
        "data": label,
        "examples": examples,
        "question": question,
        "metric": "accuracy",
        "classes": classes,
    }


def score(logits: Tensor, labels: Tensor) -> Score:
    """Accuracy and loss of answers."""
    right = float((logits.argmax(-1) == labels).double().mean())
    loss = float(nn.functional.cross_entropy(logits.double(), labels))
    return {"value": right, "loss": loss, "accuracy": right, "metrics": {"accuracy": right}}


def gain(now: DemoScores, before: DemoScores) -> dict[str, float]:
    """Points won or lost."""
    return {
        name: 100 * (one["value"] - other["value"])
        for name, one, other in zip(DemoScores._fields, now, before, strict=True)
    }


class DemoRow(NamedTuple):
    """A model that was measured: what to call it, and where it is."""

    name: str
    place: Path
    both: DemoScores


def evaluation(judged: JudgedModel, rows: Sequence[DemoRow]) -> dict[str, Any]:
    """All models beside the first one; ``share`` is the part of the way to the last, the ceiling."""
    first, *_, last = rows
    room = gain(last.both, first.both)["task"]
    models = []
    for row in rows:
        gained = gain(row.both, first.both) if row is not first else None
        moved = gained is not None and row is not last and room > 0
        models.append(
            {
                "model": str(row.place),
                "name": row.name,
                **row.both._asdict(),
                "gain": gained,
                "share": gained["task"] / room if gained and moved else None,
            }
        )
    return {**judged._asdict(), "against": str(first.place), "ceiling": str(last.place), "models": models}


class DemoCurve(NamedTuple):
    """One way to move a fine-tune, with every strength that was tried."""

    label: str
    method: str | None
    points: list[tuple[float, DemoScores]]

    def metadata(self, before: DemoScores) -> dict[str, Any]:
        """The curve with its gains, and the strength that is best on the task."""
        points = [
            {"alpha": alpha, **both._asdict(), "gain": gain(both, before)} for alpha, both in self.points
        ]
        best = max(points, key=lambda point: point["task"]["value"])["alpha"]
        return {"label": self.label, "method": self.method, "points": points, "best": best}


def sweep(
    names: Mapping[str, str], judged: JudgedModel, before: DemoScores, curves: Iterable[DemoCurve]
) -> dict[str, Any]:
    """B + α·π(τ) for many α, by several methods; ``names`` tells which models these are."""
    return {
        **names,
        **judged._asdict(),
        "at_zero": before._asdict(),
        "curves": [curve.metadata(before) for curve in curves],
    }


def curve(label: str, before: DemoScores, at: Callable[[float], DemoScores]) -> DemoCurve:
    """Measure every strength; nothing of a fine-tune is the base itself."""
    points = [(0.0, before), *((alpha, at(alpha)) for alpha in ALPHAS)]
    return DemoCurve(label, None if label == "naive" else label, points)


@torch.no_grad()
def answers(ask: Callable[[Tensor], Tensor], inputs: Tensor, batch: int = 500) -> Tensor:
    """What a model says about inputs, some at a time."""
    return torch.cat([ask(part) for part in torch.split(inputs, batch)])
