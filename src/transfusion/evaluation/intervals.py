"""Confidence intervals of scores and gains: how much they depend on which examples were drawn."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from transfusion.evaluation.scores import ACCURACY, LESS_IS_BETTER, PERPLEXITY, POINTS, RATES

if TYPE_CHECKING:
    from transfusion.evaluation.scores import Score

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
