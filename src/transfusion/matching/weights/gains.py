"""Gains: how well each unit of A fits each place of B, kept up to date as other axes move.

The gain of unit j of A in place i of B is the inner product of their weights, over all tensors that have the
axis, with all other axes of A moved by their maps. A gain that was computed once is corrected by the columns
that have moved since, which late in a search are few. These corrections are its history. A gain depends on
its history alone: where it was not kept, for lack of memory or because another machine has it, repeating the
history gives the same digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.matching.weights.gain_products import BLOCK, GainProducts
from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.threads import Threads

CORRECTED = 0.5
"""The share of all columns that corrections may add up to; beyond it, a gain is computed from scratch."""


@dataclass(frozen=True)
class GainSnapshot:
    """The sections and maps that a gain was computed from at one time."""

    sections: tuple[str, ...]
    """The sections that counted."""
    maps: Mapping[str, Map]
    """The maps of the other axes, as far as they had any."""
    moved: int = 0
    """How many columns had moved since the snapshot before."""


GainHistory: TypeAlias = tuple[GainSnapshot, ...]
"""The snapshots of a gain since it was last computed from scratch."""
_Columns: TypeAlias = dict[str, Tensor]


@dataclass
class _Kept:
    """A gain, its history, and the columns of A that it was last computed with."""

    total: Tensor
    history: GainHistory = ()
    columns: _Columns = field(default_factory=dict)


class Gains:
    """The gains of all axes. As many are kept as fit into ``limit`` bytes, always the same ones.

    The weights are not kept: the gains take at most three quarters of their bytes.
    """

    def __init__(self, weights: WeightPair, workers: Threads, limit: int | None = None) -> None:
        self.weights, self.workers = weights, workers
        self.limit = weights.nbytes * 3 // 4 if limit is None else limit
        self._kept: dict[tuple[str, range], _Kept] = {}
        self._worth_keeping = set(self._that_fit())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out kept gains and threads: they stay in this process."""
        return {**self.__dict__, "workers": None, "_kept": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, workers=Threads(1))

    def history(
        self, id: str, maps: Mapping[str, Map], sections: Sequence[Section], history: GainHistory = ()
    ) -> GainHistory:
        """Return the history of a gain, extended by a snapshot of its current sections and maps."""
        here = {other: maps[other] for section in sections for other in section.others if other in maps}
        now = GainSnapshot(tuple(section.key for section in sections), here)
        if not history or set(history[-1].sections) - set(now.sections) or not self._is_corrected(id):
            return (now,)
        if history[-1].sections == now.sections and history[-1].maps == now.maps:
            return history
        before, after = (self._columns(id, snapshot) for snapshot in (history[-1], now))
        moved = sum(
            int((before[key] != new).sum()) if key in before else new.numel() for key, new in after.items()
        )
        corrected = moved + sum(snapshot.moved for snapshot in history)
        if corrected > CORRECTED * sum(new.numel() for new in after.values()):
            return (now,)
        return (*history, GainSnapshot(now.sections, now.maps, moved))

    def of(self, id: str, history: GainHistory, rows: range | None = None, *, keep: bool = True) -> Tensor:
        """Return the gain at the end of its history: (rows, size in B, size in A), or some of B's units."""
        rows = range(self.weights.architecture.sizes[id]) if rows is None else rows
        kept = self._kept.pop((id, rows), None)
        if kept is None or kept.history != history[: len(kept.history)]:
            kept = self._empty(id, rows)
        products = GainProducts(self.weights, self.workers, rows)
        for snapshot in history[len(kept.history) :]:
            columns = self._columns(id, snapshot)
            for section in self._sections(id, snapshot):
                old, new = kept.columns.get(section.key), columns[section.key]
                if old is None or not torch.equal(old, new):
                    products.add(kept.total, section, old, new)
            kept.columns, kept.history = columns, (*kept.history, snapshot)
        if keep and id in self._worth_keeping and self._is_corrected(id):
            self._kept[id, rows] = kept
        return kept.total

    def forget(self) -> None:
        """Free the kept gains."""
        self._kept.clear()

    def between(self, section: Section, maps: Mapping[str, Map]) -> Tensor:
        """Return the gains of all pairs of rows: (rows in B, rows in A, size in B, size in A).

        ``maps`` must not move the axis that numbers the rows.
        """
        rows, width = section.rows, section.width
        columns = section.columns(maps)
        of_b, of_a = self.weights.matrix("b", section), self.weights.matrix("a", section)
        within = (columns - torch.arange(rows)[:, None] * width).to(of_a.device)
        moved = torch.stack([of_a[row].index_select(1, within[row]) for row in range(rows)])
        size = of_b.shape[1]
        left, right = of_b.reshape(-1, width), moved.reshape(-1, width)
        flat = torch.empty(rows * size, rows * size, **self.weights.place)

        def one(start: int) -> None:
            some = slice(start, start + BLOCK)
            torch.mm(left[some], right.T, out=flat[some])

        self.workers.each(one, range(0, rows * size, BLOCK))
        return flat.reshape(rows, size, rows, size).permute(0, 2, 1, 3)

    def _is_corrected(self, id: str) -> bool:
        """Return whether corrections pay: not if columns take more memory than the gain, as for few heads."""
        architecture = self.weights.architecture
        columns = sum(section.rows * section.width for section in self.weights.sections[id])
        return columns <= architecture.rows(id) * architecture.sizes[id] ** 2

    def _sections(self, id: str, snapshot: GainSnapshot) -> list[Section]:
        return [section for section in self.weights.sections[id] if section.key in snapshot.sections]

    def _columns(self, id: str, snapshot: GainSnapshot) -> _Columns:
        return {section.key: section.columns(snapshot.maps) for section in self._sections(id, snapshot)}

    def _empty(self, id: str, rows: range) -> _Kept:
        architecture = self.weights.architecture
        shape = architecture.rows(id), len(rows), architecture.sizes[id]
        return _Kept(torch.zeros(shape, **self.weights.place))

    def _that_fit(self) -> Iterator[str]:
        """Yield the axes whose gains are kept: the first ones that fit."""
        left = self.limit
        for space in self.weights.architecture.free():
            left -= gain_bytes(self.weights, space.id)
            if left >= 0:
                yield space.id


def gain_bytes(weights: WeightPair, id: str) -> int:
    """Return the bytes of the gain of an axis."""
    architecture = weights.architecture
    return weights.itemsize * architecture.rows(id) * architecture.sizes[id] ** 2
