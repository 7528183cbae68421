"""The search: sweeps over all blocks until no map changes (Algorithm 1), from one start or several.

A sweep solves every block whose neighbours have moved since its last visit. Neighbours in the order that
share no tensor are solved in parallel. The result depends neither on the engine nor on the number of workers.
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
"""The name of the trial in which no unit moves."""
ALL_BUT_A_FEW = 0.98
"""The share of units in place, in every axis, from which no search is needed. Dead units resemble no unit,
not even themselves."""
CHANCE = 5.0
"""Standard deviations above chance, in some axis, from which the identity is a start worth trying."""
_SLIGHT = 1e-9
"""The share of a score by which it must rise; less is rounding."""


@dataclass(frozen=True)
class Step:
    """The progress that the search reports after each block."""

    trial: str
    sweep: int
    done: int
    total: int
    axis: str
    objective: float | None


@dataclass
class Trial:
    """The state of one search: its maps, and the objective before the first sweep and after each."""

    name: str
    maps: dict[str, Map]
    trace: list[float]
    still: bool = False
    restart: int = 0
    """The number of a further search in random order; 0 for the first."""
    changes: Counter[str] = field(default_factory=Counter, repr=False)
    """How often the map of each axis has changed."""
    visits: dict[str, list[int]] = field(default_factory=dict, repr=False)
    """For every block, the changes of its neighbours at its last visit with all evidence."""
    states: list[str] = field(default_factory=list, repr=False)
    """A hash of all maps after each sweep."""
    history: dict[str, GainHistory] = field(default_factory=dict, repr=False)
    """The history of each axis's gain."""
    gaps: dict[str, float] = field(default_factory=dict, repr=False)
    """For the first axis of each block, the share by which a better assignment may exist at most."""

    @property
    def sweeps(self) -> int:
        return len(self.trace) - 1


