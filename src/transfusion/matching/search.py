"""The search: sweeps over all blocks until nothing changes (Algorithm 1), from one start or several.

A sweep visits every block whose surroundings have moved since its last visit. Blocks that stand side by
side in the order and share no tensor are solved at the same time; what comes out does not depend on where,
nor on how many are at work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256

import numpy as np

from transfusion.alignment.maps import Map, Permutation
from transfusion.matching.block_solutions import solve_blocks
from transfusion.matching.blocks import Block, BlockSolution, BlockState, SearchContext, SpectralBlock, blocks
from transfusion.matching.methods import Acceptance, BlockOrder, HeadScore, Method, SearchStart
from transfusion.matching.objective import Objective
from transfusion.matching.weights.gains import GainHistory, Gains
from transfusion.matching.weights.similarity_in_place import SimilarityInPlace, similarity_in_place
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.engines import Engine
from transfusion.runtime.scratch import clear

UNMOVED = "unmoved"
"""The name of the trial that needs no search."""
ALL_BUT_A_FEW = 0.98
"""The share of units at home, in every axis, from which nothing needs to be matched; dead units resemble
nothing, not even themselves."""
CHANCE = 5.0
"""Standard deviations that the identity must be above chance, in some axis, to be worth starting from."""
_SLIGHT = 1e-9
"""The share of a score by which it must rise to count as risen: less is rounding."""


@dataclass(frozen=True)
class Step:
    """What the search reports after each block: for progress bars and logs."""

    trial: str
    sweep: int
    done: int
    total: int
    axis: str
    objective: float | None


@dataclass
class Trial:
    """Where one search stands: its maps, and the objective before the first sweep and after each."""

    name: str
    maps: dict[str, Map]
    trace: list[float]
    still: bool = False
    restart: int = 0
    """The number of a further search, whose orders are random; 0 for the first."""
    changes: Counter[str] = field(default_factory=Counter, repr=False)
    """How often each axis has moved."""
    visits: dict[str, list[int]] = field(default_factory=dict, repr=False)
    """For every block, what its surroundings had been through when it was last solved by all there is."""
    states: list[str] = field(default_factory=list, repr=False)
    """A hash of all maps after each sweep."""
    history: dict[str, GainHistory] = field(default_factory=dict, repr=False)
    """What the gain of each axis has gone through."""
    gaps: dict[str, float] = field(default_factory=dict, repr=False)
    """For the first axis of each block, by which share a better assignment may exist at most."""

    @property
    def sweeps(self) -> int:
        return len(self.trace) - 1


class Search:
    """All trials of a method on two models."""

    def __init__(
        self,
        weights: WeightPair,
        method: Method,
        *,
        seed: int,
        engine: Engine,
        limit: int | None = None,
        room: int | None = None,
        on_step: Callable[[Step], None] = lambda step: None,
        on_sweep: Callable[[Trial], None] = lambda trial: None,
        known: Mapping[str, Trial] | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self.weights, self.method, self.seed, self.engine = weights, method, seed, engine
        self.on_step, self.on_sweep = on_step, on_sweep
        self.known = known or {}
        """Trials of an earlier run that was interrupted, by name."""
        self.only = frozenset(self.axes if only is None else only)
        """The axes to solve for; all, if not said."""
        self.context = SearchContext(weights, Gains(weights, engine.workers, limit), method, room)
        self.scores = Objective(weights, engine)
        self._tensors = lru_cache(maxsize=None)(self._tensors_of)

    def run(self) -> Trial:
        """The best of all starts and restarts."""
        starts = self.method.starts
        if self.method.screen:
            if all(one.home > ALL_BUT_A_FEW for one in self.in_place.values()):
                return Trial(UNMOVED, self._all_unmoved(), [self.identity], still=True)
            if all(one.margin < CHANCE for one in self.in_place.values()):
                starts = tuple(start for start in starts if start is not SearchStart.IDENTITY) or starts
        first = [self._begun(str(start), start) for start in starts]
        best = max(first, key=lambda trial: trial.trace[1])
        if len(first) > 1 and best.sweeps == 1:
            best.history.clear()  # what is kept is another's
        self.go_on(best)
        for again in range(1, self.method.restarts + 1):
            trial = self._begun(f"restart {again}", starts[0], again)
            best = max(best, self.go_on(trial), key=lambda trial: trial.trace[-1])
        if self.method.accept is Acceptance.RISING and best.trace[-1] < self.identity:
            best = replace(best, maps=self._all_unmoved(), trace=[*best.trace, self.identity])
        return best

    @cached_property
    def identity(self) -> float:
        """The objective with nothing moved."""
        return self.scores.total({})

    @cached_property
    def axes(self) -> list[str]:
        """The axes that may move, and of which any tensor speaks."""
        return [
            space.id for space in self.weights.architecture.free() if self.weights.has_evidence_for(space.id)
        ]

    @cached_property
    def in_place(self) -> dict[str, SimilarityInPlace]:
        """Whether the units of each axis are at home where they are."""
        return similarity_in_place(self.weights, self.axes, self.engine)

    def _begun(self, name: str, start: SearchStart, restart: int = 0) -> Trial:
        """A trial after its first sweep, or as an interrupted run left it."""
        if name in self.known:
            return self.known[name]
        return self.sweep(Trial(name, {}, [self.identity], restart=restart), start)

    def go_on(self, trial: Trial) -> Trial:
        """Sweep until nothing changes, or the search has come back to where it was."""
        while not trial.still and trial.sweeps < self.method.max_sweeps:
            self.sweep(trial)
        return trial

    # ── a sweep ──────────────────────────────────────────────────────────────────────────────

    def sweep(self, trial: Trial, start: SearchStart | None = None) -> Trial:
        """One visit to every block that is due; with a start, the first."""
        settling = start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL)
        always = settling or self.method.accept is Acceptance.ALWAYS
        changed, done = False, 0
        parallel_groups = list(self.parallel_groups(trial, start))
        total = sum(len(parallel_group) for parallel_group in parallel_groups)
        for parallel_group in parallel_groups:
            due = [block for block in parallel_group if self._due(trial, block)]
            tasks = [(block, self._situation(trial, block, settling=settling)) for block in due]
            found = solve_blocks(self.engine, self.context, tasks)
            for id in (id for proposal in found for id in proposal.maps):
                trial.maps.setdefault(id, self._unmoved(id))
            if not always:
                self._score(trial.maps, found)
            for block, proposal in zip(due, found, strict=True):
                if not settling or isinstance(block, SpectralBlock):
                    trial.visits[str(block)] = self._surroundings(trial, block)
                trial.history.update(proposal.history)
                trial.gaps[block.ids[0]] = proposal.gap
                changed |= self._take(trial, proposal.maps, always=always)
            clear()
            for block in parallel_group:
                done += 1
                step = Step(trial.name, trial.sweeps, done, total, block.ids[0], trial.trace[-1])
                self.on_step(step)
        trial.trace.append(self.scores.total(trial.maps))
        self.weights.require_unchanged()
        state = _state(trial.maps)
        trial.still = not changed or state in trial.states
        trial.states.append(state)
        self.on_sweep(trial)
        return trial

    def _situation(self, trial: Trial, block: Block, *, settling: bool) -> BlockState:
        around = {*block.ids, *(other for id in block.ids for other in self.weights.neighbours[id])}
        return BlockState(
            {id: trial.maps[id] for id in around if id in trial.maps},
            frozenset(around & trial.maps.keys()) if settling else None,
            {id: trial.history[id] for id in block.ids if id in trial.history},
        )

    def _score(self, maps: Mapping[str, Map], found: Sequence[BlockSolution]) -> None:
        """Score what the blocks of a wave propose, all at once: they share no tensor."""
        fresh = {id: map_ for proposal in found for id, map_ in proposal.maps.items() if map_ != maps[id]}
        names = list(dict.fromkeys(name for id in fresh for name in self.weights.tensors_of[id]))
        self.scores.of(names, maps)
        self.scores.of(names, {**maps, **fresh})

    def _take(self, trial: Trial, proposal: Mapping[str, Map], *, always: bool) -> bool:
        """Take a proposal, or leave it; says whether anything moved."""
        fresh = {id: map_ for id, map_ in proposal.items() if map_ != trial.maps[id]}
        if not fresh or not (always or self._rises(trial.maps, fresh)):
            return False
        trial.maps.update(fresh)
        trial.changes.update(fresh.keys())
        return True

    def _rises(self, maps: Mapping[str, Map], fresh: Mapping[str, Map]) -> bool:
        """Whether the objective is higher with fresh maps."""
        names = list(dict.fromkeys(name for id in fresh for name in self.weights.tensors_of[id]))
        before = sum(self.scores.of(names, maps).values())
        after = self.scores.of(names, {**maps, **fresh})
        return sum(after.values()) > before + _SLIGHT * abs(before)

    def _due(self, trial: Trial, block: Block) -> bool:
        seen = trial.visits.get(str(block))
        if seen is not None and isinstance(block, SpectralBlock):
            return False
        return seen is None or seen != self._surroundings(trial, block)

    def _surroundings(self, trial: Trial, block: Block) -> list[int]:
        """How often the axes have moved that a block shares tensors with."""
        around = {other for id in block.ids for other in self.weights.neighbours[id]} - set(block.ids)
        return [trial.changes[id] for id in sorted(around)]

    # ── orders ───────────────────────────────────────────────────────────────────────────────

    def parallel_groups(self, trial: Trial, start: SearchStart | None) -> Iterator[list[Block]]:
        """The blocks in the order of a sweep; those that can be solved side by side together."""
        method, order = self.method, BlockOrder.RANDOM if trial.restart else self.method.order
        if start is SearchStart.SPECTRAL:
            method = replace(method, score=HeadScore.SPECTRAL)
        found = [block for block in blocks(self.weights, method) if self.only.issuperset(block.ids)]
        if start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL) and not trial.restart:
            order = BlockOrder.FORWARD
        if order is BlockOrder.PARALLEL:
            yield from self._coloured(found)
            return
        if order is BlockOrder.BACKWARD or (order is BlockOrder.ALTERNATING and trial.sweeps % 2):
            found = found[::-1]
        elif order is BlockOrder.RANDOM:
            rng = np.random.default_rng([self.seed, trial.restart, trial.sweeps])
            found = [found[place] for place in rng.permutation(len(found))]
        yield from self._runs(found)

    def _runs(self, order: Sequence[Block]) -> Iterator[list[Block]]:
        """Neighbours in the order that share no tensor."""
        run: list[Block] = []
        for block in order:
            if run and not all(self._apart(block, other) for other in run):
                yield run
                run = []
            run.append(block)
        if run:
            yield run

    def _coloured(self, order: Sequence[Block]) -> list[list[Block]]:
        """As few groups as a greedy choice gives, each of blocks that share no tensor."""
        parallel_groups: list[list[Block]] = []
        taken: list[set[str]] = []
        for block in order:
            tensors = self._tensors(block)
            fitting = (place for place, others in enumerate(taken) if others.isdisjoint(tensors))
            if (place := next(fitting, len(parallel_groups))) == len(parallel_groups):
                parallel_groups.append([])
                taken.append(set())
            parallel_groups[place].append(block)
            taken[place] |= tensors
        return parallel_groups

    def _apart(self, one: Block, other: Block) -> bool:
        return self._tensors(one).isdisjoint(self._tensors(other))

    def _tensors_of(self, block: Block) -> frozenset[str]:
        return frozenset(name for id in block.ids for name in self.weights.tensors_of[id])

    def _all_unmoved(self) -> dict[str, Map]:
        return {id: self._unmoved(id) for id in self.axes}

    def _unmoved(self, id: str) -> Permutation:
        architecture = self.weights.architecture
        return Permutation.identity(architecture.sizes[id], architecture.rows(id))


def _state(maps: Mapping[str, Map]) -> str:
    """A hash of maps."""
    total = sha256()
    for id in sorted(maps):
        total.update(maps[id].to_tensor().numpy().tobytes())
    return total.hexdigest()
