"""Similarity in place: whether the units of A are already in their places in B, without any matching.

If B descends from A, a unit resembles the unit in its own place more than any other. Products with all
others cost as much as a sweep; products with a few dozen of them measure chance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair, dot_by_row, sum_of
from transfusion.runtime.engines import Engine
from transfusion.runtime.scratch import scratch

SAMPLE = 32
"""About how many units of A every unit of B is compared with."""
IN_PLACE_SIGMAS = 8.0
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


@dataclass(frozen=True)
class AllInPlace:
    """The similarity in place of all axes, and the scores ⟨A, B⟩ of the tensors that were read for it."""

    axes: Mapping[str, SimilarityInPlace]
    scores: Mapping[str, float]


def similarity_in_place(weights: WeightPair, ids: Collection[str], engine: Engine) -> AllInPlace:
    """Return the similarity in place of each axis. Every tensor is read once, for all of its axes."""
    axes: dict[str, list[str]] = defaultdict(list)
    for id in ids:
        for tensor in dict.fromkeys(section.tensor for section in weights.sections[id]):
            axes[tensor].append(id)
    own: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    scores: dict[str, float] = {}
    for tensor, (score, parts) in zip(
        axes, engine.map(partial(_of_tensor, weights), list(axes.items())), strict=True
    ):
        scores[tensor] = score
        for id, (with_own, with_others) in parts:
            own[id] = own[id] + with_own if id in own else with_own
            others[id] = others[id] + with_others if id in others else with_others
    return AllInPlace({id: _judge(own[id], others[id]) for id in ids}, scores)


def _of_tensor(weights: WeightPair, item: tuple[str, Sequence[str]]) -> tuple[float, list[_Part]]:
    """Return the score of a tensor, and the products of the units of its axes."""
    tensor, ids = item
    sections = [section for id in ids for section in weights.sections[id] if section.tensor == tensor]
    if all(section.plain for section in sections):
        return _some_rows_at_a_time(weights, tensor, sections)
    return _at_once(weights, tensor, sections)


def _some_rows_at_a_time(
    weights: WeightPair, tensor: str, sections: Sequence[Section]
) -> tuple[float, list[_Part]]:
    score = 0.0
    products = [(_OfRows if section.dim == 0 else _OfColumns)(weights, section) for section in sections]
    for rows in weights.blocks(tensor):
        of_a, of_b = (weights.read(side, tensor, rows) for side in ("a", "b"))
        by_row = dot_by_row(of_a, of_b)
        score += sum_of(by_row)
        for one in products:
            one.add(of_a, of_b, by_row)
    return score, [(section.id, one.result()) for section, one in zip(sections, products, strict=True)]


class _OfRows:
    """Products of units that are the rows of a tensor."""

    def __init__(self, weights: WeightPair, section: Section) -> None:
        size = section.shape[0]
        self.few = weights.read("a", section.tensor, torch.arange(size)[_sample(size)])
        self.own: list[Tensor] = []
        self.others: list[Tensor] = []

    def add(self, of_a: Tensor, of_b: Tensor, by_row: Tensor) -> None:
        self.own.append(by_row)
        self.others.append(of_b @ self.few.T)

    def result(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.own)[None], torch.cat(self.others)[None]


class _OfColumns:
    """Products of units that are the columns of a tensor."""

    def __init__(self, weights: WeightPair, section: Section) -> None:
        size = section.shape[1]
        self.few = _sample(size)
        self.own = torch.zeros(size, **weights.place)
        self.others = torch.zeros(size, len(range(size)[self.few]), **weights.place)

    def add(self, of_a: Tensor, of_b: Tensor, by_row: Tensor) -> None:
        self.own += (of_a * of_b).sum(0)
        self.others.addmm_(of_b.T, of_a[:, self.few])

    def result(self) -> tuple[Tensor, Tensor]:
        return self.own[None], self.others[None]


def _at_once(weights: WeightPair, tensor: str, sections: Sequence[Section]) -> tuple[float, list[_Part]]:
    of_a, of_b = (weights.read(side, tensor) for side in ("a", "b"))
    score = sum(sum_of(dot_by_row(of_a[rows], of_b[rows])) for rows in weights.blocks(tensor))
    product = torch.mul(of_a, of_b, out=scratch("product", of_a.shape, of_a))
    found = []
    for section in sections:
        few = section.cut(of_a)[:, _sample(weights.architecture.sizes[section.id])]
        with_others = torch.stack([b @ a.T for b, a in zip(section.cut(of_b), few, strict=True)])
        found.append((section.id, (section.cut(product).sum(2), with_others)))
    return score, found


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
        float((above > IN_PLACE_SIGMAS).double().mean()), float(above.sum() / above.numel() ** 0.5)
    )
