"""Similarity in place: whether the units of A are already in their places in B, without any matching.

If B descends from A, a unit resembles the unit in its own place more than any other. Products with all
others cost as much as a sweep; products with a few dozen of them measure chance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.engines import Engine
from transfusion.runtime.scratch import scratch

SAMPLE = 32
"""About how many units of A every unit of B is compared with."""
UNMOVED = 8.0
"""Standard deviations above chance from which a unit counts as in place: beyond the largest of the 10¹⁴
products between two axes of ten million units, if chance products are normal."""


_Part: TypeAlias = tuple[str, tuple[Tensor, Tensor]]
"""An axis, and the products of its units with those in the same places and with a few others."""


@dataclass(frozen=True)
class SimilarityInPlace:
    """How far the units of one axis are in place."""

    home: float
    """The share of units that are in place."""
    margin: float
    """How far the sum over all units is above chance, in standard deviations of that sum."""


def similarity_in_place(
    weights: WeightPair, ids: Collection[str], engine: Engine
) -> dict[str, SimilarityInPlace]:
    """Return the similarity in place of each axis. Every tensor is read once, for all of its axes."""
    axes: dict[str, list[str]] = defaultdict(list)
    for id in ids:
        for tensor in dict.fromkeys(section.tensor for section in weights.sections[id]):
            axes[tensor].append(id)
    own: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for parts in engine.each(weights, _of_tensor, list(axes.items())):
        for id, (with_own, with_others) in parts:
            own[id] = own[id] + with_own if id in own else with_own
            others[id] = others[id] + with_others if id in others else with_others
    return {id: _judge(own[id], others[id]) for id in ids}


def _of_tensor(weights: WeightPair, item: tuple[str, Sequence[str]]) -> list[_Part]:
    """Return for every axis of a tensor the products of units in the same places, and with a few others."""
    tensor, ids = item
    sections = [section for id in ids for section in weights.sections[id] if section.tensor == tensor]
    with weights.clock.phase("similarity in place"):
        if all(section.plain for section in sections):
            return [(section.id, _some_rows_at_a_time(weights, section)) for section in sections]
        return _at_once(weights, tensor, sections)


def _some_rows_at_a_time(weights: WeightPair, section: Section) -> tuple[Tensor, Tensor]:
    name, few = section.tensor, torch.arange(section.shape[section.dim])[_sample(section.shape[section.dim])]
    own: list[Tensor] = []
    others: list[Tensor] = []
    among = weights.read("a", name, few) if section.dim == 0 else None
    for rows in weights.blocks(name):
        of_a, of_b = (weights.read(side, name, rows) for side in ("a", "b"))
        own.append((of_a * of_b).sum(1 - section.dim))
        others.append(of_b.T @ of_a.index_select(1, few.to(of_a.device)) if among is None else of_b @ among.T)
    if among is None:
        return torch.stack(own).sum(0)[None], torch.stack(others).sum(0)[None]
    return torch.cat(own)[None], torch.cat(others)[None]


def _at_once(weights: WeightPair, tensor: str, sections: Sequence[Section]) -> list[_Part]:
    of_a, of_b = (weights.read(side, tensor) for side in ("a", "b"))
    product = torch.mul(of_a, of_b, out=scratch("product", of_a.shape, of_a))
    found = []
    for section in sections:
        few = section.cut(of_a)[:, _sample(weights.architecture.sizes[section.id])]
        with_others = torch.stack([b @ a.T for b, a in zip(section.cut(of_b), few, strict=True)])
        found.append((section.id, (section.cut(product).sum(2), with_others)))
    return found


def _sample(size: int) -> slice:
    """Return a sample of the units of an axis, evenly spaced."""
    return slice(None, None, max(1, size // SAMPLE))


def _judge(own: Tensor, others: Tensor) -> SimilarityInPlace:
    """Compare the products of units in the same places with those of other units."""
    size = own.shape[1]
    if size == 1:
        return SimilarityInPlace(1.0, 0.0)
    compared = torch.arange(size)[_sample(size)]
    unlike = torch.arange(size)[:, None] != compared
    chance = others.cpu()[:, unlike].double()
    mean, spread = float(chance.mean()), float(chance.std(correction=0))
    if spread == 0:
        return SimilarityInPlace(0.0, 0.0)
    above = (own.cpu().double() - mean) / spread
    return SimilarityInPlace(
        float((above > UNMOVED).double().mean()), float(above.sum() / above.numel() ** 0.5)
    )
