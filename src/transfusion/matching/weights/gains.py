"""Gains: for every pair of units, what the objective wins if A's unit takes the place of B's.

With all other axes fixed, ⟨π(A), B⟩ is linear in one axis (Eq. 2 of the paper), and the gain of the axis is
the sum over its sections of B's matrix times A's, whose columns are moved by the other maps. A kept gain is
corrected by the columns that have moved since. Of a section that is a plain matrix, only the rows that are
being multiplied are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.engines import Threads
from transfusion.runtime.scratch import scratch

BLOCK = 512
"""Rows of a gain that are computed at a time, on one thread: sums do not depend on the number of threads."""
NUMBERS = 2**23
"""The most numbers of a matrix in memory at a time, unless `BLOCK` rows have more."""
CORRECTED = 0.5
"""The share of all columns that corrections may add up to; beyond it, a gain is computed from scratch."""


@dataclass
class _Kept:
    """A gain, and the columns of A that it was last computed with."""

    total: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    corrected: int = 0
    """Columns that have moved since it was computed from scratch."""


class Gains:
    """The gains of all axes. As many are kept as fit into ``limit`` bytes: the first ones.

    The weights are not kept: by default, the gains take at most three quarters of their bytes.
    """

    def __init__(self, weights: WeightPair, workers: Threads, limit: int | None = None) -> None:
        self.weights, self.workers = weights, workers
        self.limit = weights.nbytes * 3 // 4 if limit is None else limit
        self._kept: dict[str, _Kept] = {}
        left, self._worth_keeping = self.limit, set[str]()
        for space in weights.architecture.free():
            left -= gain_bytes(weights, space.id)
            if left >= 0 and self._is_corrected(space.id):
                self._worth_keeping.add(space.id)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out kept gains and threads: they stay in this process."""
        return {**self.__dict__, "workers": None, "_kept": {}, "_worth_keeping": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, workers=Threads(1))

    def of(self, id: str, maps: Mapping[str, Map], sections: Sequence[Section]) -> Tensor:
        """Return the gain of an axis by some of its sections: (rows, units of B, units of A)."""
        columns = {section.key: section.columns(maps) for section in sections}
        kept = self._kept.pop(id, None)
        if kept is not None:
            kept.corrected += _count_moved(kept.columns, columns)
            width = sum(new.numel() for new in columns.values())
            if kept.columns.keys() - columns.keys() or kept.corrected > CORRECTED * width:
                kept = None
        if kept is None:
            architecture = self.weights.architecture
            size = architecture.sizes[id]
            kept = _Kept(torch.zeros((architecture.rows(id), size, size), **self.weights.place))
        products = _Products(self.weights, self.workers, self.weights.architecture.sizes[id])
        for section in sections:
            old, new = kept.columns.get(section.key), columns[section.key]
            if old is None or not torch.equal(old, new):
                products.add(kept.total, section, old, new)
        kept.columns = columns
        if id in self._worth_keeping:
            self._kept[id] = kept
        return kept.total

    def forget(self) -> None:
        """Free the kept gains."""
        self._kept.clear()

    def between(self, section: Section, maps: Mapping[str, Map]) -> Tensor:
        """Return the gains of all pairs of heads: (heads of B, heads of A, units of B, units of A).

        ``maps`` must not move the axis of the heads.
        """
        heads, width = section.rows, section.width
        of_b, of_a = (
            self.weights.matrix("b", section),
            self.weights.matrix("a", section),
        )  # (heads, units, width)
        within = (section.columns(maps) - torch.arange(heads)[:, None] * width).to(of_a.device)
        moved = torch.stack([of_a[head].index_select(1, within[head]) for head in range(heads)])
        units = of_b.shape[1]
        left, right = of_b.reshape(-1, width), moved.reshape(-1, width)  # (heads · units, width)
        flat = torch.empty(heads * units, heads * units, **self.weights.place)

        def one(start: int) -> None:
            some = slice(start, start + BLOCK)
            torch.mm(left[some], right.T, out=flat[some])

        self.workers.each(one, range(0, heads * units, BLOCK))
        return flat.reshape(heads, units, heads, units).permute(0, 2, 1, 3)

    def _is_corrected(self, id: str) -> bool:
        """Return whether corrections pay: not if columns take more memory than the gain, as for few heads."""
        architecture = self.weights.architecture
        columns = sum(section.rows * section.width for section in self.weights.sections.get(id, []))
        return columns <= architecture.rows(id) * architecture.sizes[id] ** 2


def gain_bytes(weights: WeightPair, id: str) -> int:
    """Return the bytes of the gain of an axis."""
    architecture = weights.architecture
    return weights.itemsize * architecture.rows(id) * architecture.sizes[id] ** 2


