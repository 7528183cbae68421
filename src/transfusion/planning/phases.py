"""Phases: what `align` does one after another, as waves of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from transfusion.engines import Local
from transfusion.evidence.sections import Section
from transfusion.evidence.weights import Weights
from transfusion.matching.advice import middle_of
from transfusion.matching.budget import Budget
from transfusion.matching.search import Search
from transfusion.methods import Method, Start
from transfusion.planning.assumptions import MOVING
from transfusion.planning.costs import Costs
from transfusion.planning.sweeping import Rehearsed, Sweep, kept_gains
from transfusion.planning.work import Task, Wave, Work, total
from transfusion.workers import Workers


@dataclass(frozen=True)
class Phase:
    """Waves that follow each other."""

    name: str
    waves: list[Wave] = field(repr=False)
    counted: bool = True
    """Whether it belongs to every run; if not, it is only told of."""

    @property
    def work(self) -> Work:
        """All of it."""
        return total(task.work for wave in self.waves for task in wave)


class Rehearsal:
    """A search on paper, from hashing to advice."""

    def __init__(self, weights: Weights, method: Method, budget: Budget) -> None:
        self.weights, self.method, self.budget = weights, method, budget
        self.costs = Costs(weights)
        self.kept = kept_gains(self.costs, budget.kept)
        self.search = Search(weights, method, seed=0, engine=Local(Workers(1)), room=budget.room)

    def phases(
        self, sweeps: int, moving: Sequence[float] = MOVING, *, advice: bool = True
    ) -> Iterator[Phase]:
        """All phases, the sweeps by their numbers."""
        yield Phase("hashing", [self._hashed()])
        if self.method.screen:
            yield Phase("kinship", [self._kinship()])
        names = list(self.weights.tensors)
        yield Phase("identity", [[self.costs.scoring(name, moved=False) for name in names]])
        first, *others = self.method.starts
        rehearsed = Rehearsed(self.search, self.costs, self.kept)
        yield _phase("sweep 1", rehearsed.sweep(first))
        for start in others:
            # The screen drops it where no unit is where it was.
            dropped = self.method.screen and start is Start.IDENTITY
            again = Rehearsed(self.search, self.costs, self.kept).sweep(start)
            yield replace(_phase(f"sweep 1 from {start}", again), counted=not dropped)
            if not dropped:
                rehearsed.forget()
        for number in range(2, sweeps + 1):
            share = moving[min(number - 2, len(moving) - 1)]
            yield _phase(f"sweep {number}", rehearsed.sweep(share=share))
        if advice:
            yield Phase("advice", [*self._agreed(self.costs, names), *self._null()])

    def _hashed(self) -> Wave:
        """Every tensor, those that take no part in the search as well."""
        return [
            Task(Work(hashed=model.info(name).nbytes))
            for model in (self.weights.a, self.weights.b)
            for name in model.architecture.tensors
        ]

    def _kinship(self) -> Wave:
        found: dict[str, list[Section]] = {}
        for id in self.search.axes:
            for section in self.weights.sections[id]:
                found.setdefault(section.tensor, []).append(section)
        return [self.costs.kinship(name, sections) for name, sections in found.items()]

    def _agreed(self, costs: Costs, names: Sequence[str]) -> list[Wave]:
        return [[costs.agreeing(name) for name in names]]

    def _null(self) -> Iterator[Wave]:
        """Two sweeps from the first start in the middle of the model, whose tensors are shuffled."""
        costs = Costs(self.weights, shuffled=True)
        brief = replace(self.method, starts=self.method.starts[:1], restarts=0, max_sweeps=2, screen=False)
        middle, whole = middle_of(self.search)
        room = self.budget.room
        search = Search(self.weights, brief, seed=0, engine=Local(Workers(1)), room=room, only=middle)
        yield [costs.scoring(name, moved=False) for name in self.weights.tensors]
        rehearsed = Rehearsed(search, costs, self.kept)
        for sweep in (rehearsed.sweep(brief.starts[0]), rehearsed.sweep(share=MOVING[0])):
            yield from _phase("", sweep).waves
        names = dict.fromkeys(name for id in whole for name in self.weights.tensors_of[id])
        yield from self._agreed(costs, list(names))


def _phase(name: str, sweep: Sweep) -> Phase:
    return Phase(name, [*sweep.waves, *sweep.scored, sweep.objective])
