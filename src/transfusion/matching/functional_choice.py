"""Functional alignment, and the choice of `auto` between identity, permutation and functional maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import HeadPolicy
from transfusion.errors import AlignmentError, ArchitectureError, LibraryError
from transfusion.matching.activations.correspondence import Correspondence, correspond
from transfusion.matching.activations.prediction_quality import (
    PredictionQuality,
    mean_quality,
    prediction_qualities,
)
from transfusion.matching.activations.probed_pair import ProbedPair, run_on_probes
from transfusion.matching.methods import FunctionalOptions
from transfusion.matching.search import Step
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.running.running import HowToRun
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
