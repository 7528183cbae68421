"""Gains: for every pair of units, what the objective wins if A's unit takes the place of B's.

With all other axes fixed, ⟨π(A), B⟩ is linear in one axis (the paper's assignment problem). The gain of the
axis is the sum over its sections of B's matrix times A's, whose columns are moved by the other maps. Late in
a search few columns move, so a kept gain is corrected by those. If all units clearly resemble their present
partners, no gain is needed at all (`compare_partners`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.table import Symmetry
from transfusion.matching.methods import Method
from transfusion.matching.weights import Section, WeightPair, dot_by_row, sum_of
from transfusion.runtime.engines import Engine, Threads

BLOCK = 512
"""Rows of a gain that are computed at a time, on one thread: sums do not depend on the number of threads."""
NUMBERS = 2**23
"""The most numbers of a matrix in memory at a time, unless `BLOCK` rows have more."""
CORRECTED = 0.5
"""The share of all columns that corrections may add up to; beyond it, a gain is computed from scratch."""
SAMPLE = 32
"""About how many units of A every unit of B is compared with, to measure chance."""
IN_PLACE_SIGMAS = 8.0
"""Standard deviations above chance from which a unit counts as in place: beyond the largest of the 10¹⁴
products between two axes of ten million units, if chance products are normal."""


@dataclass
class _Kept:
    """A gain, and the columns of A that it was last computed with."""

    total: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    corrected: int = 0
    """Columns that have moved since it was computed from scratch."""


class Gains:
    """The gains of all axes by the weights that count. In forward order, gains are kept until ``limit`` bytes
    are used.

    The weights are not kept: by default, the gains take at most three quarters of their bytes.
    """

    def __init__(
        self, weights: WeightPair, method: Method, workers: Threads, limit: int | None = None
    ) -> None:
        self.weights, self.method, self.workers = weights, method, workers
        self.limit = weights.nbytes * 3 // 4 if limit is None else limit
        self._kept: dict[str, _Kept] = {}
        left, self._worth_keeping = self.limit, set[str]()
        for id in weights.axes:
            left -= weights.itemsize * gain_numbers(weights, id)
            columns = sum(torch.Size(section.extents).numel() for section in weights.sections[id])
            # where an axis has few units, the columns to remember take more memory than its gain
            if left >= 0 and columns <= gain_numbers(weights, id):
                self._worth_keeping.add(id)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out kept gains and threads: they stay in this process."""
        return {**self.__dict__, "workers": None, "_kept": {}, "_worth_keeping": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, workers=Threads(1))

    def require_unchanged(self) -> None:
        """Refuse files that have changed since they were opened."""
        self.weights.require_unchanged()

    def forget(self) -> None:
        """Free the kept gains."""
        self._kept.clear()

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

    def in_place(self, id: str, maps: Mapping[str, Map], sections: Sequence[Section]) -> bool:
        """Return whether all units of an axis clearly resemble their partners under ``maps``, where finding
        out is cheaper than the gain.
        """
        if id in self._kept or self.weights.architecture.sizes[id] < 2 * SAMPLE:
            return False
        by_tensor: dict[str, list[Section]] = defaultdict(list)
        for section in sections:
            by_tensor[section.tensor].append(section)
        products = [
            one
            for name, some in by_tensor.items()
            for one in compare_partners(self.weights, name, some, maps)[1]
        ]
        own, others = (torch.stack(parts).sum(0) for parts in zip(*products, strict=True))
        return judge(own, others).home == 1.0

    def of(self, id: str, maps: Mapping[str, Map], sections: Sequence[Section]) -> Tensor:
        """Return the gain of an axis by some of its sections: (rows, units of B, units of A)."""
        columns = {section.key: section.columns(maps) for section in sections}
        kept = self._kept.pop(id, None)
        if kept is None:
            architecture = self.weights.architecture
            size = architecture.sizes[id]
            kept = _Kept(torch.zeros((architecture.rows(id), size, size), **self.weights.place))
        kept.corrected += _count_moved(kept.columns, columns)
        width = sum(new.numel() for new in columns.values())
        if kept.columns.keys() - columns.keys() or kept.corrected > CORRECTED * width:
            kept.total.zero_()
            kept.columns, kept.corrected = {}, 0
        for section in sections:
            old, new = kept.columns.get(section.key), columns[section.key]
            if old is None or not torch.equal(old, new):
                self._add(kept.total, section, old, new)
        kept.columns = columns
        if id in self._worth_keeping:
            self._kept[id] = kept
        return kept.total

    def between(self, section: Section, maps: Mapping[str, Map]) -> Tensor:
        """Return the gains of all pairs of heads: (heads of B, heads of A, units of B, units of A).

        ``maps`` must not move the axis of the heads.
        """
        heads, width = section.extents
        of_b, of_a = self._matrices(section)  # (heads, units, width)
        columns = section.columns(maps).to(of_a.device) % width
        moved = of_a.take_along_dim(columns[:, None], dim=2)  # h_A P_inᵀ
        units = of_b.shape[1]
        flat = torch.zeros(heads * units, heads * units, **self.weights.place)
        self._multiply(flat, of_b.reshape(-1, width), moved.reshape(-1, width))
        # h_i of B times h_j of A, transposed
        return flat.reshape(heads, units, heads, units).permute(0, 2, 1, 3)

    # ── products ─────────────────────────────────────────────────────────────────────────────

    def _add(self, total: Tensor, section: Section, old: Tensor | None, new: Tensor) -> None:
        """Add the products of a section with the new columns of A, and subtract those with the old ones."""
        if not section.plain:
            self._add_heads(total, section, old, new)
            return
        moved = _moved(old, new, 0)
        now, before = new[0, moved], None if old is None else old[0, moved]
        if section.dim == 0:
            self._add_rows(total[0], section, moved, now, before)
        else:
            self._add_columns(total[0], section, moved, now, before)

    def _add_rows(
        self, total: Tensor, section: Section, moved: Tensor, now: Tensor, before: Tensor | None
    ) -> None:
        """Add a matrix whose rows are the units: some units of A with some of B at a time."""
        size, width = section.shape
        step = max(BLOCK, NUMBERS // width // BLOCK * BLOCK)
        for units in units_in_blocks(size, step):
            of_a = self.weights.read("a", section.tensor, units)
            right = _pick(of_a, now)  # (units of A, moved columns)
            if before is not None:
                right = right - _pick(of_a, before)
            for some in units_in_blocks(size, step):
                # (units of B, moved columns)
                left = _pick(self.weights.read("b", section.tensor, some), moved)
                self._multiply(total[some, units], left, right)

    def _add_columns(
        self, total: Tensor, section: Section, moved: Tensor, now: Tensor, before: Tensor | None
    ) -> None:
        """Add a matrix whose columns are the units: some rows of both, paired by the maps."""
        read, step = partial(self.weights.read, name=section.tensor), max(BLOCK, NUMBERS // section.shape[1])
        for rows in units_in_blocks(len(moved), step):
            right = read("a", rows=_as_slice(now[rows]))  # (rows, units of A)
            if before is not None:
                right = right - read("a", rows=_as_slice(before[rows]))
            self._multiply(total, read("b", rows=_as_slice(moved[rows])).T, right.T)

    def _add_heads(self, total: Tensor, section: Section, old: Tensor | None, new: Tensor) -> None:
        """Add a section with a matrix for every head or expert, from whole tensors."""
        of_b, of_a = self._matrices(section)  # (heads, units, width)
        width = of_a.shape[2]
        for row in range(len(of_b)):
            if not len(moved := _moved(old, new, row)):
                continue
            # all columns of a row come from one head of A
            right = _pick(of_a[int(new[row, 0]) // width], new[row, moved] % width)
            if old is not None:
                right = right - _pick(of_a[int(old[row, 0]) // width], old[row, moved] % width)
            self._multiply(total[row], _pick(of_b[row], moved), right)

    def _matrices(self, section: Section) -> list[Tensor]:
        return [section.matrix(self.weights.read(side, section.tensor)) for side in "ba"]

    def _multiply(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left @ rightᵀ: (units of B, columns) and (units of A, columns)."""
        tensors = [total, left, right]
        self.workers.map(partial(_multiply, tensors), units_in_blocks(len(left), BLOCK))
        tensors.clear()  # a cancelled task may wait in the queue of a busy thread, and would keep them alive


def _multiply(tensors: Sequence[Tensor], some: slice) -> None:
    total, left, right = tensors
    torch.addmm(total[some], left[some], right.T, out=total[some])


def units_in_blocks(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def gain_numbers(weights: WeightPair, id: str) -> int:
    """Return how many numbers the gain of an axis has."""
    return weights.architecture.rows(id) * weights.architecture.sizes[id] ** 2


def _count_moved(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> int:
    """Return how many columns have moved; none of a section that is new."""
    return sum(int((old[key] != now).sum()) for key, now in new.items() if key in old)


def _moved(old: Tensor | None, new: Tensor, row: int) -> Tensor:
    """Return the indices of the columns of a row that have changed."""
    return torch.arange(new.shape[1]) if old is None else (old[row] != new[row]).nonzero().squeeze(1)


def _as_slice(rows: Tensor) -> Tensor | slice:
    """Return rows as a slice if they are consecutive: these are read at once."""
    first, count = int(rows[0]) if len(rows) else 0, len(rows)
    return slice(first, first + count) if torch.equal(rows, torch.arange(first, first + count)) else rows


def _pick(matrix: Tensor, columns: Tensor) -> Tensor:
    """Return some columns of a matrix; a view, if they are consecutive."""
    some = _as_slice(columns)
    return matrix[:, some] if isinstance(some, slice) else matrix.index_select(1, some.to(matrix.device))


# ── units that are in place ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SimilarityInPlace:
    """How far the units of one axis resemble their partners."""

    home: float
    """The share of units that clearly do."""
    margin: float
    """How far the sum over all units is above chance, in standard deviations of that sum."""


def similarity_in_place(
    weights: WeightPair, ids: Collection[str], engine: Engine
) -> tuple[dict[str, SimilarityInPlace], dict[str, float]]:
    """Return how far the units of every axis are in their places without any matching, and ⟨A, B⟩ of the
    tensors that were read for it, each of them once.

    If B descends from A, a unit resembles the unit in its own place more than any other.
    """
    sections: dict[str, list[Section]] = defaultdict(list)
    for id in ids:
        for section in weights.sections[id]:
            sections[section.tensor].append(section)
    own: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    scores: dict[str, float] = {}
    results = engine.map(partial(_compare_unmoved, weights), list(sections.items()))
    for (tensor, some), (score, parts) in zip(sections.items(), results, strict=True):
        scores[tensor] = score
        for section, (with_own, with_others) in zip(some, parts, strict=True):
            own[section.id] = own.get(section.id, 0) + with_own
            others[section.id] = others.get(section.id, 0) + with_others
    return {id: judge(own[id], others[id]) for id in ids}, scores


def _compare_unmoved(
    weights: WeightPair, task: tuple[str, Sequence[Section]]
) -> tuple[float, list[tuple[Tensor, Tensor]]]:
    return compare_partners(weights, *task, {})


def compare_partners(
    weights: WeightPair, tensor: str, sections: Sequence[Section], maps: Mapping[str, Map]
) -> tuple[float, list[tuple[Tensor, Tensor]]]:
    """Return ⟨π(A), B⟩ of a tensor, and for each of its sections the products of B's units with their
    partners in π(A), (rows, units), and with a few others, (rows, units, others).

    Products with all others cost as much as the gain; products with a few dozen of them measure chance.
    """
    architecture, by_rows = weights.architecture, all(section.plain for section in sections)
    sizes = [(architecture.rows(one.id), architecture.sizes[one.id]) for one in sections]
    own = [torch.zeros(size, **weights.place) for size in sizes]
    others = [torch.zeros(*size, len(_sample(size[1])), **weights.place) for size in sizes]
    by_unit = [by_rows and section.dim == 0 for section in sections]  # a row of the tensor is a unit
    few = weights.moved(tensor, maps, _sample(sizes[by_unit.index(True)][1]))[None] if any(by_unit) else None
    pieces: Iterable[tuple[slice, Tensor, Tensor]]
    if by_rows:
        pieces = weights.side_by_side(tensor, maps)
    else:
        pieces = [(slice(None), weights.moved(tensor, maps), weights.read("b", tensor))]
    score = 0.0
    for rows, moved, of_b in pieces:
        score += sum_of(dot_by_row(moved, of_b))
        for place, section in enumerate(sections):
            if few is not None and by_unit[place]:
                a, b, compared, at = moved[None], of_b[None], few, rows
            else:
                a, b = (one.T[None] if by_rows else section.matrix(one) for one in (moved, of_b))
                compared, at = a[:, _sample(sizes[place][1])], slice(None)
            own[place][:, at] += torch.linalg.vecdot(a, b)  # (rows, units)
            others[place][:, at] += b @ compared.transpose(1, 2)  # (rows, units, others)
    return score, list(zip(own, others, strict=True))


def _sample(size: int) -> Tensor:
    """Return a sample of the units of an axis, evenly spaced."""
    return torch.arange(0, size, max(1, size // SAMPLE))


def judge(own: Tensor, others: Tensor) -> SimilarityInPlace:
    """Compare the products of units with their partners, and with others."""
    size = own.shape[1]
    if size == 1:
        return SimilarityInPlace(1.0, 0.0)
    unlike = torch.arange(size)[:, None] != _sample(size)
    chance = others.cpu()[:, unlike].double()
    mean, spread = float(chance.mean()), float(chance.std(correction=0))
    if spread == 0:
        return SimilarityInPlace(0.0, 0.0)
    above = (own.cpu().double() - mean) / spread
    return SimilarityInPlace(
        float((above > IN_PLACE_SIGMAS).double().mean()), float(above.sum() / above.numel() ** 0.5)
    )
