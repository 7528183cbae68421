"""Blocks: axes that are solved together, one alone or a parent (heads) with its children (their units)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.table import Symmetry
from transfusion.matching.methods import HeadScore, Method
from transfusion.matching.solvers.assignment import assign, best_totals, solve
from transfusion.matching.weights import gain_products
from transfusion.matching.weights.gains import GainHistory, Gains
from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.spectral_distance import spectral_distance
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.clock import Clock

LARGEST_NESTED = 8192
"""The most units within all elements of a parent for which every pair of elements is scored."""


@dataclass(frozen=True)
class SearchContext:
    """The evidence of a search, and which of it counts."""

    weights: WeightPair
    gains: Gains
    method: Method

    @property
    def clock(self) -> Clock:
        return self.weights.clock

    def require_unchanged(self) -> None:
        """Refuse files that have changed since they were opened."""
        self.weights.require_unchanged()

    def counted(
        self, id: str, solved_axes: Container[str] | None, together: Collection[str] = ()
    ) -> list[Section]:
        """Return the sections of an axis that count.

        Without `Method.outputs`, tensors that read a head or its units do not. With ``solved_axes``, only
        sections whose other axes are solved count, if there are any.
        """
        sections = self.weights.sections.get(id, [])
        architecture = self.weights.architecture
        if not self.method.outputs and (id in architecture.children or id in architecture.parents):
            sections = [section for section in sections if section.produces] or sections
        if solved_axes is None:
            return sections
        return [
            section for section in sections if self._is_solved(section, solved_axes, together)
        ] or sections

    def history(self, id: str, now: BlockState) -> GainHistory:
        """Return the history of an axis's gain, up to now."""
        sections = self.counted(id, now.solved_axes)
        return self.gains.history(id, now.maps, sections, now.history.get(id, ()))

    def _is_solved(self, section: Section, solved_axes: Container[str], together: Collection[str]) -> bool:
        """Return whether every other axis of a section is solved or fixed."""
        spaces = self.weights.architecture.spaces
        return all(
            id in together or id in solved_axes or spaces[id].group is not Symmetry.PERMUTATION
            for id in section.others
        )


@dataclass(frozen=True)
class BlockState:
    """The state of a search, as far as one block depends on it."""

    maps: Mapping[str, Map]
    solved_axes: frozenset[str] | None = None
    """The axes that are solved, in a progressive sweep; None in others."""
    history: Mapping[str, GainHistory] = field(default_factory=dict)
    """The histories of gains."""


@dataclass(frozen=True)
class BlockSolution:
    """The best maps for the axes of a block with all other axes fixed, and the histories of their gains."""

    maps: dict[str, Map]
    history: dict[str, GainHistory] = field(default_factory=dict)
    gap: float = 0.0
    """The share by which a better assignment may exist at most."""


class Block(ABC):
    """Axes that are solved together."""

    @property
    @abstractmethod
    def ids(self) -> tuple[str, ...]:
        """The axes, the parent first."""

    @abstractmethod
    def propose(self, context: SearchContext, now: BlockState) -> BlockSolution:
        """Return the best maps for these axes with all others fixed."""


@dataclass(frozen=True)
class AxisBlock(Block):
    """One axis: an assignment for each of its rows."""

    id: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    def propose(self, context: SearchContext, now: BlockState) -> BlockSolution:
        history, here = context.history(self.id, now), now.maps.get(self.id)
        return self.solved(context, context.gains.of(self.id, history), history, here)

    def solved(
        self,
        context: SearchContext,
        gain: Tensor,
        history: GainHistory,
        here: Map | None,
    ) -> BlockSolution:
        """Return the best map for a gain; ``here`` is the current map of the axis."""
        known = here if here is not None and here.permutes else None
        with context.clock.phase("assignments"):
            found = solve(gain, known=known)
        return BlockSolution({self.id: found.permutation}, {self.id: history}, found.gap)


