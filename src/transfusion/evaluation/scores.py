"""Scores, their metrics, and the gain of one score over another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

from torch import Tensor

from transfusion.errors import SettingError

if TYPE_CHECKING:
    from transfusion.evaluation.intervals import Answers

ACCURACY, LOSS, PERPLEXITY, F1, MATTHEWS = "accuracy", "loss", "perplexity", "f1", "matthews"
LESS_IS_BETTER = frozenset([LOSS, PERPLEXITY])
POINTS = 100
"""Rates are between 0 and 1; gains are in percentage points."""


@dataclass(frozen=True)
class Score:
    """The score of a model: the main metric, the mean cross-entropy, the accuracy."""

    metric: str
    """The name of the main metric."""
    value: float
    loss: float
    accuracy: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """All metrics by name."""
    answers: Answers | None = field(default=None, compare=False, repr=False)
    """The answers behind it, for confidence intervals."""

    def metadata(self) -> dict[str, Any]:
        """Return the score for a file or another program."""
        return {
            "value": self.value,
            "loss": self.loss,
            "accuracy": self.accuracy,
            "metrics": dict(self.metrics),
        }


def gain(score: Score, reference: Score) -> float:
    """Return the difference of two scores: percentage points for rates, the plain difference for a loss.

    For a loss or a perplexity a negative gain is an improvement.
    """
    if score.metric != reference.metric:
        raise SettingError(
            f"{score.metric} cannot be compared with {reference.metric}", hint="measure both in the same way"
        )
    difference = score.value - reference.value
    return difference if score.metric in LESS_IS_BETTER else POINTS * difference


def accuracy(predictions: Tensor, targets: Tensor) -> float:
    """Return the share of correct predictions."""
    return int((predictions == targets).sum()) / len(targets)


def f1(predictions: Tensor, targets: Tensor) -> float:
    """Return the harmonic mean of precision and recall of class 1 of two; 0 if neither is defined."""
    hits = int(((predictions == 1) & (targets == 1)).sum())
    predicted = int((predictions == 1).sum()) + int((targets == 1).sum())
    return 2 * hits / predicted if predicted else 0.0


def matthews(predictions: Tensor, targets: Tensor) -> float:
    """Return Matthews' correlation of any number of classes; 0 if predictions or targets are constant."""
    count = len(targets)
    classes = range(int(max(int(predictions.max()), int(targets.max()))) + 1)
    predicted = [int((predictions == one).sum()) for one in classes]
    true = [int((targets == one).sum()) for one in classes]
    right = int((predictions == targets).sum())
    covariance = right * count - sum(p * t for p, t in zip(predicted, true, strict=True))
    spread = (count**2 - sum(p * p for p in predicted)) * (count**2 - sum(t * t for t in true))
    return covariance / sqrt(spread) if spread else 0.0


RATES: dict[str, Callable[[Tensor, Tensor], float]] = {ACCURACY: accuracy, F1: f1, MATTHEWS: matthews}
"""The metrics that are computed from predictions and targets."""
METRICS = (*RATES, LOSS, PERPLEXITY)


def perplexity(loss: float) -> float:
    """Return exp(loss); infinite if that is too large for a float."""
    return exp(loss) if loss < 700 else float("inf")
