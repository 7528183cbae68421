"""Kinship: whether the units of A are at home where they are in B, without matching anything.

If B continues A, a unit resembles the one in its own place more than any other. Products with all others
are as dear as a sweep; a few dozen of them, drawn at random, tell how large chance products are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from transfusion.evidence.weights import Weights
from transfusion.workers import Workers

SAMPLE = 64
"""Units of A that every unit of B is compared with."""
AT_HOME = 8.0
"""Standard deviations above chance from which a unit counts as at home: beyond the largest of the 10¹⁴
products between two axes of ten million units, if chance products are normal."""


@dataclass(frozen=True)
class Kinship:
    """What the places of one axis say about nothing moving."""

    home: float
    """The share of units that are at home."""
    margin: float
    """How far the sum over all units is above chance, in standard deviations of that sum."""


def kinship(weights: Weights, ids: Iterable[str], workers: Workers, seed: int = 0) -> dict[str, Kinship]:
    """How much at home each axis is."""
    ids = list(ids)
    return dict(zip(ids, workers.each(partial(_of_axis, weights, seed), ids), strict=True))


def _of_axis(weights: Weights, seed: int, id: str) -> Kinship:
    rows, size = weights.architecture.rows(id), weights.architecture.sizes[id]
    count = min(SAMPLE, size)
    sample = torch.from_numpy(np.random.default_rng([seed, size]).permutation(size)[:count].copy())
    own = torch.zeros(rows, size, **weights.place)
    others = torch.zeros(rows, size, count, **weights.place)
    with weights.clock.phase("kinship"):
        for section in weights.sections[id]:
            of_a, of_b = weights.matrix("a", section), weights.matrix("b", section)
            own += torch.linalg.vecdot(of_b, of_a)
            others += of_b @ of_a[:, sample.to(of_a.device)].transpose(1, 2)
        weights.release()
    strangers = torch.arange(size)[:, None] != sample
    chance = others.double()[:, strangers].reshape(-1)
    if chance.numel() < 2 or float(chance.std()) == 0:
        return Kinship(0.0, 0.0)
    above = (own.double() - chance.mean()) / chance.std()
    return Kinship(float((above > AT_HOME).double().mean()), float(above.sum() / above.numel() ** 0.5))
