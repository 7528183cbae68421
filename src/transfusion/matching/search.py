"""The search: coordinate descent on ⟨π(A), B⟩, as in Git Re-Basin (Algorithm 1), from one start or several.

A sweep visits every block whose neighbours have moved since its last visit. Blocks that share no tensor do
not depend on each other and are solved in parallel. Sweeps are repeated until no map changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.matching.assignment import assign, best_totals, solve
from transfusion.matching.gains import NUMBERS, Gains, SimilarityInPlace, gain_numbers, similarity_in_place
from transfusion.matching.methods import Acceptance, BlockOrder, HeadScore, Method, SearchStart
from transfusion.matching.weights import Section, WeightPair, tensor_products
from transfusion.runtime.engines import Engine
from transfusion.runtime.scratch import clear

UNMOVED = "unmoved"
"""The name of the trial in which no unit moves."""
ALL_BUT_A_FEW = 0.98
"""The share of units in place, in every axis, from which no search is needed. Dead units resemble no unit,
not even themselves."""
CHANCE = 5.0
"""Standard deviations above chance, in some axis, from which the identity is a start worth trying."""
LARGEST_NESTED = 8192
"""The most units within all elements of a parent for which every pair of elements is scored."""
COPIES = 7
"""The most copies of a tensor's rows in memory: as stored and converted for both models, with columns moved
by the new and by the old maps, and their difference."""
_SLIGHT = 1e-9
"""The share of a score by which it must rise; less is rounding."""


# ── blocks: axes that are solved together ────────────────────────────────────────────────────


class BlockKind(StrEnum):
    """How a block is solved."""

    AXIS = "axis"
    """One axis: argmax_P ⟨W_B, P W_A P_inᵀ⟩ + ⟨W_B', P_out W_A' Pᵀ⟩, an assignment for each of its rows."""
    SPECTRAL = "spectral"
    """A parent (heads): argmin_P Σ D_{i, P[i]}, with D the distance of singular values of the tensors that
    produce it, such as q, k and v. They depend on no map, so it is solved once."""
    NESTED = "nested"
    """A parent with its children: every pair of elements is scored by the best assignment of its units."""


@dataclass(frozen=True)
class Block:
    """Axes that are solved together, the parent first."""

    kind: BlockKind
    ids: tuple[str, ...]

    def inside(self, section: Section) -> set[str]:
        """Return the children that a section depends on."""
        return {section.id, *section.others} & set(self.ids[1:])


@dataclass(frozen=True)
class Proposal:
    """The best maps for the axes of a block with all other axes fixed."""

    maps: dict[str, Map]
    gap: float = 0.0
    """The share by which a better assignment may exist at most."""


def search_blocks(weights: WeightPair, method: Method) -> list[Block]:
    """Return the blocks of all free axes, in the order of the forward pass."""
    architecture, axes = weights.architecture, weights.axes
    found: list[Block] = []
    done: set[str] = set()
    for id in axes:
        if id in done:
            continue
        children = tuple(child for child in architecture.children.get(id, ()) if child in axes)
        units = max((architecture.sizes[id] * architecture.sizes[child] for child in children), default=0)
        if not children:
            found.append(Block(BlockKind.AXIS, (id,)))
        elif method.score is HeadScore.EXACT and units <= LARGEST_NESTED and id not in architecture.parents:
            # an element within another parent has a map for each of its elements, and is not scored in pairs
            nested = Block(BlockKind.NESTED, (id, *children))
            found.append(nested)
            done |= {
                child
                for child in children
                if all(nested.inside(section) == {child} for section in weights.sections[child])
            }
        else:
            found.append(Block(BlockKind.SPECTRAL, (id,)))
    return found


def propose(gains: Gains, task: tuple[Block, Mapping[str, Map], frozenset[str] | None]) -> Proposal:
    """Return the best maps for the axes of a block with all others fixed.

    The task's last item lists the axes that are solved already; None outside progressive sweeps.
    """
    block, maps, solved = task
    match block.kind:
        case BlockKind.AXIS:
            return _propose_axis(gains, block.ids[0], maps, solved)
        case BlockKind.SPECTRAL:
            distance = spectral_distance(gains, gains.sections(block.ids[0], None))
            return Proposal({block.ids[0]: assign(-distance[None])})
        case BlockKind.NESTED:
            return _propose_nested(gains, block, maps, solved)


def _propose_axis(gains: Gains, id: str, maps: Mapping[str, Map], solved: frozenset[str] | None) -> Proposal:
    sections, here = gains.sections(id, solved), maps.get(id, identity_map(gains.weights, id))
    if gains.in_place(id, {**maps, id: here}, sections):
        return Proposal({id: here})
    found = solve(gains.of(id, maps, sections), known=here)
    return Proposal({id: found.permutation}, found.gap)


def _propose_nested(
    gains: Gains, block: Block, maps: Mapping[str, Map], solved: frozenset[str] | None
) -> Proposal:
    parent, *children = block.ids
    others = {id: map_ for id, map_ in maps.items() if id not in block.ids}
    heads = gains.weights.architecture.sizes[parent]
    scores = torch.zeros(heads, heads, dtype=torch.float64)
    best: dict[str, Map] = {}
    for child in children:
        sections = gains.sections(child, solved, block.ids)
        found = [gains.between(section, others) for section in sections if block.inside(section) == {child}]
        if found:
            pairs = torch.stack(found).sum(0)  # (heads of B, heads of A, units of B, units of A)
            best[child], totals = best_totals(pairs.flatten(0, 1))
            scores += totals.reshape(heads, heads).cpu()  # (heads of B, heads of A)
    sections = gains.sections(parent, solved, block.ids)
    if plain := [section for section in sections if not block.inside(section)]:
        scores += gains.of(parent, others, plain)[0].double().cpu()
    partner = assign(scores[None])
    chosen = np.arange(heads) * heads + partner.index[0]
    return Proposal(
        {parent: partner, **{id: Map.permutation(map_.index[chosen]) for id, map_ in best.items()}}
    )


def spectral_distance(gains: Gains, sections: Sequence[Section]) -> Tensor:
    """Return the distance of singular values between each unit of B and each of A, summed over tensors."""
    tasks = [(section, side) for section in sections for side in "ba"]
    values = gains.workers.map(partial(_singular_values, gains.weights), tasks)
    pairs = zip(values[::2], values[1::2], strict=True)
    return torch.stack([torch.cdist(of_b, of_a) for of_b, of_a in pairs]).sum(0)  # D_ij = Σ ‖Σ_i − Σ_j‖


def _singular_values(weights: WeightPair, task: tuple[Section, str]) -> Tensor:
    section, side = task
    return singular_values(section.unit_matrices(weights.read(side, section.tensor)))


def singular_values(matrices: Tensor) -> Tensor:
    """Return the singular values of a batch of matrices, largest first, by the smaller Gram matrix."""
    matrices = matrices.double()
    if matrices.shape[1] > matrices.shape[2]:
        matrices = matrices.transpose(1, 2)
    squares: Tensor = torch.linalg.eigvalsh(matrices @ matrices.transpose(1, 2))  # σ², (heads, smaller side)
    return squares.clamp(min=0).sqrt().flip(-1)


def block_bytes(weights: WeightPair, block: Block) -> int:
    """Return about how many bytes a block takes: its gain and a copy of it, and rows of both models."""
    read = gains = 0
    for id in block.ids:
        sections, units = weights.sections.get(id, []), gain_numbers(weights, id)
        if block.kind is BlockKind.NESTED and id != block.ids[0]:  # between all pairs of heads
            units *= weights.architecture.rows(id) * (len(sections) + 1)
        gains = max(gains, units)
        for section in sections:
            whole = torch.Size(section.shape).numel()
            by_rows = section.plain and block.kind is not BlockKind.SPECTRAL
            read = max(read, min(whole, NUMBERS) if by_rows else whole)
    return weights.itemsize * (2 * gains + COPIES * read)


def identity_map(weights: WeightPair, id: str) -> Map:
    return Map.identity(weights.architecture.sizes[id], weights.architecture.rows(id))


# ── sweeps over all blocks ───────────────────────────────────────────────────────────────────


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
    """One search: its maps, and a trace of the objective: at first, after each sweep, and of the identity if
    it was better in the end.
    """

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
        self.gains = Gains(weights, method, engine.workers, limit)
        self.only = frozenset(weights.axes if only is None else only)
        """The axes to solve for; by default all."""
        self.tensors = list(weights.tensors) if only is None else weights.tensors_with(only)
        """The tensors of the objective."""

    def run(self) -> Trial:
        """Search from all starts and restarts, and return the best trial."""
        starts, axes = self.method.starts, self.weights.axes
        unmoved = {id: identity_map(self.weights, id) for id in axes}
        if not self.order(0, None):
            return Trial(str(starts[0]), {}, [self.identity, self.identity], still=True)
        if self.method.screen:
            if all(one.home > ALL_BUT_A_FEW for one in self.in_place.values()):
                return Trial(UNMOVED, unmoved, [self.identity], still=True)
            if all(one.margin < CHANCE for one in self.in_place.values()):
                starts = tuple(start for start in starts if start is not SearchStart.IDENTITY) or starts
        trials = [self.sweep(self.begin(str(start)), start) for start in starts]
        best = self.descend(max(trials, key=lambda trial: trial.trace[1]))
        for again in range(1, self.method.restarts + 1):
            trial = self.sweep(self.begin(f"restart {again}", again), starts[0])
            best = max(best, self.descend(trial), key=lambda trial: trial.trace[-1])
        if self.method.accept is Acceptance.RISING and best.trace[-1] < self.identity:
            best = replace(best, maps=unmoved, trace=[*best.trace, self.identity])
        return best

    def begin(self, name: str, restart: int = 0) -> Trial:
        """Return a trial before its first sweep."""
        return Trial(name, {}, [self.identity], restart, scores=dict(self.identity_scores))

    def descend(self, trial: Trial) -> Trial:
        """Sweep until no map changes."""
        while not trial.still and trial.sweeps < self.method.max_sweeps:
            self.sweep(trial)
        return trial

    def sweep(self, trial: Trial, start: SearchStart | None = None) -> Trial:
        """Visit every block that is due, once. ``start`` says how the first sweep of a trial treats axes that
        are not solved yet.
        """
        order = self.order(trial.sweeps, start, trial.restart)
        progressive = start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL)
        done, changed = 0, False
        for colour in self.colours(order):
            due = [block for block in colour if block not in trial.settled]
            tasks = [(block, *self._around(trial, block, progressive)) for block in due]
            found = self.engine.map(partial(propose, self.gains), tasks)
            moved = self._accept(trial, found, always=progressive)
            for block, proposal in zip(due, found, strict=True):
                trial.gaps[block.ids[0]] = proposal.gap
                if not progressive or block.kind is BlockKind.SPECTRAL:
                    trial.settled.add(block)
            trial.settled -= {block for block in trial.settled if self._depends_on(block) & moved}
            changed |= bool(moved)
            for block in colour:
                done += 1
                self.on_step(Step(trial.name, trial.sweeps, done, len(order), block.ids[0], trial.trace[-1]))
            clear()
        self._score_missing(trial, self.tensors)
        trial.trace.append(sum(trial.scores[name] for name in self.tensors))
        self.weights.require_unchanged()
        state = trial.digest()
        trial.still = not changed or state in trial.states
        trial.states.add(state)
        return trial

    def _around(
        self, trial: Trial, block: Block, progressive: bool
    ) -> tuple[dict[str, Map], frozenset[str] | None]:
        """Return the maps that a block depends on, and which axes are solved, in a progressive sweep."""
        maps = {id: trial.maps[id] for id in {*block.ids, *self.neighbours(block)} if id in trial.maps}
        return maps, frozenset(maps) if progressive else None

    def _accept(self, trial: Trial, found: Sequence[Proposal], *, always: bool) -> set[str]:
        """Take over the proposals that raise the objective, or all; return the axes that have moved.

        The proposals are of blocks that share no tensor.
        """
        always = always or self.method.accept is Acceptance.ALWAYS
        for proposal in found:
            for id in proposal.maps:
                trial.maps.setdefault(id, identity_map(self.weights, id))
        fresh = [
            {id: map_ for id, map_ in proposal.maps.items() if map_ != trial.maps[id]} for proposal in found
        ]
        after: dict[str, float] = {}
        if not always:
            every = {id: map_ for maps in fresh for id, map_ in maps.items()}
            names = self.weights.tensors_with(every)
            self._score_missing(trial, names)
            after = self._scores(names, {**trial.maps, **every})
        moved: set[str] = set()
        for maps in fresh:
            names = self.weights.tensors_with(maps)
            before = sum(trial.scores.get(name, 0.0) for name in names)
            if not always and sum(after[name] for name in names) <= before + _SLIGHT * abs(before):
                continue
            for name in names:
                trial.scores.pop(name, None)
            trial.scores.update((name, after[name]) for name in names if name in after)
            trial.maps.update(maps)
            moved |= maps.keys()
        return moved

    # ── the objective ────────────────────────────────────────────────────────────────────────

    def _score_missing(self, trial: Trial, names: Sequence[str]) -> None:
        """Score the tensors whose maps have changed since they were scored."""
        unknown = [name for name in names if name not in trial.scores]
        trial.scores.update(self._scores(unknown, trial.maps))

    def _scores(self, names: Sequence[str], maps: Mapping[str, Map]) -> dict[str, float]:
        found = tensor_products(self.weights, names, maps, self.engine)
        return {name: score for name, (score,) in found.items()}

    @cached_property
    def identity(self) -> float:
        """The objective of the identity."""
        return sum(self.identity_scores[name] for name in self.tensors)

    @cached_property
    def identity_scores(self) -> dict[str, float]:
        """The score of every tensor with nothing moved."""
        known = self._in_place[1] if self.method.screen else {}
        return {**known, **self._scores([name for name in self.tensors if name not in known], {})}

    @property
    def in_place(self) -> Mapping[str, SimilarityInPlace]:
        """How far the units of every axis are in their places without any matching."""
        return self._in_place[0]

    @cached_property
    def _in_place(self) -> tuple[Mapping[str, SimilarityInPlace], Mapping[str, float]]:
        return similarity_in_place(self.weights, self.weights.axes, self.engine)

    # ── the order of blocks ──────────────────────────────────────────────────────────────────

    def order(self, sweep: int, start: SearchStart | None, restart: int = 0) -> list[Block]:
        """Return the blocks in the order of a sweep."""
        method, order = self.method, BlockOrder.RANDOM if restart else self.method.order
        if start is SearchStart.SPECTRAL:
            method = replace(method, score=HeadScore.SPECTRAL)
        found = [block for block in search_blocks(self.weights, method) if self.only.issuperset(block.ids)]
        if start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL) and not restart:
            return found
        if order is BlockOrder.PARALLEL:
            return [block for colour in self.colours(found, first=True) for block in colour]
        if order is BlockOrder.BACKWARD or (order is BlockOrder.ALTERNATING and sweep % 2):
            return found[::-1]
        if order is BlockOrder.RANDOM:
            rng = np.random.default_rng([self.seed, restart, sweep])
            return [found[place] for place in rng.permutation(len(found))]
        return found

    def colours(self, order: Sequence[Block], *, first: bool = False) -> list[list[Block]]:
        """Divide an order into colours, whose blocks share no tensor.

        A block comes after every earlier one that it shares a tensor with, so that solving colour by colour
        gives the same maps as solving block by block; with ``first``, in the first colour that it fits into,
        which gives few and large colours.
        """
        colours: list[list[Block]] = []
        tensors: list[set[str]] = []
        for block in order:
            own = set(self.weights.tensors_with(block.ids))
            clashes = [place for place, taken in enumerate(tensors) if own & taken]
            place = clashes[-1] + 1 if clashes else 0
            if first:
                place = next(at for at in range(len(colours) + 1) if at not in clashes)
            if place == len(colours):
                colours.append([])
                tensors.append(set())
            colours[place].append(block)
            tensors[place] |= own
        return colours

    def neighbours(self, block: Block) -> set[str]:
        """Return the axes outside a block that share a section with it."""
        return {other for id in block.ids for other in self.weights.neighbours[id]} - set(block.ids)

    def _depends_on(self, block: Block) -> set[str]:
        """Return the axes whose maps a proposal depends on; singular values depend on none."""
        return set() if block.kind is BlockKind.SPECTRAL else self.neighbours(block)
