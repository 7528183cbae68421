"""Phases: what `align` does one after another, as waves of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from transfusion.matching.advice import median_of
from transfusion.matching.methods import Method, SearchStart
from transfusion.matching.search import Search
from transfusion.matching.search_memory import SearchMemory
from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.engines import LocalEngine
from transfusion.runtime.threads import Threads
from transfusion.transportation.planning.assumptions import MOVING
from transfusion.transportation.planning.costs import Costs
from transfusion.transportation.planning.sweep_cost import Rehearsed, SweepCost, kept_gains
from transfusion.transportation.planning.work import ParallelGroup, Work, WorkItem, total


@dataclass(frozen=True)
class Phase:
    """Waves that follow each other."""

    name: str
    parallel_groups: list[ParallelGroup] = field(repr=False)
    counted: bool = True
    """Whether it belongs to every run; if not, it is only told of."""

    @property
    def work(self) -> Work:
        """All of it."""
        return total(task.work for parallel_group in self.parallel_groups for task in parallel_group)


class SearchRehearsal:
    """A search on paper, from hashing to advice."""

    def __init__(self, weights: WeightPair, method: Method, budget: SearchMemory) -> None:
        self.weights, self.method, self.budget = weights, method, budget
        self.costs = Costs(weights)
        self.kept = kept_gains(self.costs, budget.kept)
        self.search = Search(weights, method, seed=0, engine=LocalEngine(Threads(1)), room=budget.room)

    def phases(
        self, sweeps: int, moving: Sequence[float] = MOVING, *, advice: bool = True
    ) -> Iterator[Phase]:
        """All phases, the sweeps by their numbers."""
        yield Phase("hashing", [self._hashed()])
        if self.method.screen:
            yield Phase("kinship", [self._in_place()])
        names = list(self.weights.tensors)
        yield Phase("identity", [[self.costs.scoring(name, moved=False) for name in names]])
        first, *others = self.method.starts
        rehearsed = Rehearsed(self.search, self.costs, self.kept)
        yield _phase("sweep 1", rehearsed.sweep(first))
        for start in others:
            # The screen drops it where no unit is where it was.
            dropped = self.method.screen and start is SearchStart.IDENTITY
            again = Rehearsed(self.search, self.costs, self.kept).sweep(start)
            yield replace(_phase(f"sweep 1 from {start}", again), counted=not dropped)
            if not dropped:
                rehearsed.forget()
        for number in range(2, sweeps + 1):
            share = moving[min(number - 2, len(moving) - 1)]
            yield _phase(f"sweep {number}", rehearsed.sweep(share=share))
        if advice:
            yield Phase("advice", [*self._agreed(self.costs, names), *self._null()])

    def _hashed(self) -> ParallelGroup:
        """Every tensor, those that take no part in the search as well."""
        return [
            WorkItem(Work(hashed=model.info(name).nbytes))
            for model in (self.weights.a, self.weights.b)
            for name in model.architecture.tensors
        ]

    def _in_place(self) -> ParallelGroup:
        found: dict[str, list[Section]] = {}
        for id in self.search.axes:
            for section in self.weights.sections[id]:
                found.setdefault(section.tensor, []).append(section)
        return [self.costs.in_place(name, sections) for name, sections in found.items()]

    def _agreed(self, costs: Costs, names: Sequence[str]) -> list[ParallelGroup]:
        return [[costs.agreeing(name) for name in names]]

    def _null(self) -> Iterator[ParallelGroup]:
        """Two sweeps from the first start in the middle of the model, whose tensors are shuffled."""
        costs = Costs(self.weights, shuffled=True)
        brief = replace(self.method, starts=self.method.starts[:1], restarts=0, max_sweeps=2, screen=False)
        middle, whole = median_of(self.search)
        room = self.budget.room
        search = Search(self.weights, brief, seed=0, engine=LocalEngine(Threads(1)), room=room, only=middle)
        yield [costs.scoring(name, moved=False) for name in self.weights.tensors]
        rehearsed = Rehearsed(search, costs, self.kept)
        for sweep in (rehearsed.sweep(brief.starts[0]), rehearsed.sweep(share=MOVING[0])):
            yield from _phase("", sweep).parallel_groups
        names = dict.fromkeys(name for id in whole for name in self.weights.tensors_of[id])
        yield from self._agreed(costs, list(names))


def _phase(name: str, sweep: SweepCost) -> Phase:
    return Phase(name, [*sweep.parallel_groups, *sweep.scored, sweep.objective])