class Search:
    """The trials of a method on two models."""

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
        """Trials of an interrupted run, by name."""
        self.only = frozenset(self.axes if only is None else only)
        """The axes to solve for; by default all."""
        self.context = SearchContext(weights, Gains(weights, engine.workers, limit), method, room)
        self.scores = Objective(weights, engine)
        self._tensors = lru_cache(maxsize=None)(self._tensors_of)

    def run(self) -> Trial:
        """Search from all starts and restarts, and return the best trial."""
        starts = self.method.starts
        if self.method.screen:
            if all(one.home > ALL_BUT_A_FEW for one in self.in_place.values()):
                return Trial(UNMOVED, self._all_unmoved(), [self.identity], still=True)
            if all(one.margin < CHANCE for one in self.in_place.values()):
                starts = tuple(start for start in starts if start is not SearchStart.IDENTITY) or starts
        first = [self._begun(str(start), start) for start in starts]
        best = max(first, key=lambda trial: trial.trace[1])
        if len(first) > 1 and best.sweeps == 1:
            best.history.clear()  # the kept gains are those of another trial
        self.go_on(best)
        for again in range(1, self.method.restarts + 1):
            trial = self._begun(f"restart {again}", starts[0], again)
            best = max(best, self.go_on(trial), key=lambda trial: trial.trace[-1])
        if self.method.accept is Acceptance.RISING and best.trace[-1] < self.identity:
            best = replace(best, maps=self._all_unmoved(), trace=[*best.trace, self.identity])
        return best

    @cached_property
    def identity(self) -> float:
        """The objective of the identity."""
        return self.scores.total({})

    @cached_property
    def axes(self) -> list[str]:
        """The free axes that occur in some tensor."""
        return [
            space.id for space in self.weights.architecture.free() if self.weights.has_evidence_for(space.id)
        ]

    @cached_property
    def in_place(self) -> dict[str, SimilarityInPlace]:
        """The similarity in place of each axis."""
        return similarity_in_place(self.weights, self.axes, self.engine)

    def _begun(self, name: str, start: SearchStart, restart: int = 0) -> Trial:
        """Return a trial after its first sweep, or as an interrupted run left it."""
        if name in self.known:
            return self.known[name]
        return self.sweep(Trial(name, {}, [self.identity], restart=restart), start)

    def go_on(self, trial: Trial) -> Trial:
        """Sweep until no map changes, or an earlier state returns."""
        while not trial.still and trial.sweeps < self.method.max_sweeps:
            self.sweep(trial)
        return trial

    # ── a sweep ──────────────────────────────────────────────────────────────────────────────

    def sweep(self, trial: Trial, start: SearchStart | None = None) -> Trial:
        """Visit every block that is due, once; with ``start``, in the first sweep of a trial."""
        progressive = start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL)
        always = progressive or self.method.accept is Acceptance.ALWAYS
        changed, done = False, 0
        parallel_groups = list(self.parallel_groups(trial, start))
        total = sum(len(parallel_group) for parallel_group in parallel_groups)
        for parallel_group in parallel_groups:
            due = [block for block in parallel_group if self._due(trial, block)]
            tasks = [(block, self._block_state(trial, block, progressive=progressive)) for block in due]
            found = solve_blocks(self.engine, self.context, tasks)
            for id in (id for proposal in found for id in proposal.maps):
                trial.maps.setdefault(id, self._unmoved(id))
            if not always:
                self._score(trial.maps, found)
            for block, proposal in zip(due, found, strict=True):
                if not progressive or isinstance(block, SpectralBlock):
                    trial.visits[str(block)] = self._neighbour_changes(trial, block)
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

    def _block_state(self, trial: Trial, block: Block, *, progressive: bool) -> BlockState:
        around = {*block.ids, *(other for id in block.ids for other in self.weights.neighbours[id])}
        return BlockState(
            {id: trial.maps[id] for id in around if id in trial.maps},
            frozenset(around & trial.maps.keys()) if progressive else None,
            {id: trial.history[id] for id in block.ids if id in trial.history},
        )

    def _score(self, maps: Mapping[str, Map], found: Sequence[BlockSolution]) -> None:
        """Score the solutions of blocks that share no tensor, all at once."""
        fresh = {id: map_ for proposal in found for id, map_ in proposal.maps.items() if map_ != maps[id]}
        names = list(dict.fromkeys(name for id in fresh for name in self.weights.tensors_of[id]))
        self.scores.of(names, maps)
        self.scores.of(names, {**maps, **fresh})

    def _take(self, trial: Trial, proposal: Mapping[str, Map], *, always: bool) -> bool:
        """Accept a solution or not; return whether a map changed."""
        fresh = {id: map_ for id, map_ in proposal.items() if map_ != trial.maps[id]}
        if not fresh or not (always or self._rises(trial.maps, fresh)):
            return False
        trial.maps.update(fresh)
        trial.changes.update(fresh.keys())
        return True

    def _rises(self, maps: Mapping[str, Map], fresh: Mapping[str, Map]) -> bool:
        """Return whether the objective is higher with these maps."""
        names = list(dict.fromkeys(name for id in fresh for name in self.weights.tensors_of[id]))
        before = sum(self.scores.of(names, maps).values())
        after = self.scores.of(names, {**maps, **fresh})
        return sum(after.values()) > before + _SLIGHT * abs(before)

    def _due(self, trial: Trial, block: Block) -> bool:
        seen = trial.visits.get(str(block))
        if seen is not None and isinstance(block, SpectralBlock):
            return False
        return seen is None or seen != self._neighbour_changes(trial, block)

    def _neighbour_changes(self, trial: Trial, block: Block) -> list[int]:
        """Return how often each neighbouring axis of a block has changed."""
        around = {other for id in block.ids for other in self.weights.neighbours[id]} - set(block.ids)
        return [trial.changes[id] for id in sorted(around)]

    # ── orders ───────────────────────────────────────────────────────────────────────────────

    def parallel_groups(self, trial: Trial, start: SearchStart | None) -> Iterator[list[Block]]:
        """Yield the blocks in the order of a sweep, in groups that are solved in parallel."""
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
        """Group neighbours in the order that share no tensor."""
        run: list[Block] = []
        for block in order:
            if run and not all(self._apart(block, other) for other in run):
                yield run
                run = []
            run.append(block)
        if run:
            yield run

    def _coloured(self, order: Sequence[Block]) -> list[list[Block]]:
        """Group blocks that share no tensor, by greedy colouring."""
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
    """Return a hash of maps."""
    total = sha256()
    for id in sorted(maps):
        total.update(maps[id].to_tensor().numpy().tobytes())
    return total.hexdigest()
