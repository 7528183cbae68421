"""Costs: what one step of a search takes, counted from the shapes of its sections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from transfusion.matching.blocks import Block, NestedBlock, SpectralBlock
from transfusion.matching.weights.gain_products import BLOCK, NUMBERS
from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.similarity_in_place import SAMPLE
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.transportation.planning.assumptions import COMPUTED, LATER
from transfusion.transportation.planning.work import Work, WorkItem, total


@dataclass(frozen=True)
class _Read:
    """How often the bytes of a section are read on either side, and products added to its whole gain."""

    a: float = 1.0
    b: float = 1.0
    apart: float = 0.0
    """How much of it cores share."""
    added: float = 1.0


class Costs:
    """What belongs to two models of known shapes."""

    def __init__(self, weights: WeightPair, *, shuffled: bool = False) -> None:
        self.weights, self.architecture = weights, weights.architecture
        self.shuffled = shuffled
        """Whether every tensor of B is shuffled when it is read, as for a null."""

    def numbers(self, tensor: str) -> int:
        return torch.Size(self.weights.a.info(tensor).shape).numel()

    def reading(self, tensor: str, of_a: float = 1.0, of_b: float = 1.0, apart: float = 0.0) -> Work:
        """A tensor of both models, or shares of it, in the type of the computation."""
        size_a, size_b = (model.info(tensor).nbytes for model in (self.weights.a, self.weights.b))
        moved = of_b * self.numbers(tensor) if self.shuffled else 0
        return Work(read=of_a * size_a + of_b * size_b, apart=apart * size_b, moved=moved)

    def scoring(self, tensor: str, *, moved: bool = True) -> WorkItem:
        """How far one tensor agrees under maps."""
        count = self.numbers(tensor)
        return WorkItem(self.reading(tensor) + Work(moved=count if moved else 0, compared=count, visits=1))

    def agreeing(self, tensor: str) -> WorkItem:
        """The same, beside the squares of both sides."""
        squares = self.reading(tensor) + Work(compared=2 * self.numbers(tensor))
        return WorkItem(squares + self.scoring(tensor).work)

    def in_place(self, tensor: str, sections: Sequence[Section]) -> WorkItem:
        """Whether the units of all axes of a tensor are at home; of a plain matrix, once for every axis."""
        count = self.numbers(tensor)
        few = [_sampled(self.architecture.sizes[one.id]) for one in sections]
        work = Work(flops=sum(2.0 * count * one for one in few), visits=1)
        if not all(one.plain for one in sections):
            return WorkItem(work + self.reading(tensor) + Work(compared=count * (1 + len(sections))))
        among = sum(some / one.shape[0] for one, some in zip(sections, few, strict=True) if one.dim == 0)
        read = self.reading(tensor, len(sections) + among, len(sections))
        return WorkItem(work + read + Work(compared=count * len(sections)))

    # ── gains ────────────────────────────────────────────────────────────────────────────────

    def section(self, one: Section, share: float = 1.0, *, again: bool = False, pieces: int = 1) -> Work:
        """What a section says about its axis, by a share of its columns; ``again`` undoes what it said.

        In ``pieces``, some rows of the gain at a time are computed from the beginning.
        """
        size, columns = self.architecture.sizes[one.id], one.rows * one.width
        read = self._read(one, share, 2.0 if again else 1.0, pieces)
        picked = 0.0 if one.plain and one.dim else share * columns * size * (3 if again else 1)
        return self.reading(one.tensor, read.a, read.b, read.apart) + Work(
            flops=2.0 * share * columns * size**2,
            summed=read.added * one.rows * size**2,
            picked=pieces * picked,
            placed=columns,
        )

    def _read(self, one: Section, share: float, times: float, pieces: int) -> _Read:
        """How `GainProducts` reads a section; ``times`` is how often columns of A are picked."""
        if one.member is not None:
            return _Read(times * pieces, pieces, added=one.shape[0] / one.rows)
        if not one.plain:
            return _Read(pieces, pieces)
        if one.dim == 0:
            step = max(BLOCK, NUMBERS // one.shape[1] // BLOCK * BLOCK)
            chunks = -(-one.shape[0] // step)
            return _Read(pieces, chunks, apart=chunks)
        chunks = -(-one.shape[0] // max(BLOCK, NUMBERS // one.shape[1]))
        return _Read(share * times * pieces, share * pieces, apart=2 * share * pieces, added=chunks)

    def between(self, one: Section) -> Work:
        """Every row of B against every row of A."""
        size, rows = self.architecture.sizes[one.id], one.rows
        return self.reading(one.tensor) + Work(
            flops=2.0 * (rows * size) ** 2 * one.width,
            summed=2 * (rows * size) ** 2,
            picked=rows * one.width * size,
            placed=rows * one.width,
        )

    def assigning(self, id: str, *, first: bool = True) -> Work:
        """An assignment for every row of an axis; after the first, its places are nearly known."""
        count = self.architecture.rows(id) * (1 if first else LATER)
        return Work(assignments={self.architecture.sizes[id]: count}, visits=1)

    def spilling(self, id: str) -> Work:
        """A gain that is written to a temporary file."""
        return Work(written=COMPUTED * self.architecture.rows(id) * self.architecture.sizes[id] ** 2)

    def pairing(self, parent: str, child: str) -> Work:
        """An assignment of a child's units for every pair of elements of its parent."""
        return Work(assignments={self.architecture.sizes[child]: self.architecture.sizes[parent] ** 2})

    def spectrum(self, sections: Iterable[Section]) -> Work:
        """The singular values of every unit of an axis, on both sides, through the smaller Gram matrix."""
        parts = []
        for one in sections:
            size, *extents = one.blocks(torch.empty(one.shape, device="meta")).shape
            small, large = sorted(extents)
            parts.append(
                self.reading(one.tensor)
                + Work(flops=2 * 2 * 2.0 * size * small**2 * large, eigen=2.0 * size * small**3)
            )
        return total(parts)

    def height(self, block: Block) -> int:
        """Rows of the largest product of a block."""
        sizes = self.architecture.sizes
        if isinstance(block, NestedBlock):
            return sizes[block.parent] * max(sizes[child] for child in block.children)
        return 1 if isinstance(block, SpectralBlock) else sizes[block.ids[0]]


def _sampled(size: int) -> int:
    return len(range(0, size, max(1, size // SAMPLE)))
