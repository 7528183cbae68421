"""Blocks: what is solved in one go, an axis alone or a parent together with what lies within it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from transfusion.clock import Clock
from transfusion.evidence.gains import Gains, Past
from transfusion.evidence.sections import Section
from transfusion.evidence.spectra import spectral_distance
from transfusion.evidence.spilling import Spilled, rows_at_a_time, spilled
from transfusion.evidence.weights import Weights
from transfusion.maps import Map, Permutation
from transfusion.methods import Method, Score
from transfusion.solvers.assignment import assign, best_totals, solve
from transfusion.tables import Group

LARGEST_HOUSEHOLD = 8192
"""Units within all elements of a parent, up to which every pair of elements is tried."""


@dataclass(frozen=True)
class Grounds:
    """What there is to go by, and what of it counts."""

    weights: Weights
    gains: Gains
    method: Method
    room: int | None = None
    """Bytes that solving one block may take, if that is limited."""

    @property
    def clock(self) -> Clock:
        return self.weights.clock

    def require_unchanged(self) -> None:
        """Refuse files that are not those that were opened."""
        self.weights.require_unchanged()

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

    def past(self, id: str, now: Situation) -> Past:
        """The past of an axis's gain, up to now."""
        sections = self.counted(id, now.settled)
        return self.gains.past(id, now.maps, sections, now.past.get(id, ()))

    def _settled(self, section: Section, settled: Container[str], together: Collection[str]) -> bool:
        """Whether every other axis of a section has found its place, or has none to find."""
        spaces = self.weights.architecture.spaces
        return all(
            id in together or id in settled or spaces[id].group is not Group.PERMUTATION
            for id in section.others
        )


@dataclass(frozen=True)
class Situation:
    """Where a search stands, as far as it matters to one block."""

    maps: Mapping[str, Map]
    settled: frozenset[str] | None = None
    """Where only settled axes count: which those are."""
    past: Mapping[str, Past] = field(default_factory=dict)
    """What gains have gone through."""


@dataclass(frozen=True)
class Proposal:
    """The best maps for the axes of a block with all others where they are, and what their gains have gone
    through by now.
    """

    maps: dict[str, Map]
    past: dict[str, Past] = field(default_factory=dict)
    gap: float = 0.0
    """The share by which a better assignment may exist at most."""


class Block(ABC):
    """Axes that are solved together."""

    @property
    @abstractmethod
    def ids(self) -> tuple[str, ...]:
        """The axes, the parent first."""

    @abstractmethod
    def propose(self, grounds: Grounds, now: Situation) -> Proposal:
        """The best maps for these axes with all others where they are."""


@dataclass(frozen=True)
class Alone(Block):
    """An axis by itself: one assignment for every row."""

    id: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    def propose(self, grounds: Grounds, now: Situation) -> Proposal:
        past, here = grounds.past(self.id, now), now.maps.get(self.id)
        step = rows_at_a_time(grounds.weights, self.id, grounds.room)
        if step is None:
            return self.solved(grounds, grounds.gains.of(self.id, past), past, here)
        with spilled(grounds.gains, self.id, past, step) as gain:
            return self.solved(grounds, gain, past, here)

    def solved(
        self, grounds: Grounds, gain: Tensor | Sequence[Spilled], past: Past, here: Map | None
    ) -> Proposal:
        """The best map for a gain, if the axis is here now."""
        known = here if isinstance(here, Permutation) else None
        with grounds.clock.phase("assignments"):
            found = solve(gain, known=known)
        return Proposal({self.id: found.permutation}, {self.id: past}, found.gap)


@dataclass(frozen=True)
class Spectral(Block):
    """A parent by its singular values, which depend on no map."""

    id: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    def propose(self, grounds: Grounds, now: Situation) -> Proposal:
        distance = spectral_distance(grounds.weights, grounds.counted(self.id, None))
        return Proposal({self.id: assign(-distance[None])})


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

    def propose(self, grounds: Grounds, now: Situation) -> Proposal:
        weights = grounds.weights
        others = {id: map_ for id, map_ in now.maps.items() if id not in self.ids}
        size = weights.architecture.sizes[self.parent]
        scores = torch.zeros(size, size, dtype=torch.float64)
        best: dict[str, Permutation] = {}
        for child in self.children:
            sections = [
                section
                for section in grounds.counted(child, now.settled, self.ids)
                if self.involved(section) == {child}
            ]
            if not sections:
                continue
            pairs = torch.stack([grounds.gains.between(section, others) for section in sections]).sum(0)
            with grounds.clock.phase("assignments"):
                best[child], totals = best_totals(pairs.flatten(0, 1))
            scores += totals.reshape(size, size).cpu()
        plain = [
            section
            for section in grounds.counted(self.parent, now.settled, self.ids)
            if not self.involved(section)
        ]
        past: dict[str, Past] = {}
        if plain:
            before = now.past.get(self.parent, ())
            past[self.parent] = grounds.gains.past(self.parent, others, plain, before)
            scores += grounds.gains.of(self.parent, past[self.parent])[0].double().cpu()
        heads = assign(scores[None])
        chosen = np.arange(size) * size + heads.index[0]
        inside = {id: Permutation(map_.index[chosen]) for id, map_ in best.items()}
        return Proposal({self.parent: heads, **inside}, past)


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
