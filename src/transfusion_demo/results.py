"""The scores of a demo, in the format of `evaluate` and `sweep`, so that a report can show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transfusion.runtime.progress import phase

ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
Score = dict[str, Any]


class DemoScores(NamedTuple):
    """The scores of a model on the task and on the support."""

    task: Score
    support: Score


class DemoTests(NamedTuple):
    """The descriptions of the task and the support."""

    task: dict[str, Any]
    support: dict[str, Any]


def describe_data(label: str, examples: int, question: str, classes: int | None) -> dict[str, Any]:
    """Describe the data of a test."""
    return {
        "data": label,
        "examples": examples,
        "question": question,
        "metric": "accuracy",
        "classes": classes,
    }


def score(logits: Tensor, labels: Tensor) -> Score:
    """Return the accuracy and the loss of logits."""
    right = float((logits.argmax(-1) == labels).double().mean())
    loss = float(nn.functional.cross_entropy(logits.double(), labels))
    return {"value": right, "loss": loss, "accuracy": right, "metrics": {"accuracy": right}}


def gain(now: DemoScores, before: DemoScores) -> dict[str, float]:
    """Return the gains in percentage points."""
    return {
        name: 100 * (one["value"] - other["value"])
        for name, one, other in zip(DemoScores._fields, now, before, strict=True)
    }


class DemoRow(NamedTuple):
    """The title, the folder and the scores of a model."""

    name: str
    folder: Path
    scores: DemoScores


def evaluation(tests: DemoTests, rows: Sequence[DemoRow]) -> dict[str, Any]:
    """Compare all models with the first one. ``share`` is the part of the gap to the last, the ceiling."""
    first, *_, last = rows
    room = gain(last.scores, first.scores)["task"]
    models = []
    for row in rows:
        gained = gain(row.scores, first.scores) if row is not first else None
        moved = gained is not None and row is not last and room > 0
        models.append(
            {
                "model": str(row.folder),
                "name": row.name,
                **row.scores._asdict(),
                "gain": gained,
                "share": gained["task"] / room if gained and moved else None,
            }
        )
    return {**tests._asdict(), "against": str(first.folder), "ceiling": str(last.folder), "models": models}


class DemoCurve(NamedTuple):
    """The scores of one method at every α."""

    label: str
    method: str | None
    points: list[tuple[float, DemoScores]]

    def metadata(self, before: DemoScores) -> dict[str, Any]:
        """Return the curve with its gains and the α that is best on the task."""
        points = [
            {"alpha": alpha, **scores._asdict(), "gain": gain(scores, before)}
            for alpha, scores in self.points
        ]
        best = max(points, key=lambda point: point["task"]["value"])["alpha"]
        return {"label": self.label, "method": self.method, "points": points, "best": best}


def sweep(
    names: Mapping[str, str], tests: DemoTests, before: DemoScores, curves: Iterable[DemoCurve]
) -> dict[str, Any]:
    """Describe a sweep over α by several methods. ``names`` are the models' folders by their roles."""
    return {
        **names,
        **tests._asdict(),
        "at_zero": before._asdict(),
        "curves": [curve.metadata(before) for curve in curves],
    }


def measure_curve(method: str, before: DemoScores, at: Callable[[float], DemoScores]) -> DemoCurve:
    """Measure a method at every α; at α = 0 the model is the base itself."""
    points = [(0.0, before)]
    with phase(f"measuring {method}", len(ALPHAS)) as advance:
        for alpha in ALPHAS:
            points.append((alpha, at(alpha)))
            advance(f"measuring {method}")
    return DemoCurve(method, None if method == "naive" else method, points)


@torch.no_grad()
def run_in_batches(model: Callable[[Tensor], Tensor], inputs: Tensor, batch: int = 500) -> Tensor:
    """Return a model's outputs for all inputs, batch by batch."""
    return torch.cat([model(part) for part in torch.split(inputs, batch)])
