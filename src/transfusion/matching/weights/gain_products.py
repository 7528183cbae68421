"""The products of a section, added to a gain some rows at a time.

Of a section that is a plain matrix, only the rows that are being multiplied are in memory. Their number
depends on the section alone, neither on the memory nor on the threads, so that sums have the same digits
everywhere.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.scratch import scratch
from transfusion.runtime.threads import Threads

BLOCK = 512
"""Rows of a gain that are computed at a time."""
NUMBERS = 2**23
"""The most numbers of a matrix in memory at a time, unless `BLOCK` rows have more."""


class GainProducts:
    """Adds products to a range of rows of a gain."""

    def __init__(self, weights: WeightPair, workers: Threads, rows: range) -> None:
        self.weights, self.workers = weights, workers
        self.edges = list(pairwise([*rows[::BLOCK], rows.stop]))
        self.first = rows.start

    def add(self, total: Tensor, section: Section, old: Tensor | None, new: Tensor) -> None:
        """Add the products with the new columns of A, and subtract those with the old columns.

        ``total`` has these rows of the gain: (rows of the axis, some of B's units, A's units). Of a plain
        section, ``new`` may be the first columns only.
        """
        if section.member is not None:
            self._member_by_member(total, section, section.member, old, new)
        elif not section.plain:
            self._at_once(total, section, old, new)
        elif section.dim == 0:
            self._unit_by_unit(total[0], section, old, new)
        else:
            self._column_by_column(total[0], section, old, new)

    def _unit_by_unit(self, total: Tensor, section: Section, old: Tensor | None, new: Tensor) -> None:
        """Add a matrix whose rows are the units: some units of A with all of B."""
        name, size, width = section.tensor, section.shape[0], section.shape[1]
        moved = _moved(old, new)
        step = max(BLOCK, NUMBERS // width // BLOCK * BLOCK)
        for start in range(0, size, step):
            units = slice(start, min(start + step, size))
            of_a, run = self.weights.read("a", name, units), run_of(new[0, moved])
            if old is not None:
                right = _pick(of_a, new[0, moved], "new").sub_(_pick(of_a, old[0, moved], "old"))
            else:
                right = of_a[:, run] if isinstance(run, slice) else _pick(of_a, run, "new")

            def one(edge: tuple[int, int], units: slice = units, right: Tensor = right) -> None:
                left = self.weights.read("b", name, slice(*edge))[:, : new.shape[1]]
                if old is not None:
                    left = left.index_select(1, moved.to(left.device))
                _add_product(total[edge[0] - self.first : edge[1] - self.first, units], left, right)

            self.workers.each(one, self.edges)

    def _column_by_column(self, total: Tensor, section: Section, old: Tensor | None, new: Tensor) -> None:
        """Add a matrix whose columns are the units: some rows of both, paired by the maps."""
        name, size = section.tensor, section.shape[1]
        for rows in torch.split(_moved(old, new), max(BLOCK, NUMBERS // size)):
            wanted = [("b", rows), ("a", new[0, rows]), *([("a", old[0, rows])] if old is not None else [])]
            of_b, moved, *before = self.workers.each(
                lambda one: self.weights.read(one[0], name, run_of(one[1])), wanted
            )
            right = moved - before[0] if before else moved
            self._multiply(total, of_b.T, right.T)

    def _member_by_member(
        self, total: Tensor, section: Section, member: Section, old: Tensor | None, new: Tensor
    ) -> None:
        """Add a stack of members: one of B at a time, with the one of A that the maps pair it with."""
        rows, width = section.shape[0], member.width
        before = old.reshape(rows, width) if old is not None else None
        for row, now in enumerate(new.reshape(rows, width)):
            then = None if before is None else before[row]
            if then is not None and torch.equal(then, now):
                continue
            moved = _moved(None if then is None else then[None], now[None])
            right = self._of_member(section, member, now[moved], "new")
            if then is not None:
                right = right.sub_(self._of_member(section, member, then[moved], "old"))
            left = self._one(section, member, "b", row)
            if then is not None:
                left = left.index_select(1, moved.to(left.device))
            self._multiply(total[row if section.rows > 1 else 0], left, right)

    def _of_member(self, section: Section, member: Section, columns: Tensor, name: str) -> Tensor:
        """Return columns of A, numbered through all members. Members move as a whole, so all are of one."""
        number = int(columns[0]) // member.width
        return _pick(self._one(section, member, "a", number), columns - number * member.width, name)

    def _one(self, section: Section, member: Section, side: str, number: int) -> Tensor:
        return member.cut(self.weights.read(side, section.tensor, slice(number, number + 1)))[0]

    def _at_once(self, total: Tensor, section: Section, old: Tensor | None, new: Tensor) -> None:
        of_b, of_a = self.weights.matrix("b", section), _by_column(self.weights.matrix("a", section))
        if old is None:
            moved = _columns(of_a, new, "new")
        else:
            changed = (old != new).any(0).nonzero().squeeze(1)
            of_b = of_b.index_select(2, changed.to(of_b.device))
            moved = _columns(of_a, new[:, changed], "new").sub_(_columns(of_a, old[:, changed], "old"))
        for row in range(section.rows):
            self._multiply(total[row], of_b[row], moved[:, row])

    def _multiply(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left @ rightᵀ, in blocks of rows that are computed in parallel."""

        def one(edge: tuple[int, int]) -> None:
            _add_product(total[edge[0] - self.first : edge[1] - self.first], left[slice(*edge)], right)

        self.workers.each(one, self.edges)


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ rightᵀ. Products of weights in a shorter type are summed up in the type of the gain."""
    if left.dtype == into.dtype:
        torch.addmm(into, left, right.T, out=into)
    else:
        into += left @ right.T


def _moved(old: Tensor | None, new: Tensor) -> Tensor:
    """Return the indices of the columns that have changed."""
    return torch.arange(new.shape[1]) if old is None else (old[0] != new[0]).nonzero().squeeze(1)


def run_of(rows: Tensor) -> Tensor | slice:
    """Return rows as a slice if they are consecutive: these are read at once."""
    first, count = int(rows[0]) if len(rows) else 0, len(rows)
    return slice(first, first + count) if torch.equal(rows, torch.arange(first, first + count)) else rows


def _by_column(matrix: Tensor) -> Tensor:
    """Reshape (rows, axis, width) to (axis, rows × width), so that one number names each column."""
    return matrix.transpose(0, 1).reshape(matrix.shape[1], -1)


def _columns(matrix: Tensor, columns: Tensor, name: str) -> Tensor:
    """Return columns (rows, width) of a matrix as (axis, rows, width), in scratch memory."""
    return _pick(matrix, columns.reshape(-1), name).reshape(matrix.shape[0], *columns.shape)


def _pick(matrix: Tensor, columns: Tensor, name: str) -> Tensor:
    """Return some columns of a matrix, in scratch memory."""
    columns, size = columns.to(matrix.device), matrix.shape[0]
    if matrix.stride(0) == 1:
        picked = scratch(name, (len(columns), size), matrix)
        return torch.index_select(matrix.T, 0, columns, out=picked).T
    picked = scratch(name, (size, len(columns)), matrix)
    return torch.index_select(matrix, 1, columns, out=picked)
