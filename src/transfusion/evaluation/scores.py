"""Scores: what was measured on some examples, and what the difference between two of them is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, sqrt
from typing import Any

from torch import Tensor

from transfusion.errors import SettingError

ACCURACY, LOSS, PERPLEXITY, F1, MATTHEWS = "accuracy", "loss", "perplexity", "f1", "matthews"
LESS_IS_BETTER = frozenset([LOSS, PERPLEXITY])
POINTS = 100
"""Rates are between 0 and 1; gains are told in points of a hundred."""


@dataclass(frozen=True)
class Score:
    """How good a model was: the headline, the mean cross-entropy, the share of right answers."""

    metric: str
    """The headline's name."""
    value: float
    loss: float
    accuracy: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Everything that was measured, by name."""

    def metadata(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
        return {
            "value": self.value,
            "loss": self.loss,
            "accuracy": self.accuracy,
            "metrics": dict(self.metrics),
        }


def gain(score: Score, reference: Score) -> float:
    """How much more a score is than another: points for rates, the plain difference for a loss.

    Of a loss and a perplexity less is better, so there a gain that is negative is the good one.
    """
    if score.metric != reference.metric:
        raise SettingError(
            f"{score.metric} cannot be compared with {reference.metric}", hint="measure both in the same way"
        )
    difference = score.value - reference.value
    return difference if score.metric in LESS_IS_BETTER else POINTS * difference


def accuracy(answers: Tensor, targets: Tensor) -> float:
    """The share of right answers."""
    return int((answers == targets).sum()) / len(targets)


def f1(answers: Tensor, targets: Tensor) -> float:
    """Of two classes, the harmonic mean of precision and recall of class 1; 0 where neither exists."""
    hits = int(((answers == 1) & (targets == 1)).sum())
    spoken = int((answers == 1).sum()) + int((targets == 1).sum())
    return 2 * hits / spoken if spoken else 0.0


def matthews(answers: Tensor, targets: Tensor) -> float:
    """The correlation of answers and targets as classes, of any number; 0 where one of them is constant."""
    count = len(targets)
    classes = range(int(max(int(answers.max()), int(targets.max()))) + 1)
    spoken = [int((answers == one).sum()) for one in classes]
    true = [int((targets == one).sum()) for one in classes]
    right = int((answers == targets).sum())
    covariance = right * count - sum(p * t for p, t in zip(spoken, true, strict=True))
    spread = (count**2 - sum(p * p for p in spoken)) * (count**2 - sum(t * t for t in true))
    return covariance / sqrt(spread) if spread else 0.0


RATES: dict[str, Callable[[Tensor, Tensor], float]] = {ACCURACY: accuracy, F1: f1, MATTHEWS: matthews}
"""What is computed from answers and targets."""
METRICS = (*RATES, LOSS, PERPLEXITY)


def perplexity(loss: float) -> float:
    """How many equally likely tokens would leave as much doubt; infinite beyond all numbers."""
    return exp(loss) if loss < 700 else float("inf")
