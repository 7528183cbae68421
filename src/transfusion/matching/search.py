"""The search: sweeps over all blocks until no map changes (Algorithm 1), from one start or several.

A sweep solves every block whose neighbours have moved since its last visit. The result depends neither on the
engine nor on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import count, islice

import numpy as np

from transfusion.alignment.maps import Map
from transfusion.matching.blocks import Block, SearchContext, blocks
from transfusion.matching.methods import Acceptance, BlockOrder, HeadScore, Method, SearchStart
from transfusion.matching.objective import Objective
from transfusion.matching.sweeps import Step, Sweeper
from transfusion.matching.trial import Trial
from transfusion.matching.visits import Visit
from transfusion.matching.weights.gains import Gains
from transfusion.matching.weights.similarity_in_place import AllInPlace, similarity_in_place
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.engines import Engine

UNMOVED = "unmoved"
"""The name of the trial in which no unit moves."""
ALL_BUT_A_FEW = 0.98
"""The share of units in place, in every axis, from which no search is needed. Dead units resemble no unit,
not even themselves."""
CHANCE = 5.0
"""Standard deviations above chance, in some axis, from which the identity is a start worth trying."""


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
        on_step: Callable[[Step], None] = lambda step: None,
        only: Collection[str] | None = None,
    ) -> None:
        self.weights, self.method, self.seed, self.engine = weights, method, seed, engine
        self.only = frozenset(self.axes if only is None else only)
        """The axes to solve for; by default all."""
        self.context = SearchContext(weights, Gains(weights, engine.workers, limit), method)
        self.scores = Objective(weights, engine, None if only is None else weights.tensors_with(only))
        self.sweeper = Sweeper(self.context, self.scores, engine, on_step)
        self._tensors = lru_cache(maxsize=None)(self._tensors_of)

    def run(self) -> Trial:
        """Search from all starts and restarts, and return the best trial."""
        starts = self.method.starts
        if not self.order(0, None):
            return Trial(str(starts[0]), {}, [self.identity, self.identity], still=True)
        if self.method.screen:
            if all(one.home > ALL_BUT_A_FEW for one in self.in_place.axes.values()):
                return Trial(UNMOVED, self._all_unmoved(), [self.identity], still=True)
            if all(one.margin < CHANCE for one in self.in_place.axes.values()):
                starts = tuple(start for start in starts if start is not SearchStart.IDENTITY) or starts
        most = self.method.max_sweeps if len(starts) == 1 else 1
        first = [self._begun(str(start), start, most) for start in starts]
        best = max(first, key=lambda trial: trial.trace[1])
        if len(first) > 1 and best.sweeps == 1:
            best.history.clear()  # the kept gains are those of another trial
        self.go_on(best)
        for again in range(1, self.method.restarts + 1):
            trial = self._begun(f"restart {again}", starts[0], self.method.max_sweeps, again)
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
    def in_place(self) -> AllInPlace:
        """The similarity in place of each axis. The scores of the identity come with it."""
        found = similarity_in_place(self.weights, self.axes, self.engine)
        self.scores.learn(found.scores, {})
        return found

    def _begun(self, name: str, start: SearchStart, most: int = 1, restart: int = 0) -> Trial:
        """Return a trial after its first sweeps."""
        return self.sweep(Trial(name, {}, [self.identity], restart=restart), start, most)

    def go_on(self, trial: Trial) -> Trial:
        """Sweep until no map changes, or an earlier state returns."""
        if not trial.still:
            self.sweep(trial, most=self.method.max_sweeps - trial.sweeps)
        return trial

    def sweep(self, trial: Trial, start: SearchStart | None = None, most: int = 1) -> Trial:
        """Sweep at most so many times; with ``start``, from the first sweep of a trial on."""
        return self.sweeper.run(trial, islice(self._visits(trial, start), max(0, most)))

    # ── orders ───────────────────────────────────────────────────────────────────────────────

    def _visits(self, trial: Trial, start: SearchStart | None) -> Iterator[list[Visit]]:
        """Yield the visits of each sweep from now on."""
        for sweep in count(trial.sweeps):
            order = self.order(sweep, start, trial.restart)
            yield [
                Visit(block, self._tensors(block), sweep, number, len(order), start)
                for number, block in enumerate(order, 1)
            ]
            start = None

    def order(self, sweep: int, start: SearchStart | None, restart: int = 0) -> list[Block]:
        """Return the blocks in the order of a sweep."""
        method, order = self.method, BlockOrder.RANDOM if restart else self.method.order
        if start is SearchStart.SPECTRAL:
            method = replace(method, score=HeadScore.SPECTRAL)
        found = [block for block in blocks(self.weights, method) if self.only.issuperset(block.ids)]
        if start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL) and not restart:
            order = BlockOrder.FORWARD
        if order is BlockOrder.PARALLEL:
            return self._coloured(found)
        if order is BlockOrder.BACKWARD or (order is BlockOrder.ALTERNATING and sweep % 2):
            return found[::-1]
        if order is BlockOrder.RANDOM:
            rng = np.random.default_rng([self.seed, restart, sweep])
            return [found[place] for place in rng.permutation(len(found))]
        return found

    def _coloured(self, order: Sequence[Block]) -> list[Block]:
        """Put blocks that share no tensor beside each other, by greedy colouring."""
        colours: list[list[Block]] = []
        taken: list[set[str]] = []
        for block in order:
            tensors = self._tensors(block)
            fitting = (place for place, others in enumerate(taken) if others.isdisjoint(tensors))
            if (place := next(fitting, len(colours))) == len(colours):
                colours.append([])
                taken.append(set())
            colours[place].append(block)
            taken[place] |= tensors
        return [block for colour in colours for block in colour]

    def _tensors_of(self, block: Block) -> frozenset[str]:
        return frozenset(self.weights.tensors_with(block.ids))

    def _all_unmoved(self) -> dict[str, Map]:
        return {id: self.sweeper.unmoved(id) for id in self.axes}
