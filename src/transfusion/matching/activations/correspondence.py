"""Functional alignment: how A's units correspond to B's, from what both compute on the same probes.

`procrustes`, `head_matching` and `expert_matching` solve for the maps of one axis each, and
`prediction_quality` measures them on held-out samples. Axes are solved side by side on an engine, in three
stages: neurons and experts, then heads, then the points of the stream, for which the weights of all others
count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transfusion.alignment.alignment import NormFold
from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import Architecture
from transfusion.errors import AlignmentError, listing
from transfusion.matching.activations.axis_activations import AxisActivations
from transfusion.matching.activations.expert_matching import expert_stacks, match_experts
from transfusion.matching.activations.head_matching import match_heads
from transfusion.matching.activations.prediction_quality import PredictionQuality, axis_quality
from transfusion.matching.activations.probed_pair import ProbedPair
from transfusion.matching.activations.procrustes import solve_axis, solve_stream
from transfusion.matching.methods import FunctionalOptions
from transfusion.runtime.engines import Engine


@dataclass(frozen=True)
class Correspondence:
    """The maps of functional alignment, and how well they predict B's held-out activations."""

    architecture: Architecture
    maps: dict[str, Map] = field(default_factory=dict)
    quality: dict[str, PredictionQuality] = field(default_factory=dict)
    """By axis without a parent, its children included."""
    folds: dict[str, NormFold] = field(default_factory=dict)
    """For every tensor that reads the stream through a norm, the norm."""

    def branches(self) -> Correspondence:
        """Return the same without the points of the stream."""
        spaces = self.architecture.spaces
        maps = {id: map_ for id, map_ in self.maps.items() if spaces[id].stream is None}
        quality = {id: one for id, one in self.quality.items() if spaces[id].stream is None}
        return replace(self, maps=maps, quality=quality)


@dataclass(frozen=True)
class _Solved:
    maps: dict[str, Map]
    quality: PredictionQuality | None


@dataclass(frozen=True)
class _Stage:
    """Axes that can be solved side by side, and the maps that they need."""

    probed: ProbedPair
    options: FunctionalOptions
    solve: Callable[[AxisActivations, str, FunctionalOptions, Mapping[str, Map]], dict[str, Map]]
    known: Mapping[str, Map] = field(default_factory=dict)

    def solved(self, id: str) -> _Solved:
        maps = self.solve(self.probed.evidence, id, self.options, self.known)
        space = self.probed.evidence.architecture.spaces[id]
        moves = space in self.probed.evidence.architecture.moving() and space.parent is None
        every = {**self.known, **maps}  # the units within heads may have been solved before
        return _Solved(maps, axis_quality(self.probed.held_out, id, every) if moves else None)


def correspond(
    probed: ProbedPair,
    options: FunctionalOptions,
    engine: Engine,
    *,
    before: Correspondence | None = None,
    on_axis: Callable[[str, int], None] = lambda axis, total: None,
) -> Correspondence:
    """Find a map for every axis that may move.

    ``before`` has the maps under another policy: axes that are the same under both are not solved again.
    ``on_axis`` is called with every axis, and how many there are.
    """
    evidence = probed.evidence
    found = Correspondence(evidence.architecture, folds=evidence.folds)
    branches, heads, streams = _axes(evidence)
    if before is not None:
        branches, heads, streams = (_taken_over(found, before, ids) for ids in (branches, heads, streams))
    total = len(branches) + len(heads) + len(streams)

    def run(ids: Sequence[str], stage: _Stage) -> None:
        results = engine.map(stage.solved, ids, on_result=lambda axis, result: on_axis(axis, total))
        for id, result in zip(ids, results, strict=True):
            found.maps.update(result.maps)
            if result.quality is not None:
                found.quality[id] = result.quality

    run(branches, _Stage(probed, options, _branch))
    shared = {id: map_ for id, map_ in found.maps.items() if id in _within_heads(evidence)}
    run(heads, _Stage(probed, options, match_heads, shared))
    run(streams, _Stage(probed, options, solve_stream, dict(found.maps)))
    missing = [space.id for space in evidence.architecture.moving() if space.id not in found.maps]
    if missing:
        raise AlignmentError(
            f"no module of {evidence.a.label} shows what the units of {listing(missing, 3)} compute",
            hint='choose a method that compares weights, such as `method="guarded"`',
        )
    return found


def _axes(evidence: AxisActivations) -> tuple[list[str], list[str], list[str]]:
    """Return the axes of neurons and experts, those of heads, and the points of the stream."""
    free = evidence.architecture.moving()
    parents, stacks = evidence.parent_axes(), expert_stacks(evidence)
    apart = [
        space.id
        for space in free
        if space.parent is None
        and space.stream is None
        and space.id not in parents
        and space.id not in stacks
    ]
    return [*stacks, *apart], parents, [space.id for space in free if space.stream is not None]


def _branch(
    evidence: AxisActivations, id: str, options: FunctionalOptions, known: Mapping[str, Map]
) -> dict[str, Map]:
    stack = expert_stacks(evidence).get(id)
    return solve_axis(evidence, id, options) if stack is None else match_experts(stack)


def _within_heads(evidence: AxisActivations) -> frozenset[str]:
    """Return the axes that all heads share."""
    parents = set(evidence.parent_axes())
    layouts = evidence.architecture.tensors.values()
    return frozenset(
        name for layout in layouts for name in layout.names() if parents.intersection(layout.names())
    )


def _taken_over(found: Correspondence, before: Correspondence, ids: Sequence[str]) -> list[str]:
    """Take over the maps of axes that have not changed, with their children; return the others."""
    left: list[str] = []
    for id in ids:
        family = {id, *_children(found.architecture, id), *_children(before.architecture, id)}
        moved = [one for one in family if one in before.maps]
        same = all(
            found.architecture.spaces.get(one) == before.architecture.spaces.get(one) for one in family
        )
        if same and moved:
            found.maps.update({one: before.maps[one] for one in moved})
            if id in before.quality:
                found.quality[id] = before.quality[id]
        else:
            left.append(id)
    return left


def _children(architecture: Architecture, id: str) -> list[str]:
    return [space.id for space in architecture.spaces.values() if space.parent == id]