@dataclass(frozen=True)
class SpectralBlock(Block):
    """A parent, matched by singular values, which depend on no map."""

    id: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    def propose(self, context: SearchContext, now: BlockState) -> BlockSolution:
        sections = context.counted(self.id, None)
        distance = spectral_distance(context.weights, sections, context.gains.workers)
        return BlockSolution({self.id: assign(-distance[None])})


@dataclass(frozen=True)
class NestedBlock(Block):
    """A parent with its children: every pair of elements is scored by the best assignment of its units."""

    parent: str
    children: tuple[str, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.parent, *self.children)

    def involved(self, section: Section) -> set[str]:
        """Return the children that a section depends on."""
        return {section.id, *section.others} & set(self.children)

    def propose(self, context: SearchContext, now: BlockState) -> BlockSolution:
        weights = context.weights
        others = {id: map_ for id, map_ in now.maps.items() if id not in self.ids}
        size = weights.architecture.sizes[self.parent]
        scores = torch.zeros(size, size, dtype=torch.float64)
        best: dict[str, Map] = {}
        for child in self.children:
            sections = [
                section
                for section in context.counted(child, now.solved_axes, self.ids)
                if self.involved(section) == {child}
            ]
            if not sections:
                continue
            pairs = torch.stack([context.gains.between(section, others) for section in sections]).sum(0)
            with context.clock.phase("assignments"):
                best[child], totals = best_totals(pairs.flatten(0, 1))
            scores += totals.reshape(size, size).cpu()
        plain = [
            section
            for section in context.counted(self.parent, now.solved_axes, self.ids)
            if not self.involved(section)
        ]
        history: dict[str, GainHistory] = {}
        if plain:
            before = now.history.get(self.parent, ())
            history[self.parent] = context.gains.history(self.parent, others, plain, before)
            scores += context.gains.of(self.parent, history[self.parent])[0].double().cpu()
        heads = assign(scores[None])
        chosen = np.arange(size) * size + heads.index[0]
        inside = {id: Map.permutation(map_.index[chosen]) for id, map_ in best.items()}
        return BlockSolution({self.parent: heads, **inside}, history)


def blocks(weights: WeightPair, method: Method) -> list[Block]:
    """Return the blocks of all free axes, in the order of the forward pass."""
    architecture = weights.architecture
    axes = [space.id for space in architecture.free() if weights.has_evidence_for(space.id)]
    found: list[Block] = []
    done: set[str] = set()
    for id in axes:
        if id in done:
            continue
        children = tuple(child for child in architecture.children.get(id, ()) if child in axes)
        units = max((architecture.sizes[id] * architecture.sizes[child] for child in children), default=0)
        if not children:
            found.append(AxisBlock(id))
        elif method.score is HeadScore.EXACT and units <= LARGEST_NESTED and id not in architecture.parents:
            nested = NestedBlock(id, children)
            found.append(nested)
            done |= {
                child
                for child in children
                if all(nested.involved(section) == {child} for section in weights.sections[child])
            }
        else:
            found.append(SpectralBlock(id))
    return found


COPIES = 7
"""The most copies of a tensor's rows in memory: as stored and converted for both models, with columns moved
by the new and by the old maps, and their difference."""


def block_bytes(weights: WeightPair, block: Block) -> int:
    """Return about how many bytes a block takes: its gain and a copy of it, and rows of both models."""
    architecture = weights.architecture
    read = gains = 0
    for id in block.ids:
        sections = weights.sections.get(id, [])
        units = architecture.rows(id) * architecture.sizes[id] ** 2
        if isinstance(block, NestedBlock) and id != block.parent:  # between all pairs of heads
            units *= architecture.rows(id) * (len(sections) + 1)
        gains = max(gains, units)
        for section in sections:
            whole = torch.Size(section.shape).numel()
            by_rows = section.plain and not isinstance(block, SpectralBlock)
            read = max(read, min(whole, gain_products.NUMBERS) if by_rows else whole)
    return weights.itemsize * (2 * gains + COPIES * read)
