"""Blocks: axes that are solved together, one alone or a parent (heads) with its children (their units)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.table import Symmetry
from transfusion.matching.methods import HeadScore, Method
from transfusion.matching.solvers.assignment import assign, best_totals, solve
from transfusion.matching.weights.gains import NUMBERS, Gains
from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.engines import Threads

LARGEST_NESTED = 8192
"""The most units within all elements of a parent for which every pair of elements is scored."""
COPIES = 7
"""The most copies of a tensor's rows in memory: as stored and converted for both models, with columns moved
by the new and by the old maps, and their difference."""


@dataclass(frozen=True)
class Evidence:
    """The weights that a search goes by, and which of them count."""

    weights: WeightPair
    gains: Gains
    method: Method

    def require_unchanged(self) -> None:
        """Refuse files that have changed since they were opened."""
        self.weights.require_unchanged()

    def sections(
        self, id: str, solved: Container[str] | None, together: Collection[str] = ()
    ) -> list[Section]:
        """Return the sections of an axis that count.

        Without `Method.outputs`, tensors that read a head or its units do not. With ``solved``, only sections
        whose other axes are solved count, if there are any.
        """
        sections = self.weights.sections.get(id, [])
        architecture = self.weights.architecture
        if not self.method.outputs and (id in architecture.children or id in architecture.parents):
            sections = [section for section in sections if section.produces] or sections
        if solved is None:
            return sections
        spaces = architecture.spaces
        known = [
            section
            for section in sections
            if all(
                other in together or other in solved or spaces[other].group is not Symmetry.PERMUTATION
                for other in section.others
            )
        ]
        return known or sections


@dataclass(frozen=True)
class Proposal:
    """The best maps for the axes of a block with all other axes fixed."""

    maps: dict[str, Map]
    gap: float = 0.0
    """The share by which a better assignment may exist at most."""


class Block(ABC):
    """Axes that are solved together."""

    @property
    @abstractmethod
    def ids(self) -> tuple[str, ...]:
        """The axes, the parent first."""

    @abstractmethod
    def propose(
        self, evidence: Evidence, maps: Mapping[str, Map], solved: Container[str] | None = None
    ) -> Proposal:
        """Return the best maps for these axes with all others fixed.

        ``solved`` are the axes that are solved, in a progressive sweep; None in others.
        """


@dataclass(frozen=True)
class AxisBlock(Block):
    """One axis: an assignment for each of its rows (Eq. 2)."""

    id: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    def propose(
        self, evidence: Evidence, maps: Mapping[str, Map], solved: Container[str] | None = None
    ) -> Proposal:
        here = maps.get(self.id)
        gain = evidence.gains.of(self.id, maps, evidence.sections(self.id, solved))
        found = solve(gain, known=here if here is not None and here.permutes else None)
        return Proposal({self.id: found.permutation}, found.gap)


@dataclass(frozen=True)
class SpectralBlock(Block):
    """A parent, matched by singular values, which depend on no map (Eq. 5 and 6)."""

    id: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    def propose(
        self, evidence: Evidence, maps: Mapping[str, Map], solved: Container[str] | None = None
    ) -> Proposal:
        sections = evidence.sections(self.id, None)
        distance = spectral_distance(evidence.weights, sections, evidence.gains.workers)
        return Proposal({self.id: assign(-distance[None])})


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

    def propose(
        self, evidence: Evidence, maps: Mapping[str, Map], solved: Container[str] | None = None
    ) -> Proposal:
        others = {id: map_ for id, map_ in maps.items() if id not in self.ids}
        heads = evidence.weights.architecture.sizes[self.parent]
        scores = torch.zeros(heads, heads, dtype=torch.float64)
        best: dict[str, Map] = {}
        for child in self.children:
            sections = [
                section
                for section in evidence.sections(child, solved, self.ids)
                if self.involved(section) == {child}
            ]
            if not sections:
                continue
            gains = [evidence.gains.between(section, others) for section in sections]
            pairs = torch.stack(gains).sum(0)  # (heads of B, heads of A, units of B, units of A)
            best[child], totals = best_totals(pairs.flatten(0, 1))
            scores += totals.reshape(heads, heads).cpu()
        plain = [
            section
            for section in evidence.sections(self.parent, solved, self.ids)
            if not self.involved(section)
        ]
        if plain:
            scores += evidence.gains.of(self.parent, others, plain)[0].double().cpu()
        partner = assign(scores[None])
        chosen = np.arange(heads) * heads + partner.index[0]
        inside = {id: Map.permutation(map_.index[chosen]) for id, map_ in best.items()}
        return Proposal({self.parent: partner, **inside})


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
            read = max(read, min(whole, NUMBERS) if by_rows else whole)
    return weights.itemsize * (2 * gains + COPIES * read)


def spectral_distance(weights: WeightPair, sections: Iterable[Section], workers: Threads) -> Tensor:
    """Return the distance of singular values between each unit of B and each of A, summed over tensors."""
    tasks = [(section, side) for section in sections for side in ("b", "a")]
    values = workers.each(lambda task: _values(weights, *task), tasks)
    pairs = zip(values[::2], values[1::2], strict=True)
    return torch.stack([torch.cdist(of_b, of_a) for of_b, of_a in pairs]).sum(0)


def _values(weights: WeightPair, section: Section, side: str) -> Tensor:
    return singular_values(section.blocks(weights.read(side, section.tensor)))


def singular_values(matrices: Tensor) -> Tensor:
    """Return the singular values of a batch of matrices, largest first, by the smaller Gram matrix."""
    matrices = matrices.double()
    if matrices.shape[1] > matrices.shape[2]:
        matrices = matrices.transpose(1, 2)
    squares: Tensor = torch.linalg.eigvalsh(matrices @ matrices.transpose(1, 2))
    return squares.clamp(min=0).sqrt().flip(-1)
