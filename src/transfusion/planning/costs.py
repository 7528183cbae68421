"""Costs: what one step of a search takes, counted from the shapes of its sections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from transfusion.evidence.kinship import SAMPLE
from transfusion.evidence.sections import Section
from transfusion.evidence.weights import Weights
from transfusion.matching.blocks import Block, Household, Spectral
from transfusion.planning.assumptions import LATER
from transfusion.planning.work import Task, Work, total


class Costs:
    """What belongs to two models of known shapes."""

    def __init__(self, weights: Weights, *, shuffled: bool = False) -> None:
        self.weights, self.architecture = weights, weights.architecture
        self.shuffled = shuffled
        """Whether every tensor of B is shuffled when it is read, as for a null."""

    def numbers(self, tensor: str) -> int:
        return torch.Size(self.weights.a.info(tensor).shape).numel()

    def reading(self, tensor: str) -> Work:
        """A tensor of both models, in the type of the computation."""
        stored = sum(model.info(tensor).nbytes for model in (self.weights.a, self.weights.b))
        return Work(read=stored, moved=self.numbers(tensor) if self.shuffled else 0)

    def scoring(self, tensor: str, *, moved: bool = True) -> Task:
        """How far one tensor agrees under maps."""
        count = self.numbers(tensor)
        return Task(self.reading(tensor) + Work(moved=count if moved else 0, compared=count, visits=1))

    def agreeing(self, tensor: str) -> Task:
        """The same, beside the squares of both sides."""
        squares = self.reading(tensor) + Work(compared=2 * self.numbers(tensor))
        return Task(squares + self.scoring(tensor).work)

    def kinship(self, tensor: str, sections: Sequence[Section]) -> Task:
        """Whether the units of all axes of a tensor are at home."""
        count = self.numbers(tensor)
        sampled = sum(2.0 * count * _sampled(self.architecture.sizes[one.id]) for one in sections)
        return Task(
            self.reading(tensor) + Work(flops=sampled, compared=count * (1 + len(sections)), visits=1)
        )

    # ── gains ────────────────────────────────────────────────────────────────────────────────

    def section(self, one: Section, share: float = 1.0, *, again: bool = False) -> Work:
        """What a section says about its axis, by a share of its columns; ``again`` undoes what it said."""
        size, columns = self.architecture.sizes[one.id], one.rows * one.width
        return self.reading(one.tensor) + Work(
            flops=2.0 * share * columns * size**2,
            summed=one.rows * size**2,
            picked=share * columns * size * (3 if again else 1),
            placed=columns,
        )

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
        if isinstance(block, Household):
            return sizes[block.parent] * max(sizes[child] for child in block.children)
        return 1 if isinstance(block, Spectral) else sizes[block.ids[0]]


def _sampled(size: int) -> int:
    return len(range(0, size, max(1, size // SAMPLE)))
