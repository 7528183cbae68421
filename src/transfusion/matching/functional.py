"""Functional alignment, and the choice of `auto` between identity, permutation and functional maps.

How A's units correspond to B's is told from what both compute on the same probes. `procrustes` and
`heads_and_experts` solve for the maps of one axis each, and `prediction_quality` measures them on held-out
samples. Axes are solved side by side on an engine, in three stages: neurons and experts, then heads, then the
points of the stream, for which the weights of all others count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from transfusion.alignment.alignment import Alignment, NormFold
from transfusion.alignment.maps import Map
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import Architecture, HeadPolicy
from transfusion.errors import AlignmentError, ArchitectureError, LibraryError, listing
from transfusion.matching.activations.axis_activations import AxisActivations
from transfusion.matching.activations.heads_and_experts import expert_stacks, match_experts, match_heads
from transfusion.matching.activations.prediction_quality import (
    PredictionQuality,
    axis_quality,
    mean_quality,
    prediction_qualities,
)
from transfusion.matching.activations.probed_pair import ProbedPair, run_on_probes
from transfusion.matching.activations.procrustes import solve_axis, solve_stream
from transfusion.matching.methods import FunctionalOptions
from transfusion.matching.search import Step
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.running.live_model import HowToRun
from transfusion.runtime.engines import Engine

CLEARLY = 0.02
"""How much more of B's activations must be predicted for units to move between heads."""
NEARLY = 0.9
"""The share of the best prediction from which a simpler choice is preferred."""
IDENTITY, PERMUTATION, FUNCTIONAL = "identity", "permutation", "functional"


def require_rotatable(*models: Model) -> None:
    """Refuse models whose stream cannot be rotated, as functional alignment does."""
    for model in models:
        if why := model.architecture.unrotated:
            raise AlignmentError(
                f"{model.label}: functional alignment rotates the residual stream, and that of a"
                f" {model.family.name} {why}",
                hint='choose a method that permutes, such as `method="guarded"`',
            )


def align_functional(
    weights: WeightPair,
    options: FunctionalOptions,
    metadata: Provenance,
    on_step: Callable[[Step], None],
    engine: Engine,
    how: HowToRun,
) -> Alignment:
    """Align by activations, with a rotation for every axis that allows one."""
    with run_on_probes(weights.a, weights.b, options, metadata.seed, how) as probed:
        found = _best_heads(probed, options, on_step, engine)
    advice = _with_note(_advice_of(found.quality, probed), _gradient_note(found, probed, options))
    return _aligned(found, replace(metadata, advice=advice))


def _aligned(found: Correspondence, metadata: Provenance) -> Alignment:
    architecture = found.architecture
    metadata = replace(metadata, policy=architecture.policy, architecture=architecture.digest(), objective=())
    return Alignment.of(found.maps, architecture, metadata, found.folds)


def _best_heads(
    probed: ProbedPair, options: FunctionalOptions, on_step: Callable[[Step], None], engine: Engine
) -> Correspondence:
    """Solve with units inside matched heads, or across heads where that is clearly better.

    Neurons are solved once. So are the points of the stream, unless units do move between heads.
    """
    within = correspond(probed, options, engine, on_axis=_counting("pass", on_step))
    if not options.freely:
        return within
    flat = probed.under(replace(within.architecture.policy, heads=HeadPolicy.FLAT))
    across = correspond(flat, options, engine, before=within, on_axis=_counting("flat heads", on_step))
    if mean_quality(across.quality).found <= mean_quality(within.quality).found + CLEARLY:
        return within
    del within
    across = across.branches()
    return correspond(flat, options, engine, before=across, on_axis=_counting("stream", on_step))


def _counting(name: str, on_step: Callable[[Step], None]) -> Callable[[str, int], None]:
    done = count(1)
    return lambda axis, total: on_step(Step(name, 0, next(done), total, axis, None))


def align_auto(
    weights: WeightPair,
    matched: Mapping[str, Map],
    options: FunctionalOptions,
    metadata: Provenance,
    on_step: Callable[[Step], None],
    engine: Engine,
    how: HowToRun,
) -> Alignment:
    """Choose the simplest of identity, permutation and functional maps that predicts B about as well as any.

    If the models cannot be run, the permutation found by the search is kept.
    """
    try:
        require_rotatable(weights.a)
        with run_on_probes(weights.a, weights.b, options, metadata.seed, how) as probed:
            found = _best_heads(probed, options, on_step, engine)
            ways = {
                IDENTITY: prediction_qualities(probed.held_out, {}),
                PERMUTATION: prediction_qualities(probed.held_out, matched),
                FUNCTIONAL: found.quality,
            }
            info = {name: _advice_of(quality, probed) for name, quality in ways.items()}
            note = _gradient_note(found, probed, options)
    except (AlignmentError, ArchitectureError, LibraryError) as error:
        text = f"{metadata.advice['text']}; functional was not tried: {error.message}"
        tried = {"chosen": PERMUTATION, "not_tried": {FUNCTIONAL: str(error)}, "text": text}
        advice = {**metadata.advice, **tried}
        return Alignment.of(dict(matched), weights.architecture, replace(metadata, advice=advice))
    predicted = {name: mean_quality(quality).found for name, quality in ways.items()}
    chosen = next(name for name in predicted if predicted[name] >= NEARLY * max(predicted.values()))
    by_weights = dict(metadata.advice)
    compared = {"chosen": chosen, "predicted_by": predicted}
    if chosen == PERMUTATION:
        text = f"{by_weights['text']}; {_compared(chosen, predicted)}"
        advice = {**by_weights, **compared, "text": text}
        return Alignment.of(dict(matched), weights.architecture, replace(metadata, advice=advice))
    text = _compared(chosen, predicted)
    advice = {**info[chosen], **compared, "text": text, "by_weights": by_weights}
    if chosen == IDENTITY:
        return Alignment.of({}, weights.architecture, replace(metadata, advice=advice))
    return _aligned(found, replace(metadata, advice=_with_note(advice, note)))


def _advice_of(quality: Mapping[str, PredictionQuality], probed: ProbedPair) -> dict[str, Any]:
    """Return the prediction quality as advice for the provenance."""
    every = mean_quality(quality)
    return {
        "verdict": "predicted",
        "text": str(every),
        **asdict(every),
        "axes": {id: asdict(one) for id, one in quality.items()},
        "probes": probed.about,
    }


def _gradient_note(found: Correspondence, probed: ProbedPair, options: FunctionalOptions) -> str:
    """Return what gradients were used for, or why they were not; nothing, if they were not asked for."""
    if not options.gradients:
        return ""
    if (why := probed.evidence.unshared) is not None:
        return f"not used: {why}"
    rotations = [map_ for map_ in found.maps.values() if map_.rotates]
    written = sum(map_.writing is not None for map_ in rotations)
    return f"used for {written} of {len(rotations)} rotations"


def _with_note(advice: dict[str, Any], note: str) -> dict[str, Any]:
    text = f"{advice['text']}; gradients were {note}"
    return {**advice, "gradients": note, "text": text} if note else advice


def _compared(chosen: str, predicted: Mapping[str, float]) -> str:
    others = ", ".join(f"{name} {share:.0%}" for name, share in predicted.items() if name != chosen)
    simplest = ", the simplest that predicts about as much as any" if chosen != FUNCTIONAL else ""
    return f"{chosen} was chosen{simplest}: it predicts {predicted[chosen]:.0%} of B's activations ({others})"


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
