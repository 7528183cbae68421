"""Quality: how well the units of A were found again in B, axis by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.alignment.maps import Permutation
from transfusion.matching.advice import agreements
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.reporting.formatting import kind_of, layer_of
from transfusion.reporting.report_bases import Bases
from transfusion.reporting.report_inputs import Result
from transfusion.runtime.engines import open_engine

PREDICTED = (
    "The share of B's activations that is predicted from A's by π, on inputs that π was not found on:"
    " 1 is everything. Nothing moved: the same without π. Null: the same with A's samples in another order."
)
AGREEMENT = (
    "The correlation between π(A) and B, over all weights that an axis takes part in: 1 is the same weights."
    " Nothing moved: the same without π."
)
SEARCHED = " Null: what the same search finds where there is nothing to be found, for this kind of axis."
SHUFFLED = " Null: A's units in a random order (a search that finds nothing does better than this)."


@dataclass(frozen=True)
class AxisQuality:
    """How well one axis was found again, beside nothing moving and beside chance."""

    id: str
    found: float
    identity: float
    null: float

    @property
    def kind(self) -> str:
        return kind_of(self.id)

    @property
    def layer(self) -> int:
        """The number of its block; 0 for what has none, such as one map for the whole stream."""
        return layer_of(self.id) or 0


@dataclass(frozen=True)
class Qualities:
    """All axes, and what the numbers are."""

    axes: tuple[AxisQuality, ...]
    name: str
    """Of the measure, for an axis of a chart."""
    title: str
    """Of the measure, on its own."""
    about: str
    """What the measure is, in a sentence or three."""

    def kinds(self) -> dict[str, list[AxisQuality]]:
        """The axes of each kind, in the order of their blocks."""
        found: dict[str, list[AxisQuality]] = {}
        for axis in self.axes:
            found.setdefault(axis.kind, []).append(axis)
        return found

    def at(self, id: str, parents: Mapping[str, str]) -> AxisQuality | None:
        """What is known of an axis; of one within a head, of the head, if nothing else is known."""
        known = {axis.id: axis for axis in self.axes}
        place: str | None = id
        while place is not None and place not in known:
            place = parents.get(place)
        return known[place] if place is not None else None


def qualities(
    advice: Mapping[str, Any], pi: Alignment | None, bases: Bases, proofs: Sequence[Result]
) -> Qualities | None:
    """What was measured when π was found or verified; else, for a π that only reorders, what the weights
    say. None where there is nothing to go by.
    """
    info = advice.get("axes") or next((one.info["axes"] for one in proofs if "axes" in one.info), None)
    if info:
        axes = tuple(AxisQuality(id, one["found"], one["identity"], one["null"]) for id, one in info.items())
        return Qualities(axes, "share predicted", "of B's activations predicted", PREDICTED)
    if pi is None or bases.a is None or bases.b is None:
        return None
    if not all(isinstance(map_, Permutation) for map_ in pi.maps.values()):
        return None
    return _by_weights(pi, bases, {kind: one.get("null") for kind, one in advice.get("margins", {}).items()})


def _by_weights(pi: Alignment, bases: Bases, nulls: Mapping[str, float | None]) -> Qualities | None:
    """Read both bases tensor by tensor, under π, as they are, and shuffled."""
    assert bases.a is not None
    assert bases.b is not None
    policy = pi.provenance.policy
    weights = WeightPair(bases.a.under(policy), bases.b.under(policy))
    spaces = weights.architecture.spaces
    ids = [space.id for space in weights.architecture.free() if weights.has_evidence_for(space.id)]
    if not ids:
        return None
    with open_engine() as engine:
        found = agreements(weights, pi.maps, ids, engine)
        identity = agreements(weights, {}, ids, engine)
        known = all(nulls.get(spaces[id].axis) is not None for id in ids)
        chance = {} if known else agreements(weights, random_maps(weights.architecture, 0), ids, engine)
    null = {id: chance[id] if chance else float(nulls[spaces[id].axis] or 0.0) for id in ids}
    axes = tuple(AxisQuality(id, found[id], identity[id], null[id]) for id in ids)
    return Qualities(
        axes, "correlation", "correlation of π(A) with B", AGREEMENT + (SEARCHED if known else SHUFFLED)
    )
