"""Work: what is done in one go, counted before it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Work:
    """How much of everything that takes time."""

    flops: float = 0
    """Of products in the type of the computation: 2 for a multiplication and its addition."""
    summed: float = 0
    """Numbers of gains that products were added to."""
    read: float = 0
    """Bytes of weights as they are stored, read and converted."""
    apart: float = 0
    """Those among them that cores read side by side where they share the products of one task."""
    hashed: float = 0
    """Bytes of weights, read, looked through and hashed."""
    picked: float = 0
    """Numbers of matrices picked column by column."""
    placed: float = 0
    """Columns of which was worked out where they come from."""
    moved: float = 0
    """Numbers of tensors moved by maps."""
    compared: float = 0
    """Numbers multiplied with each other and summed up, or looked through in another way."""
    written: float = 0
    """Bytes written."""
    eigen: float = 0
    """The cubes of the sizes of the matrices whose eigenvalues were found."""
    visits: float = 0
    """Blocks visited and tensors scored: what each costs whatever its size."""
    assignments: Mapping[int, float] = field(default_factory=dict)
    """How many assignments by size."""

    def __add__(self, other: Work) -> Work:
        return total((self, other))

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        sizes = {str(size): self.assignments[size] for size in sorted(self.assignments)}
        return {**{name: getattr(self, name) for name in _NUMBERS}, "assignments": sizes}


_NUMBERS = tuple(one.name for one in fields(Work) if one.name != "assignments")
_numbers_of = attrgetter(*_NUMBERS)


def total(works: Iterable[Work]) -> Work:
    """All of it together."""
    works = list(works)
    sums = (sum(column) for column in zip(*map(_numbers_of, works), strict=True))
    assignments: Counter[int] = Counter()
    for work in works:
        if work.assignments:
            assignments.update(work.assignments)
    return Work(**dict(zip(_NUMBERS, sums, strict=False)), assignments=assignments)


@dataclass(frozen=True)
class WorkItem:
    """What one core does, from beginning to end; or several, where nothing else is to be done."""

    work: Work
    height: int = 1
    """Rows of its products, some of which another core may take over if the task is alone."""
    shares: int = 0
    """Of a block: among how many workers it can be divided that have no memory in common."""


ParallelGroup = list[WorkItem]
"""Tasks that do not wait for each other."""
