"""Gains: what it brings to put a unit of A into a place of B, kept up to date as other axes move.

The gain of unit j of A in place i of B is the inner product of everything that belongs to the two, over
all tensors in which the axis occurs, with all other axes of A at their maps. A gain that was computed
once is corrected by the columns that have moved since, which late in a search are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from transfusion.evidence.sections import Section
from transfusion.evidence.weights import Weights
from transfusion.maps import Map
from transfusion.scratch import scratch
from transfusion.workers import Workers

ROWS_AT_A_TIME = 512
"""Rows of a gain that are computed at a time; always the same, so that the digits are too."""


@dataclass
class _Kept:
    """A gain, and the columns of A that it was computed with."""

    total: Tensor
    columns: dict[Section, Tensor] = field(default_factory=dict)
    seen: dict[Section, tuple[Map | None, ...]] = field(default_factory=dict)


class Gains:
    """The gains of all axes. As many are kept as fit into ``limit`` bytes, always the same ones.

    The weights themselves are not kept, so that both together take no more than the two models would.
    """

    def __init__(self, weights: Weights, workers: Workers, limit: int | None = None) -> None:
        self.weights, self.workers = weights, workers
        self.limit = weights.nbytes * 3 // 4 if limit is None else limit
        self._kept: dict[str, _Kept] = {}
        self._worth_keeping = set(self._that_fit())

    def of(self, id: str, maps: Mapping[str, Map], sections: Sequence[Section]) -> Tensor:
        """The gain of an axis by what some of its sections say: (rows, size in B, size in A)."""
        kept = self._kept.get(id)
        if kept is None or kept.columns.keys() - set(sections):
            kept = self._empty(id)
        columns = {
            section: section.columns(maps) for section in sections if _out_of_date(kept, section, maps)
        }
        if _mostly_new(kept, columns, sections):
            kept = self._empty(id)
            columns = {section: columns.get(section, section.columns(maps)) for section in sections}
        for section, now in columns.items():
            self._correct(kept.total, section, kept.columns.get(section), now)
            kept.columns[section] = now
            kept.seen[section] = _state(section, maps)
        if id in self._worth_keeping:
            self._kept[id] = kept
        return kept.total

    def between(self, section: Section, maps: Mapping[str, Map]) -> Tensor:
        """Every row of B against every row of A: (rows in B, rows in A, size in B, size in A).

        ``maps`` must not move what the rows are numbered by.
        """
        rows, width = section.rows, section.width
        columns = section.columns(maps)
        of_b, of_a = self.weights.matrix("b", section), self.weights.matrix("a", section)
        within = (columns - torch.arange(rows)[:, None] * width).to(of_a.device)
        moved = torch.stack([of_a[row].index_select(1, within[row]) for row in range(rows)])
        size = of_b.shape[1]
        flat = torch.empty(rows * size, rows * size, **self.weights.place)
        self._multiply(flat, of_b.reshape(-1, width), moved.reshape(-1, width), add=False)
        return flat.reshape(rows, size, rows, size).permute(0, 2, 1, 3)

    def _empty(self, id: str) -> _Kept:
        rows, size = self.weights.architecture.rows(id), self.weights.architecture.sizes[id]
        return _Kept(torch.zeros(rows, size, size, **self.weights.place))

    def _that_fit(self) -> Iterator[str]:
        """The axes whose gains are kept, the first ones first."""
        per_number = torch.empty((), **self.weights.place).element_size()
        architecture, left = self.weights.architecture, self.limit
        for space in architecture.free():
            left -= per_number * architecture.rows(space.id) * space.size**2
            if left >= 0:
                yield space.id

    def _correct(self, total: Tensor, section: Section, old: Tensor | None, new: Tensor) -> None:
        """Add what a section says with new columns, and take away what it said with the old ones."""
        of_b, of_a = self.weights.matrix("b", section), _by_column(self.weights.matrix("a", section))
        if old is None:
            moved = _pick(of_a, new, "new")
        else:
            changed = (old != new).any(0).nonzero().squeeze(1)
            of_b = of_b.index_select(2, changed.to(of_b.device))
            moved = _pick(of_a, new[:, changed], "new").sub_(_pick(of_a, old[:, changed], "old"))
        for row in range(section.rows):
            self._multiply(total[row], of_b[row], moved[:, row], add=True)

    def _multiply(self, into: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
        """Left @ rightᵀ, in blocks of rows that are computed side by side."""
        edges = [*range(0, len(left), ROWS_AT_A_TIME), len(left)]

        def one(edge: tuple[int, int]) -> None:
            rows = slice(*edge)
            torch.addmm(into[rows], left[rows], right.T, beta=float(add), out=into[rows])

        self.workers.each(one, pairwise(edges))


def _state(section: Section, maps: Mapping[str, Map]) -> tuple[Map | None, ...]:
    return tuple(maps.get(id) for id in section.others)


def _out_of_date(kept: _Kept, section: Section, maps: Mapping[str, Map]) -> bool:
    seen, now = kept.seen.get(section), _state(section, maps)
    return seen is None or any(one is not other for one, other in zip(seen, now, strict=True))


def _mostly_new(kept: _Kept, columns: Mapping[Section, Tensor], sections: Iterable[Section]) -> bool:
    """Whether more than half of all columns have moved, so that starting again is cheaper."""
    if not kept.columns:
        return False
    moved = sum(
        int((kept.columns[section] != now).sum()) if section in kept.columns else now.numel()
        for section, now in columns.items()
    )
    return moved > sum(section.rows * section.width for section in sections) / 2


def _by_column(matrix: Tensor) -> Tensor:
    """(rows, axis, width) as (axis, rows × width): every column by one number."""
    return matrix.transpose(0, 1).reshape(matrix.shape[1], -1)


def _pick(matrix: Tensor, columns: Tensor, name: str) -> Tensor:
    """The columns (rows, width) of a matrix, as (axis, rows, width), in scratch memory."""
    flat = columns.reshape(-1).to(matrix.device)
    size = matrix.shape[0]
    if matrix.stride(0) == 1:
        picked = scratch(name, (len(flat), size), matrix)
        return torch.index_select(matrix.T, 0, flat, out=picked).T.reshape(size, *columns.shape)
    picked = scratch(name, (size, len(flat)), matrix)
    return torch.index_select(matrix, 1, flat, out=picked).reshape(size, *columns.shape)
