"""Blocks: what is solved in one go, an axis alone or a parent together with what lies within it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from transfusion.evidence.gains import Gains
from transfusion.evidence.sections import Section
from transfusion.evidence.spectra import spectral_distance
from transfusion.evidence.weights import Weights
from transfusion.maps import Map, Permutation
from transfusion.methods import Method, Score
from transfusion.solvers.assignment import assign, best_totals
from transfusion.tables import Group

LARGEST_HOUSEHOLD = 8192
"""Units within all elements of a parent, up to which every pair of elements is tried."""


@dataclass(frozen=True)
class Grounds:
    """What there is to go by, and what of it counts."""

    weights: Weights
    gains: Gains
    method: Method

    def counted(
        self, id: str, settled: Container[str] | None, together: Collection[str] = ()
    ) -> list[Section]:
        """The sections of an axis that count: unless asked, not those that read a head or its units; and,
        where only settled axes count, those with no other, if there are any.
        """
        sections = self.weights.sections.get(id, [])
        architecture = self.weights.architecture
        if not self.method.outputs and (id in architecture.children or id in architecture.parents):
            sections = [section for section in sections if section.produces] or sections
        if settled is None:
            return sections
        return [section for section in sections if self._settled(section, settled, together)] or sections

    def _settled(self, section: Section, settled: Container[str], together: Collection[str]) -> bool:
        """Whether every other axis of a section has found its place, or has none to find."""
        spaces = self.weights.architecture.spaces
        return all(
            id in together or id in settled or spaces[id].group is not Group.PERMUTATION
            for id in section.others
        )


class Block(ABC):
    """Axes that are solved together."""

    @property
    @abstractmethod
    def ids(self) -> tuple[str, ...]:
        """The axes, the parent first."""

    @abstractmethod
    def propose(
        self, grounds: Grounds, maps: Mapping[str, Map], settled: Container[str] | None
    ) -> dict[str, Map]:
        """The best maps for these axes with all others where they are."""


@dataclass(frozen=True)
class Alone(Block):
    """An axis by itself: one assignment for every row."""

    id: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    def propose(
        self, grounds: Grounds, maps: Mapping[str, Map], settled: Container[str] | None
    ) -> dict[str, Map]:
        gain = grounds.gains.of(self.id, maps, grounds.counted(self.id, settled))
        with grounds.weights.clock.phase("assignments"):
            return {self.id: assign(gain)}


@dataclass(frozen=True)
class Spectral(Block):
    """A parent by its singular values, which depend on no map."""

    id: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    def propose(
        self, grounds: Grounds, maps: Mapping[str, Map], settled: Container[str] | None
    ) -> dict[str, Map]:
        return {self.id: assign(-spectral_distance(grounds.weights, grounds.counted(self.id, None))[None])}


@dataclass(frozen=True)
class Household(Block):
    """A parent with its children: every pair of elements is scored by the best that its units can do."""

    parent: str
    children: tuple[str, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.parent, *self.children)

    def involved(self, section: Section) -> set[str]:
        """The children that a section depends on."""
        return {section.id, *section.others} & set(self.children)

    def propose(
        self, grounds: Grounds, maps: Mapping[str, Map], settled: Container[str] | None
    ) -> dict[str, Map]:
        weights = grounds.weights
        others = {id: map_ for id, map_ in maps.items() if id not in self.ids}
        size = weights.architecture.sizes[self.parent]
        scores = torch.zeros(size, size, dtype=torch.float64)
        best: dict[str, Permutation] = {}
        for child in self.children:
            sections = [
                section
                for section in grounds.counted(child, settled, self.ids)
                if self.involved(section) == {child}
            ]
            if not sections:
                continue
            pairs = torch.stack([grounds.gains.between(section, others) for section in sections]).sum(0)
            with weights.clock.phase("assignments"):
                best[child], totals = best_totals(pairs.flatten(0, 1))
            scores += totals.reshape(size, size).cpu()
        plain = [
            section
            for section in grounds.counted(self.parent, settled, self.ids)
            if not self.involved(section)
        ]
        if plain:
            scores += grounds.gains.of(self.parent, others, plain)[0].double().cpu()
        heads = assign(scores[None])
        chosen = np.arange(size) * size + heads.index[0]
        return {self.parent: heads, **{id: Permutation(map_.index[chosen]) for id, map_ in best.items()}}


def blocks(weights: Weights, method: Method) -> list[Block]:
    """All that may move, in the order in which a signal meets it."""
    architecture = weights.architecture
    axes = [space.id for space in architecture.free() if weights.speaks_of(space.id)]
    found: list[Block] = []
    done: set[str] = set()
    for id in axes:
        if id in done:
            continue
        children = tuple(child for child in architecture.children.get(id, ()) if child in axes)
        units = max((architecture.sizes[id] * architecture.sizes[child] for child in children), default=0)
        if not children:
            found.append(Alone(id))
        elif method.score is Score.EXACT and units <= LARGEST_HOUSEHOLD and id not in architecture.parents:
            household = Household(id, children)
            found.append(household)
            done |= {
                child
                for child in children
                if all(household.involved(section) == {child} for section in weights.sections[child])
            }
        else:
            found.append(Spectral(id))
    return found
