"""Sweeps on paper: the search's own waves and blocks, with work in the place of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from transfusion.matching.blocks import AxisBlock, Block, NestedBlock, SpectralBlock, blocks
from transfusion.matching.methods import Acceptance, SearchStart
from transfusion.matching.search import Search, Trial
from transfusion.matching.weights.gain_products import BLOCK
from transfusion.matching.weights.gains import CORRECTED
from transfusion.matching.weights.gains_on_disk import rows_at_a_time
from transfusion.matching.weights.sections import Section
from transfusion.transportation.planning.assumptions import COMPUTED, SEEN
from transfusion.transportation.planning.costs import Costs
from transfusion.transportation.planning.work import ParallelGroup, Work, WorkItem, total


@dataclass(frozen=True)
class _Step:
    """How a gain was brought up to date once."""

    work: Work
    moved: float
    """The columns that were corrected."""


@dataclass
class SweepCost:
    """The work of one sweep: waves of blocks, what is scored after each, and the objective at the end."""

    parallel_groups: list[ParallelGroup] = field(default_factory=list)
    scored: list[ParallelGroup] = field(default_factory=list)
    """For every block that only rises, the tensors around it."""
    objective: ParallelGroup = field(default_factory=list)

    @property
    def work(self) -> Work:
        """All of it."""
        parallel_groups = (*self.parallel_groups, *self.scored, self.objective)
        return total(task.work for parallel_group in parallel_groups for task in parallel_group)


class Rehearsed:
    """A trial whose maps are only counted: how often each axis has moved."""

    def __init__(self, search: Search, costs: Costs, kept: Container[str]) -> None:
        self.search, self.costs, self.kept = search, costs, kept
        self.trial = Trial("paper", {}, [0.0])
        self.changes: Counter[str] = Counter()
        self._seen: dict[str, dict[Section, tuple[int, ...]]] = {}
        self._past: dict[str, list[_Step]] = {}
        """What each gain has gone through since it was last computed from nothing."""
        self._visits: dict[str, list[int]] = {}
        every = blocks(search.weights, search.method)
        self._inside = {id for block in every if isinstance(block, NestedBlock) for id in block.children}
        self._known: dict[str, float] = {}
        """The share of its columns that every axis was first matched by."""

    def sweep(self, start: SearchStart | None = None, share: float = 1.0) -> SweepCost:
        """The next sweep, in which a share of what moves still does."""
        settling = start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL)
        always = settling or self.search.method.accept is Acceptance.ALWAYS
        result = SweepCost()
        for parallel_group in self.search.parallel_groups(self.trial, start):
            due = [block for block in parallel_group if self._due(block)]
            solved_axes = set(self.changes) if settling else None
            result.parallel_groups.append([self._visit(block, solved_axes, share) for block in due])
            for block in due:
                if not settling or isinstance(block, SpectralBlock):
                    self._visits[str(block)] = self._surroundings(block)
                fresh = block.ids if start is not None else self._fresh(block, share)
                if fresh and not always:
                    result.scored.append(self._around(fresh))
                if start is not None or not isinstance(block, NestedBlock):
                    self.changes.update(fresh)
        if always:
            names = dict.fromkeys(n for id in self.changes for n in self.search.weights.tensors_of[id])
            result.objective = [self.costs.scoring(name) for name in names]
        self.trial.trace.append(0.0)
        return result

    def _fresh(self, block: Block, share: float) -> tuple[str, ...]:
        """What a later sweep proposes anew. See `SEEN`; of a household, the units inside, in vain."""
        if not share or isinstance(block, SpectralBlock):
            return ()
        if isinstance(block, NestedBlock):
            return block.children[-1:]
        return tuple(id for id in block.ids if id in self._moving)

    @cached_property
    def _moving(self) -> set[str]:
        """The axes that move after the first sweep."""
        seen = {id for id, share in self._known.items() if share >= SEEN} - self._inside
        return {id for id in seen if self.search.weights.neighbours[id] & seen}

    def _around(self, ids: tuple[str, ...]) -> ParallelGroup:
        names = dict.fromkeys(name for id in ids for name in self.search.weights.tensors_of[id])
        return [self.costs.scoring(name) for name in names]

    def _due(self, block: Block) -> bool:
        seen = self._visits.get(str(block))
        if seen is not None and isinstance(block, SpectralBlock):
            return False
        return seen is None or seen != self._surroundings(block)

    def _surroundings(self, block: Block) -> list[int]:
        around = {other for id in block.ids for other in self.search.weights.neighbours[id]}
        return [self.changes[id] for id in sorted(around - set(block.ids))]

    # ── a visit ──────────────────────────────────────────────────────────────────────────────

    def _visit(self, block: Block, solved_axes: set[str] | None, share: float) -> WorkItem:
        if isinstance(block, NestedBlock):
            work = self._nested(block, solved_axes, share)
        elif isinstance(block, SpectralBlock):
            counted = self.search.context.counted(block.id, None)
            work = self.costs.spectrum(counted) + self.costs.assigning(block.id)
        else:
            (id,) = block.ids
            counted = self.search.context.counted(id, solved_axes)
            self._known.setdefault(id, self._share(id, counted))
            first = not self.trial.sweeps
            work = self._gain(id, counted, share) + self.costs.assigning(id, first=first)
        height = self.costs.height(block)
        divided = isinstance(block, AxisBlock) and self._pieces(block.id) == 1
        return WorkItem(work, height, -(-height // BLOCK) if divided else 1)

    def _nested(self, block: NestedBlock, solved_axes: set[str] | None, share: float) -> Work:
        context, parts = self.search.context, [self.costs.assigning(block.parent)]
        for child in block.children:
            counted = context.counted(child, solved_axes, block.ids)
            sections = [one for one in counted if block.involved(one) == {child}]
            parts += [self.costs.between(one) for one in sections]
            if sections:
                parts.append(self.costs.pairing(block.parent, child))
        plain = [
            one for one in context.counted(block.parent, solved_axes, block.ids) if not block.involved(one)
        ]
        if plain:
            parts.append(self._gain(block.parent, plain, share))
        return total(parts)

    def _gain(self, id: str, sections: list[Section], share: float) -> Work:
        """A gain brought up to date, as `Gains` does it: from its past, where it is not kept."""
        seen, history = self._seen.get(id, {}), self._past.get(id, [])
        if seen.keys() - set(sections):
            seen, history = {}, []
        stale = {one: one in seen for one in sections if seen.get(one) != self._state(one)}
        columns = {one: one.rows * one.width for one in sections}
        moved = sum(columns[one] * (share if again else 1.0) for one, again in stale.items())
        if seen and moved + sum(step.moved for step in history) > CORRECTED * sum(columns.values()):
            seen, history, stale = {}, [], dict.fromkeys(sections, False)
        pieces = self._pieces(id)
        if stale:
            work = total(
                self.costs.section(one, share if again else 1.0, again=again, pieces=pieces)
                for one, again in stale.items()
            )
            history = [*history, _Step(work, moved if history else 0.0)]
        self._seen[id] = {**seen, **{one: self._state(one) for one in stale}}
        self._past[id] = history
        if id in self.kept and pieces == 1:
            return history[-1].work if stale else Work()
        written = self.costs.spilling(id) if pieces > 1 else Work()
        return total([*(step.work for step in history), written])

    def _pieces(self, id: str) -> int:
        """In how many pieces a gain is computed that does not fit into memory."""
        step = rows_at_a_time(self.search.weights, id, self.search.context.room)
        return 1 if step is None else -(-self.costs.architecture.sizes[id] // step)

    def forget(self) -> None:
        """What is kept is another's: every gain is computed anew."""
        self._seen.clear()
        self._past.clear()

    def _share(self, id: str, counted: list[Section]) -> float:
        every = sum(one.rows * one.width for one in self.search.context.counted(id, None))
        return sum(one.rows * one.width for one in counted) / every

    def _state(self, section: Section) -> tuple[int, ...]:
        return tuple(self.changes[id] for id in section.others)


def kept_gains(costs: Costs, limit: float) -> set[str]:
    """The axes whose gains are kept within so many bytes."""
    kept: set[str] = set()
    for id, size in gain_sizes(costs).items():
        limit -= size
        if limit >= 0:
            kept.add(id)
    return kept


def gain_sizes(costs: Costs) -> Mapping[str, int]:
    """How many bytes the gain of every axis takes."""
    architecture = costs.architecture
    return {space.id: COMPUTED * architecture.rows(space.id) * space.size**2 for space in architecture.free()}
