"""Turning: maps from what both models compute, and when to prefer them to what a search has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from transfusion.alignment import Alignment
from transfusion.architecture import Architecture, Heads
from transfusion.errors import AlignmentError, ArchitectureError, LibraryError
from transfusion.evidence.weights import Weights
from transfusion.functional import Correspondence, Hearing, Quality, correspond, hearing, mean, qualities
from transfusion.maps import Map
from transfusion.matching.search import Step
from transfusion.methods import Functional
from transfusion.provenance import Provenance

CLEARLY = 0.02
"""How much more of B's activations must be predicted for units to leave their heads."""
NEARLY = 0.9
"""The share of the best prediction that a simpler way must reach to be preferred."""
IDENTITY, PERMUTATION, FUNCTIONAL = "identity", "permutation", "functional"


def turned(
    weights: Weights, options: Functional, story: Provenance, on_step: Callable[[Step], None]
) -> Alignment:
    """A rotation for every axis that allows one."""
    with hearing(weights.a, weights.b, options, story.seed) as heard:
        found = _turned(heard, options, on_step)
    return found.alignment(replace(story, advice=_told(found.quality, heard)))


@dataclass(frozen=True)
class _Turned:
    """What was found, for the axes of an architecture, and what it is worth."""

    found: Correspondence
    quality: Mapping[str, Quality]
    architecture: Architecture

    def alignment(self, story: Provenance) -> Alignment:
        policy, digest = self.architecture.policy, self.architecture.digest()
        story = replace(story, policy=policy, architecture=digest, objective=())
        return Alignment.of(self.found.maps, self.architecture, story, self.found.folds)


def _turned(heard: Hearing, options: Functional, on_step: Callable[[Step], None]) -> _Turned:
    """Units turned within heads that go together; or from head to head, where that is clearly better."""
    within = _tried(heard, options, on_step)
    if not options.freely:
        return within
    policy = replace(within.architecture.policy, heads=Heads.FLAT)
    across = _tried(heard.under(policy), options, on_step)
    better = mean(across.quality).found > mean(within.quality).found + CLEARLY
    return across if better else within


def _tried(heard: Hearing, options: Functional, on_step: Callable[[Step], None]) -> _Turned:
    architecture = heard.evidence.architecture
    total, done = sum(space.parent is None for space in architecture.free()), count(1)

    def on_axis(id: str) -> None:
        on_step(Step("pass", 0, next(done), total, id, None))

    found = correspond(heard.evidence, options, on_axis=on_axis)
    return _Turned(found, qualities(heard.held_out, found.maps), architecture)


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
            found = _turned(heard, options, on_step)
            ways = {
                IDENTITY: qualities(heard.held_out, {}),
                PERMUTATION: qualities(heard.held_out, matched),
                FUNCTIONAL: found.quality,
            }
            told = {name: _told(quality, heard) for name, quality in ways.items()}
    except (AlignmentError, ArchitectureError, LibraryError) as error:
        text = f"{story.advice['text']}; functional was not tried: {error}"
        note = {**story.advice, "chosen": PERMUTATION, "not_tried": {FUNCTIONAL: str(error)}, "text": text}
        return Alignment.of(dict(matched), weights.architecture, replace(story, advice=note))
    predicted = {name: mean(quality).found for name, quality in ways.items()}
    chosen = next(name for name in predicted if predicted[name] >= NEARLY * max(predicted.values()))
    by_weights = dict(story.advice)
    compared = {"chosen": chosen, "predicted_by": predicted}
    if chosen == PERMUTATION:
        text = f"{by_weights['text']}; {_compared(chosen, predicted)}"
        advice = {**by_weights, **compared, "text": text}
        return Alignment.of(dict(matched), weights.architecture, replace(story, advice=advice))
    text = _compared(chosen, predicted)
    advice = {**told[chosen], **compared, "text": text, "by_weights": by_weights}
    story = replace(story, advice=advice)
    if chosen == IDENTITY:
        return Alignment.of({}, weights.architecture, story)
    return found.alignment(story)


def _told(quality: Mapping[str, Quality], heard: Hearing) -> dict[str, Any]:
    """What maps are worth, in words and in numbers."""
    every = mean(quality)
    return {
        "verdict": "predicted",
        "text": str(every),
        **asdict(every),
        "axes": {id: asdict(one) for id, one in quality.items()},
        "probes": heard.about,
    }


def _compared(chosen: str, predicted: Mapping[str, float]) -> str:
    others = ", ".join(f"{name} {share:.0%}" for name, share in predicted.items() if name != chosen)
    return f"{chosen} was chosen, which predicts {predicted[chosen]:.0%} of B's activations ({others})"
