"""Sweeps of a trial, with blocks solved as soon as what they depend on is.

A copy of the trial goes ahead: it has every solution as soon as it is there. The trial itself follows in the
order of the visits, so that it is always in a state of one visit after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from transfusion.alignment.maps import Map
from transfusion.matching.block_solutions import Task, solve_as_ready
from transfusion.matching.blocks import Block, BlockSolution, BlockState, SearchContext, SpectralBlock
from transfusion.matching.methods import Acceptance
from transfusion.matching.objective import Objective
from transfusion.matching.trial import Trial
from transfusion.matching.visits import Visit, VisitQueue
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.engines import Engine
from transfusion.runtime.scratch import clear

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


@dataclass(frozen=True)
class _Outcome:
    """What a visit has found."""

    solution: BlockSolution | None = None
    """None if the block was not due."""
    accepted: Mapping[str, Map] = field(default_factory=dict)
    """The maps that are new."""


@dataclass
class Sweeper:
    """Sweeps over the blocks of two models."""

    context: SearchContext
    scores: Objective
    engine: Engine
    on_step: Callable[[Step], None]
    _unmoved: dict[str, Map] = field(default_factory=dict)

    @property
    def weights(self) -> WeightPair:
        return self.context.weights

    def run(self, trial: Trial, sweeps: Iterator[list[Visit]]) -> Trial:
        """Go through these sweeps, until one changes nothing or leads to an earlier state."""
        run = _Run(self, trial, VisitQueue(sweeps, self.engine.count - 1))
        solve_as_ready(self.engine, self.context, run.ready, run.done)
        return trial

    def is_due(self, trial: Trial, block: Block) -> bool:
        """Return whether a neighbour of a block has changed since its last visit."""
        seen = trial.visits.get(str(block))
        if seen is not None and isinstance(block, SpectralBlock):
            return False
        return seen is None or seen != self._neighbour_changes(trial, block)

    def state(self, trial: Trial, visit: Visit) -> BlockState:
        """Return the state of a trial, as far as a visit depends on it."""
        ids = visit.block.ids
        around = {*ids, *(other for id in ids for other in self.weights.neighbours[id])}
        return BlockState(
            {id: trial.maps[id] for id in around if id in trial.maps},
            frozenset(around & trial.maps.keys()) if visit.is_progressive else None,
            {id: trial.history[id] for id in ids if id in trial.history},
        )

    def outcomes(self, trial: Trial, found: Sequence[tuple[Visit, BlockSolution]]) -> list[_Outcome]:
        """Accept the solutions of blocks that share no tensor, or not."""
        fresh = [self._fresh(trial, solution) for _, solution in found]
        weighed = [
            maps for maps, (visit, _) in zip(fresh, found, strict=True) if maps and not self._always(visit)
        ]
        self._score(trial.maps, {id: map_ for maps in weighed for id, map_ in maps.items()})
        return [
            _Outcome(solution, maps if self._always(visit) or self.rises(trial.maps, maps) else {})
            for maps, (visit, solution) in zip(fresh, found, strict=True)
        ]

    def commit(self, trial: Trial, visit: Visit, outcome: _Outcome) -> None:
        """Bring a trial to the state after a visit."""
        if (solution := outcome.solution) is None:
            return
        for id in solution.maps:
            trial.maps.setdefault(id, self.unmoved(id))
        if not visit.is_progressive or isinstance(visit.block, SpectralBlock):
            trial.visits[str(visit.block)] = self._neighbour_changes(trial, visit.block)
        trial.history.update(solution.history)
        trial.gaps[visit.block.ids[0]] = solution.gap
        trial.maps.update(outcome.accepted)
        trial.changes.update(outcome.accepted.keys())

    def rises(self, maps: Mapping[str, Map], fresh: Mapping[str, Map]) -> bool:
        """Return whether the objective is higher with these maps."""
        names = self.weights.tensors_with(fresh)
        before = sum(self.scores.of(names, maps).values())
        after = sum(self.scores.of(names, {**maps, **fresh}).values())
        return after > before + _SLIGHT * abs(before)

    def unmoved(self, id: str) -> Map:
        """Return the identity of an axis."""
        if id not in self._unmoved:
            architecture = self.weights.architecture
            self._unmoved[id] = Map.identity(architecture.sizes[id], architecture.rows(id))
        return self._unmoved[id]

    def _fresh(self, trial: Trial, solution: BlockSolution) -> dict[str, Map]:
        return {
            id: map_
            for id, map_ in solution.maps.items()
            if map_ != (trial.maps[id] if id in trial.maps else self.unmoved(id))
        }

    def _always(self, visit: Visit) -> bool:
        return visit.is_progressive or self.context.method.accept is Acceptance.ALWAYS

    def _score(self, maps: Mapping[str, Map], fresh: Mapping[str, Map]) -> None:
        """Score the tensors that these maps move, before and after, all at once."""
        names = self.weights.tensors_with(fresh)
        self.scores.of(names, maps)
        self.scores.of(names, {**maps, **fresh})

    def _neighbour_changes(self, trial: Trial, block: Block) -> list[int]:
        """Return how often each neighbouring axis of a block has changed."""
        around = {other for id in block.ids for other in self.weights.neighbours[id]} - set(block.ids)
        return [trial.changes[id] for id in sorted(around)]


class _Run:
    """Sweeps under way."""

    def __init__(self, sweeper: Sweeper, trial: Trial, queue: VisitQueue[_Outcome]) -> None:
        self.sweeper, self.trial, self.queue = sweeper, trial, queue
        self.ahead = trial.copy()
        self.changed = False
        """Whether the sweep that the trial is in has changed a map."""

    def ready(self, count: int) -> list[tuple[Visit, Task]]:
        """Return up to so many visits that can begin, with what is to be solved."""
        tasks: list[tuple[Visit, Task]] = []
        while len(tasks) < count and (visit := self.queue.begin()) is not None:
            if self.sweeper.is_due(self.ahead, visit.block):
                tasks.append((visit, (visit.block, self.sweeper.state(self.ahead, visit))))
            else:
                self._end(visit, _Outcome())
        return tasks

    def done(self, found: list[tuple[Visit, BlockSolution]]) -> None:
        """Take note of solutions."""
        outcomes = self.sweeper.outcomes(self.ahead, found)
        for (visit, _), outcome in zip(found, outcomes, strict=True):
            self.sweeper.commit(self.ahead, visit, outcome)
            self._end(visit, outcome)
        clear()

    def _end(self, visit: Visit, outcome: _Outcome) -> None:
        for next_visit, its_outcome in self.queue.end(visit, outcome):
            self._follow(next_visit, its_outcome)

    def _follow(self, visit: Visit, outcome: _Outcome) -> None:
        """Bring the trial to the state after its next visit."""
        trial, sweeper = self.trial, self.sweeper
        sweeper.commit(trial, visit, outcome)
        self.changed |= bool(outcome.accepted)
        axis, objective = visit.block.ids[0], trial.trace[-1]
        sweeper.on_step(Step(trial.name, visit.sweep, visit.number, visit.total, axis, objective))
        if visit.is_last:
            self._end_sweep()

    def _end_sweep(self) -> None:
        trial, sweeper = self.trial, self.sweeper
        trial.trace.append(sweeper.scores.total(trial.maps))
        sweeper.weights.require_unchanged()
        state = trial.digest()
        trial.still = not self.changed or state in trial.states
        trial.states.append(state)
        self.changed = False
        if trial.still:
            self.queue.stop()
