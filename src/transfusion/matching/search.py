"""The search: coordinate descent on ⟨π(A), B⟩, as in Git Re-Basin (Algorithm 1), from one start or several.

A sweep visits every block whose neighbours have moved since its last visit. Blocks that share no tensor do
not depend on each other and are solved in parallel. Sweeps are repeated until no map changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256

import numpy as np

from transfusion.alignment.maps import Map
from transfusion.matching.blocks import Block, Evidence, Proposal, SpectralBlock, blocks
from transfusion.matching.methods import Acceptance, BlockOrder, HeadScore, Method, SearchStart
from transfusion.matching.weights.gains import Gains
from transfusion.matching.weights.similarity_in_place import AllInPlace, similarity_in_place
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
    """One search: its maps, and the objective before the first sweep and after each."""

    name: str
    maps: dict[str, Map]
    """The axes that are solved have a map."""
    trace: list[float]
    restart: int = 0
    """The number of a further search in random order; 0 for the first."""
    still: bool = False
    """Whether no map changed in the last sweep, or an earlier state returned."""
    scores: dict[str, float] = field(default_factory=dict, repr=False)
    """⟨π(A), B⟩ of the tensors for which it is known with the current maps."""
    settled: set[Block] = field(default_factory=set, repr=False)
    """Blocks that were solved by all of their evidence, and whose neighbours have not moved since."""
    states: set[str] = field(default_factory=set, repr=False)
    """Hashes of the maps after each sweep."""
    gaps: dict[str, float] = field(default_factory=dict, repr=False)
    """For the first axis of each block, the share by which a better assignment may exist at most."""

    @property
    def sweeps(self) -> int:
        return len(self.trace) - 1

    def digest(self) -> str:
        """Return a hash of all maps."""
        total = sha256()
        for id in sorted(self.maps):
            total.update(self.maps[id].index.tobytes())
        return total.hexdigest()


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
        self.weights, self.method, self.seed = weights, method, seed
        self.engine, self.on_step = engine, on_step
        self.evidence = Evidence(weights, Gains(weights, engine.workers, limit), method)
        self.only = frozenset(self.axes if only is None else only)
        """The axes to solve for; by default all."""
        self.tensors = list(weights.tensors) if only is None else weights.tensors_with(only)
        """The tensors of the objective."""

    def run(self) -> Trial:
        """Search from all starts and restarts, and return the best trial."""
        starts, most = self.method.starts, self.method.max_sweeps
        if not self.order(0, None):
            return Trial(str(starts[0]), {}, [self.identity, self.identity], still=True)
        if self.method.screen:
            in_place = self.in_place.axes.values()
            if all(one.home > ALL_BUT_A_FEW for one in in_place):
                return Trial(UNMOVED, self._unmoved(self.axes), [self.identity], still=True)
            if all(one.margin < CHANCE for one in in_place):
                starts = tuple(start for start in starts if start is not SearchStart.IDENTITY) or starts
        trials = [self.sweep(self.begin(str(start)), start) for start in starts]
        best = self.descend(max(trials, key=lambda trial: trial.trace[1]), most)
        for again in range(1, self.method.restarts + 1):
            trial = self.sweep(self.begin(f"restart {again}", again), starts[0])
            best = max(best, self.descend(trial, most), key=lambda trial: trial.trace[-1])
        if self.method.accept is Acceptance.RISING and best.trace[-1] < self.identity:
            best = replace(best, maps=self._unmoved(self.axes), trace=[*best.trace, self.identity])
        return best

    def begin(self, name: str, restart: int = 0) -> Trial:
        """Return a trial before its first sweep."""
        return Trial(name, {}, [self.identity], restart, scores=dict(self.identity_scores))

    def descend(self, trial: Trial, most: int) -> Trial:
        """Sweep until no map changes, or ``most`` sweeps are made."""
        while not trial.still and trial.sweeps < most:
            self.sweep(trial)
        return trial

    def sweep(self, trial: Trial, start: SearchStart | None = None) -> Trial:
        """Visit every block that is due, once. ``start`` says how the first sweep of a trial treats axes that
        are not solved yet.
        """
        order = self.order(trial.sweeps, start, trial.restart)
        progressive = start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL)
        done, changed = 0, False
        for colour in self._colours(order):
            due = [block for block in colour if block not in trial.settled]
            tasks = [(block, *self._around(trial, block, progressive)) for block in due]
            found = self.engine.map(partial(_propose, self.evidence), tasks)
            accepted = self._accept(trial, found, always=progressive)
            for block, proposal in zip(due, found, strict=True):
                trial.gaps[block.ids[0]] = proposal.gap
                if not progressive or isinstance(block, SpectralBlock):
                    trial.settled.add(block)
            trial.settled -= {block for block in trial.settled if self._depends_on(block) & accepted}
            changed |= bool(accepted)
            for block in colour:
                done += 1
                step = Step(trial.name, trial.sweeps, done, len(order), block.ids[0], trial.trace[-1])
                self.on_step(step)
            clear()
        trial.trace.append(self._objective(trial))
        self.weights.require_unchanged()
        state = trial.digest()
        trial.still = not changed or state in trial.states
        trial.states.add(state)
        return trial

    # ── one visit ────────────────────────────────────────────────────────────────────────────

    def _around(
        self, trial: Trial, block: Block, progressive: bool
    ) -> tuple[dict[str, Map], frozenset[str] | None]:
        """Return the maps that a block depends on, and which axes are solved, in a progressive sweep."""
        maps = {id: trial.maps[id] for id in {*block.ids, *self._neighbours(block)} if id in trial.maps}
        return maps, frozenset(maps) if progressive else None

    def _accept(self, trial: Trial, found: Sequence[Proposal], *, always: bool) -> set[str]:
        """Take over the proposals that raise the objective, or all; return the axes that have changed.

        The proposals are of blocks that share no tensor.
        """
        always = always or self.method.accept is Acceptance.ALWAYS
        fresh = [self._fresh(trial, proposal) for proposal in found]
        after = {} if always else self._scores_with(trial, fresh)
        accepted: set[str] = set()
        for proposal, maps in zip(found, fresh, strict=True):
            for id in proposal.maps:
                trial.maps.setdefault(id, self._identity(id))
            names = self.weights.tensors_with(maps)
            if always:
                for name in names:
                    trial.scores.pop(name, None)
            else:
                before = sum(trial.scores[name] for name in names)
                if sum(after[name] for name in names) <= before + _SLIGHT * abs(before):
                    continue
                trial.scores.update((name, after[name]) for name in names)
            trial.maps.update(maps)
            accepted |= maps.keys()
        return accepted

    def _fresh(self, trial: Trial, proposal: Proposal) -> dict[str, Map]:
        """Return the proposed maps that differ from the current ones."""
        return {
            id: map_
            for id, map_ in proposal.maps.items()
            if map_ != (trial.maps[id] if id in trial.maps else self._identity(id))
        }

    def _scores_with(self, trial: Trial, fresh: Sequence[Mapping[str, Map]]) -> dict[str, float]:
        """Return the scores of the tensors that fresh maps move; those without them are known afterwards."""
        moved = {id: map_ for maps in fresh for id, map_ in maps.items()}
        names = self.weights.tensors_with(moved)
        self._complete(trial, names)
        return self._score(names, {**trial.maps, **moved})

    # ── the objective ────────────────────────────────────────────────────────────────────────

    def _objective(self, trial: Trial) -> float:
        """Return ⟨π(A), B⟩; only tensors whose maps have changed are read."""
        self._complete(trial, self.tensors)
        return sum(trial.scores[name] for name in self.tensors)

    def _complete(self, trial: Trial, names: Sequence[str]) -> None:
        """Score the tensors whose score is not known."""
        unknown = [name for name in names if name not in trial.scores]
        trial.scores.update(self._score(unknown, trial.maps))

    def _score(self, names: Sequence[str], maps: Mapping[str, Map]) -> dict[str, float]:
        return score_tensors(self.weights, names, maps, self.engine)

    @cached_property
    def identity(self) -> float:
        """The objective of the identity."""
        return sum(self.identity_scores[name] for name in self.tensors)

    @cached_property
    def identity_scores(self) -> dict[str, float]:
        """The score of every tensor with nothing moved."""
        known = dict(self.in_place.scores) if self.method.screen else {}
        unknown = [name for name in self.tensors if name not in known]
        return {**known, **self._score(unknown, {})}

    @cached_property
    def in_place(self) -> AllInPlace:
        """The similarity in place of each axis. Scores of the identity come with it."""
        return similarity_in_place(self.weights, self.axes, self.engine)

    # ── blocks and their order ───────────────────────────────────────────────────────────────

    @cached_property
    def axes(self) -> list[str]:
        """The free axes that occur in some tensor."""
        return [
            space.id for space in self.weights.architecture.free() if self.weights.has_evidence_for(space.id)
        ]

    def order(self, sweep: int, start: SearchStart | None, restart: int = 0) -> list[Block]:
        """Return the blocks in the order of a sweep."""
        method, order = self.method, BlockOrder.RANDOM if restart else self.method.order
        if start is SearchStart.SPECTRAL:
            method = replace(method, score=HeadScore.SPECTRAL)
        found = [block for block in blocks(self.weights, method) if self.only.issuperset(block.ids)]
        if start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL) and not restart:
            order = BlockOrder.FORWARD
        if order is BlockOrder.PARALLEL:
            return self._by_first_colour(found)
        if order is BlockOrder.BACKWARD or (order is BlockOrder.ALTERNATING and sweep % 2):
            return found[::-1]
        if order is BlockOrder.RANDOM:
            rng = np.random.default_rng([self.seed, restart, sweep])
            return [found[place] for place in rng.permutation(len(found))]
        return found

    def _colours(self, order: Sequence[Block]) -> list[list[Block]]:
        """Divide an order into groups that share no tensor, so that solving one group after the other gives
        the same maps as solving one block after the other.
        """
        colours: list[list[Block]] = []
        last: dict[str, int] = {}  # for every tensor, the last colour that has it
        for block in order:
            tensors = self.weights.tensors_with(block.ids)
            place = 1 + max((last[name] for name in tensors if name in last), default=-1)
            if place == len(colours):
                colours.append([])
            colours[place].append(block)
            last.update(dict.fromkeys(tensors, place))
        return colours

    def _by_first_colour(self, order: Sequence[Block]) -> list[Block]:
        """Put blocks that share no tensor beside each other, by greedy colouring: few and large colours."""
        colours: list[tuple[list[Block], set[str]]] = []
        for block in order:
            tensors = self.weights.tensors_with(block.ids)
            fitting = next((one for one in colours if one[1].isdisjoint(tensors)), None)
            if fitting is None:
                colours.append(fitting := ([], set()))
            fitting[0].append(block)
            fitting[1].update(tensors)
        return [block for colour, _ in colours for block in colour]

    def _neighbours(self, block: Block) -> set[str]:
        """Return the axes outside a block that share a section with it."""
        return {other for id in block.ids for other in self.weights.neighbours[id]} - set(block.ids)

    def _depends_on(self, block: Block) -> set[str]:
        """Return the axes whose maps a proposal depends on; singular values depend on none."""
        return set() if isinstance(block, SpectralBlock) else self._neighbours(block)

    def _unmoved(self, ids: Collection[str]) -> dict[str, Map]:
        return {id: self._identity(id) for id in ids}

    def _identity(self, id: str) -> Map:
        architecture = self.weights.architecture
        return Map.identity(architecture.sizes[id], architecture.rows(id))


def _propose(evidence: Evidence, task: tuple[Block, Mapping[str, Map], frozenset[str] | None]) -> Proposal:
    block, maps, solved = task
    return block.propose(evidence, maps, solved)


def score_tensors(
    weights: WeightPair, names: Sequence[str], maps: Mapping[str, Map], engine: Engine
) -> dict[str, float]:
    """Return ⟨π(A), B⟩ of each tensor."""
    items = [(name, weights.beside(name, maps)) for name in names]
    return dict(zip(names, engine.map(partial(_score, weights), items), strict=True))


def _score(weights: WeightPair, item: tuple[str, Mapping[str, Map]]) -> float:
    return weights.score(*item)
