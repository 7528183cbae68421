"""Scores, their metrics and confidence intervals, and the gain of one score over another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import exp, sqrt
from statistics import NormalDist
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from transfusion.errors import SettingError

ACCURACY, LOSS, PERPLEXITY, F1, MATTHEWS = "accuracy", "loss", "perplexity", "f1", "matthews"
LESS_IS_BETTER = frozenset([LOSS, PERPLEXITY])
_Any = TypeVar("_Any")
POINTS = 100
"""Rates are between 0 and 1; gains are in percentage points."""


@dataclass(frozen=True)
class Score:
    """The score of a model: the main metric, the mean cross-entropy, the accuracy."""

    metric: str = field(repr=False)
    """The name of the main metric."""
    value: float
    loss: float
    accuracy: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """All metrics by name."""
    answers: Answers | None = field(default=None, compare=False, repr=False)
    """The answers behind it, for confidence intervals."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A score on the task and, if there is one, on the support."""

    task: Score
    support: Score | None = None

    def over(self, other: Scores, compare: Callable[[Score, Score], _Any | None]) -> dict[str, _Any | None]:
        """Compare with other scores: the task and, if both have one, the support."""
        ours, theirs = self.support, other.support
        support = None if ours is None or theirs is None else compare(ours, theirs)
        return {"task": compare(self.task, other.task), "support": support}


def task_and_support(found: Iterable[_Any]) -> tuple[_Any, _Any | None]:
    """Return what was found for the task and, if there is one, for the support."""
    task, *support = found
    return task, support[0] if support else None


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


# ── confidence intervals ─────────────────────────────────────────────────────────────────────

LEVEL = 0.95
RESAMPLES = 2_000
"""The number of bootstrap resamples. They depend on the number of examples alone, so that two models that
were measured on the same data share them."""

_AT_ONCE = 1_000_000
"""The number of examples that are drawn at once, over all resamples."""

Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Answers:
    """What a model answered, example by example: tokens of one text are not independent."""

    counts: Tensor
    """The number of predictions."""
    right: Tensor
    """The number of correct ones."""
    losses: Tensor
    """The sum of their losses."""
    classes: tuple[Tensor, Tensor] | None
    """Predictions and targets, if every example is one prediction."""

    @classmethod
    def of(cls, predictions: Tensor, targets: Tensor, losses: Tensor, examples: Tensor) -> Answers:
        """Return the answers from all predictions, each with the number of its example."""
        _, place, counts = np.unique(examples, return_inverse=True, return_counts=True)
        right, total = (
            torch.from_numpy(np.bincount(place, one.double())) for one in (predictions == targets, losses)
        )
        single = len(counts) == len(predictions)
        return cls(torch.from_numpy(counts), right, total, (predictions, targets) if single else None)

    def resampled(self, metric: str) -> np.ndarray | None:
        """Return a metric on many resamples of the examples; None if it cannot be resampled."""
        size, draw = len(self.counts), np.random.default_rng(0)
        of_all = metric in RATES and metric != ACCURACY  # no mean over predictions
        if size < 2 or (of_all and self.classes is None):
            return None
        some = max(1, _AT_ONCE // size)
        blocks = (min(some, RESAMPLES - done) for done in range(0, RESAMPLES, some))
        drawn = (draw.integers(size, size=(rows, size)) for rows in blocks)
        if of_all and self.classes is not None:
            predictions, targets = self.classes
            chosen = (torch.from_numpy(one) for block in drawn for one in block)
            return np.array([RATES[metric](predictions[one], targets[one]) for one in chosen])
        sums = (self.right if metric == ACCURACY else self.losses).numpy()
        counts = self.counts.numpy()
        means = np.concatenate([sums[one].sum(1) / counts[one].sum(1) for one in drawn])
        return np.exp(np.minimum(means, 700)) if metric == PERPLEXITY else means


def score_interval(score: Score) -> Interval | None:
    """Return the interval of a score: Wilson's for an accuracy over examples, else a bootstrap's."""
    answers = score.answers
    if answers is None:
        return None
    if score.metric == ACCURACY and answers.classes is not None:
        from scipy.stats import binomtest

        found = binomtest(int(answers.right.sum()), len(answers.counts)).proportion_ci(LEVEL, "wilson")
        return float(found.low), float(found.high)
    return _middle(answers.resampled(score.metric))


def gain_interval(score: Score, reference: Score) -> Interval | None:
    """Return the interval of a gain, in its unit, from the same examples for both models.

    For accuracies over examples it is that of Agresti and Min (2005), from the examples that one of the two
    answers correctly and the other does not; else the bootstrap's.
    """
    ours, theirs = score.answers, reference.answers
    if ours is None or theirs is None or not torch.equal(ours.counts, theirs.counts):
        return None
    if score.metric == ACCURACY and ours.classes is not None:
        won, lost = (int((ours.right - theirs.right == sign).sum()) for sign in (1, -1))
        count, middle = len(ours.counts) + 2, won - lost
        spread = NormalDist().inv_cdf((1 + LEVEL) / 2) * sqrt(won + lost + 1 - middle**2 / count)
        return POINTS * (middle - spread) / count, POINTS * (middle + spread) / count
    mine, other = ours.resampled(score.metric), theirs.resampled(score.metric)
    if mine is None or other is None:
        return None
    return _middle((1 if score.metric in LESS_IS_BETTER else POINTS) * (mine - other))


def _middle(values: np.ndarray | None) -> Interval | None:
    """Return the quantiles between which the middle of the values lies."""
    if values is None:
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
