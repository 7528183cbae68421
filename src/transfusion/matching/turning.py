"""Turning: maps from what both models compute, and when to prefer them to what a search has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from transfusion.alignment import Alignment, Provenance
from transfusion.errors import AlignmentError, ArchitectureError, LibraryError
from transfusion.evidence.weights import Weights
from transfusion.functional import Correspondence, Hearing, Quality, correspond, hearing, mean, qualities
from transfusion.maps import Map
from transfusion.matching.search import Step
from transfusion.methods import Functional

CLEARLY = 0.02
"""How much more of B's activations a less simple way must predict to be preferred."""
IDENTITY, PERMUTATION, FUNCTIONAL = "identity", "permutation", "functional"


def turned(
    weights: Weights, options: Functional, story: Provenance, on_step: Callable[[Step], None]
) -> Alignment:
    """A rotation for every axis that allows one."""
    with hearing(weights.a, weights.b, options, story.seed) as heard:
        found = _correspondence(weights, heard, options, on_step)
        told = _told(qualities(heard.held_out, found.maps), heard)
    return _as_alignment(weights, found, replace(story, advice=told))


def best(
    weights: Weights,
    matched: Mapping[str, Map],
    options: Functional,
    story: Provenance,
    on_step: Callable[[Step], None],
) -> Alignment:
    """The simplest of three ways that predicts B about as well as any: nothing moves, units go where a
    search has put them, or they are turned. Where models cannot be run, weights alone have spoken.
    """
    try:
        with hearing(weights.a, weights.b, options, story.seed) as heard:
            found = _correspondence(weights, heard, options, on_step)
            ways = {
                name: qualities(heard.held_out, maps)
                for name, maps in ((IDENTITY, {}), (PERMUTATION, matched), (FUNCTIONAL, found.maps))
            }
            told = {name: _told(quality, heard) for name, quality in ways.items()}
    except (AlignmentError, ArchitectureError, LibraryError) as error:
        note = {**story.advice, "chosen": PERMUTATION, "not_tried": {FUNCTIONAL: str(error)}}
        return Alignment.of(dict(matched), weights.architecture, replace(story, advice=note))
    predicted = {name: mean(quality).found for name, quality in ways.items()}
    chosen = next(name for name in predicted if predicted[name] >= max(predicted.values()) - CLEARLY)
    by_weights = dict(story.advice)
    compared = {"chosen": chosen, "predicted_by": predicted}
    if chosen == PERMUTATION:
        advice = {**by_weights, **compared}
        return Alignment.of(dict(matched), weights.architecture, replace(story, advice=advice))
    text = f"{chosen} was chosen: {_compared(predicted)}"
    advice = {**told[chosen], **compared, "text": text, "by_weights": by_weights}
    story = replace(story, advice=advice)
    if chosen == IDENTITY:
        return Alignment.of({}, weights.architecture, story)
    return _as_alignment(weights, found, replace(story, objective=()))


def _correspondence(
    weights: Weights, heard: Hearing, options: Functional, on_step: Callable[[Step], None]
) -> Correspondence:
    total, done = sum(space.parent is None for space in weights.architecture.moving()), count(1)

    def on_axis(id: str) -> None:
        on_step(Step("pass", 0, next(done), total, id, 0.0))

    return correspond(heard.evidence, options, on_axis=on_axis)


def _as_alignment(weights: Weights, found: Correspondence, story: Provenance) -> Alignment:
    return Alignment.of(found.maps, weights.architecture, story, found.folds)


def _told(quality: Mapping[str, Quality], heard: Hearing) -> dict[str, Any]:
    """What maps are worth, in words and in numbers."""
    every = mean(quality)
    text = (
        f"{every.found:.0%} of B's activations are predicted from A's, {every.identity:.0%} with nothing"
        f" moved and {every.null:.0%} by chance"
    )
    return {
        "verdict": "predicted",
        "text": text,
        **asdict(every),
        "axes": {id: asdict(one) for id, one in quality.items()},
        "probes": heard.about,
    }


def _compared(predicted: Mapping[str, float]) -> str:
    ways = [f"{share:.0%} by {name}" for name, share in predicted.items()]
    return f"of B's activations, {', '.join(ways)} are predicted from A's"
