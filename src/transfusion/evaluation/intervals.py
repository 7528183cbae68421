"""Confidence intervals of scores and gains: how much they depend on which examples were drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
    """All predictions of a model, one entry each."""

    predictions: Tensor
    targets: Tensor
    losses: Tensor
    examples: Tensor
    """The number of the example that a prediction belongs to: tokens of one text are not independent."""

    @cached_property
    def right(self) -> Tensor:
        """Whether each prediction is correct."""
        return self.predictions == self.targets

    @cached_property
    def independent(self) -> bool:
        """Whether every example is one prediction."""
        return len(np.unique(self.examples)) == len(self.examples)

    def resampled(self, metric: str) -> np.ndarray | None:
        """Return a metric on many resamples of the examples; None if it cannot be resampled."""
        _, place, counts = np.unique(self.examples, return_inverse=True, return_counts=True)
        size, draw = len(counts), np.random.default_rng(0)
        of_all = metric in RATES and metric != ACCURACY  # no mean over predictions
        if size < 2 or (of_all and not self.independent):
            return None
        some = max(1, _AT_ONCE // size)
        blocks = (min(some, RESAMPLES - done) for done in range(0, RESAMPLES, some))
        drawn = (draw.integers(size, size=(rows, size)) for rows in blocks)
        if of_all:
            chosen = (torch.from_numpy(one) for block in drawn for one in block)
            return np.array([RATES[metric](self.predictions[one], self.targets[one]) for one in chosen])
        values = self.right if metric == ACCURACY else self.losses
        sums = np.bincount(place, values.double())  # of every example
        means = np.concatenate([sums[one].sum(1) / counts[one].sum(1) for one in drawn])
        return np.exp(np.minimum(means, 700)) if metric == PERPLEXITY else means


def score_interval(score: Score) -> Interval | None:
    """Return the interval of a score: Wilson's for an accuracy over examples, else a bootstrap's."""
    answers = score.answers
    if answers is None:
        return None
    if score.metric == ACCURACY and answers.independent:
        from scipy.stats import binomtest

        found = binomtest(int(answers.right.sum()), len(answers.right)).proportion_ci(LEVEL, "wilson")
        return float(found.low), float(found.high)
    return _middle(answers.resampled(score.metric))


def gain_interval(score: Score, reference: Score) -> Interval | None:
    """Return the interval of a gain, in its unit, from the same examples for both models.

    For accuracies over examples it is that of Agresti and Min (2005), from the examples that one of the two
    answers correctly and the other does not; else the bootstrap's.
    """
    ours, theirs = score.answers, reference.answers
    if ours is None or theirs is None or not torch.equal(ours.examples, theirs.examples):
        return None
    if score.metric == ACCURACY and ours.independent:
        won, lost = int((ours.right & ~theirs.right).sum()), int((theirs.right & ~ours.right).sum())
        count, middle = len(ours.right) + 2, won - lost
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