def _count_moved(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> int:
    """Return how many columns have moved; all of a section that is new."""
    return sum(int((old[key] != now).sum()) if key in old else now.numel() for key, now in new.items())


class _Products:
    """Adds the products of sections to a gain, in blocks of B's units that are computed in parallel."""

    def __init__(self, weights: WeightPair, workers: Threads, size: int) -> None:
        self.weights, self.workers = weights, workers
        self.blocks = [slice(*edges) for edges in pairwise([*range(0, size, BLOCK), size])]

    def add(self, total: Tensor, section: Section, old: Tensor | None, new: Tensor) -> None:
        """Add the products with the new columns of A, and subtract those with the old columns."""
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
            of_a, run = self.weights.read("a", name, units), _as_slice(new[0, moved])
            if old is not None:
                right = _pick(of_a, new[0, moved], "new").sub_(_pick(of_a, old[0, moved], "old"))
            else:
                right = of_a[:, run] if isinstance(run, slice) else _pick(of_a, run, "new")

            def one(block: slice, units: slice = units, right: Tensor = right) -> None:
                left = self.weights.read("b", name, block)
                if old is not None:
                    left = left.index_select(1, moved.to(left.device))
                into = total[block, units]
                torch.addmm(into, left, right.T, out=into)  # (units of B, units of A)

            self.workers.each(one, self.blocks)

    def _column_by_column(self, total: Tensor, section: Section, old: Tensor | None, new: Tensor) -> None:
        """Add a matrix whose columns are the units: some rows of both, paired by the maps."""
        name, size = section.tensor, section.shape[1]
        for rows in torch.split(_moved(old, new), max(BLOCK, NUMBERS // size)):
            wanted = [("b", rows), ("a", new[0, rows]), *([("a", old[0, rows])] if old is not None else [])]
            of_b, moved, *before = self.workers.each(
                lambda one: self.weights.read(one[0], name, _as_slice(one[1])), wanted
            )
            right = moved - before[0] if before else moved
            self._multiply(total, of_b.T, right.T)

    def _member_by_member(
        self, total: Tensor, section: Section, member: Section, old: Tensor | None, new: Tensor
    ) -> None:
        """Add a stack of members (experts): one of B at a time, with the one of A that is paired with it."""
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
        """Add a section that is not a plain matrix, such as the units of each head, from whole tensors."""
        of_b, of_a = (
            self.weights.matrix("b", section),
            self.weights.matrix("a", section),
        )  # (rows, units, width)
        of_a = of_a.transpose(0, 1).reshape(of_a.shape[1], -1)  # (units, rows · width)
        if old is None:
            moved = _columns(of_a, new, "new")  # (units, rows, width)
        else:
            changed = (old != new).any(0).nonzero().squeeze(1)
            of_b = of_b.index_select(2, changed.to(of_b.device))
            moved = _columns(of_a, new[:, changed], "new").sub_(_columns(of_a, old[:, changed], "old"))
        for row in range(section.rows):
            self._multiply(total[row], of_b[row], moved[:, row])

    def _multiply(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left @ rightᵀ: (units of B, columns) and (units of A, columns)."""

        def one(block: slice) -> None:
            torch.addmm(total[block], left[block], right.T, out=total[block])

        self.workers.each(one, self.blocks)


def _moved(old: Tensor | None, new: Tensor) -> Tensor:
    """Return the indices of the columns that have changed."""
    return torch.arange(new.shape[1]) if old is None else (old[0] != new[0]).nonzero().squeeze(1)


def _as_slice(rows: Tensor) -> Tensor | slice:
    """Return rows as a slice if they are consecutive: these are read at once."""
    first, count = int(rows[0]) if len(rows) else 0, len(rows)
    return slice(first, first + count) if torch.equal(rows, torch.arange(first, first + count)) else rows


def _columns(matrix: Tensor, columns: Tensor, name: str) -> Tensor:
    """Return columns (rows, width) of a matrix as (units, rows, width), in scratch memory."""
    return _pick(matrix, columns.reshape(-1), name).reshape(matrix.shape[0], *columns.shape)


def _pick(matrix: Tensor, columns: Tensor, name: str) -> Tensor:
    """Return some columns of a matrix, in scratch memory."""
    columns, size = columns.to(matrix.device), matrix.shape[0]
    if matrix.stride(0) == 1:
        picked = scratch(name, (len(columns), size), matrix)
        return torch.index_select(matrix.T, 0, columns, out=picked).T
    picked = scratch(name, (size, len(columns)), matrix)
    return torch.index_select(matrix, 1, columns, out=picked)
