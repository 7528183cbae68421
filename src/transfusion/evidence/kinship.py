"""Kinship: whether the units of A are at home where they are in B, without matching anything.

If B continues A, a unit resembles the one in its own place more than any other. Products with all others
are as dear as a sweep; a few dozen of them tell how large chance products are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from transfusion.evidence.sections import Section
from transfusion.evidence.weights import Weights
from transfusion.scratch import scratch
from transfusion.workers import Workers

SAMPLE = 32
"""How many units of A, about, every unit of B is compared with."""
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


def kinship(weights: Weights, ids: Collection[str], workers: Workers) -> dict[str, Kinship]:
    """How much at home each axis is. Every tensor is read once, for all of its axes."""
    sections: dict[str, list[Section]] = defaultdict(list)
    for id in ids:
        for section in weights.sections[id]:
            sections[section.tensor].append(section)
    own: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for parts in workers.each(partial(_of_tensor, weights), sections.values()):
        for id, (with_own, with_others) in parts:
            own[id] = own[id] + with_own if id in own else with_own
            others[id] = others[id] + with_others if id in others else with_others
    return {id: _judge(own[id], others[id]) for id in ids}


def _of_tensor(weights: Weights, sections: Sequence[Section]) -> list[tuple[str, tuple[Tensor, Tensor]]]:
    """For every axis of a tensor, what its units of B give with those in their own places, and with a few."""
    with weights.clock.phase("kinship"):
        of_a, of_b = (weights.read(side, sections[0].tensor) for side in ("a", "b"))
        product = torch.mul(of_a, of_b, out=scratch("product", of_a.shape, of_a))
        found = []
        for section in sections:
            few = section.cut(of_a)[:, _sample(weights.architecture.sizes[section.id])]
            with_others = torch.stack([b @ a.T for b, a in zip(section.cut(of_b), few, strict=True)])
            found.append((section.id, (section.cut(product).sum(2), with_others)))
        weights.release()
        return found


def _sample(size: int) -> slice:
    """Some units of an axis: their order means nothing, so every so many will do."""
    return slice(None, None, max(1, size // SAMPLE))


def _judge(own: Tensor, others: Tensor) -> Kinship:
    """Compare the products with units in their own places to those with strangers."""
    among = own[:, _sample(own.shape[1])]  # a few of the others are a unit's own
    count = others.numel() - among.numel()
    if count < 2:
        return Kinship(0.0, 0.0)
    mean = float(others.sum(dtype=torch.float64) - among.sum(dtype=torch.float64)) / count
    square = float(others.square().sum(dtype=torch.float64) - among.square().sum(dtype=torch.float64)) / count
    if (spread := max(0.0, square - mean**2) ** 0.5) == 0:
        return Kinship(0.0, 0.0)
    above = (own.cpu().double() - mean) / spread
    return Kinship(float((above > AT_HOME).double().mean()), float(above.sum() / above.numel() ** 0.5))
