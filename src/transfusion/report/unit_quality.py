"""Quality: how well the units of A match those of B under π, axis by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.matching.advice import agreements
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.report.formatting import kind_of, layer_of
from transfusion.report.report_bases import Bases
from transfusion.report.report_inputs import Result
from transfusion.runtime.engines import open_engine

PREDICTED = (
    "The share of B's activations that π predicts from A's, on inputs that were not used to find π:"
    " 1 is everything. Nothing moved: the same without π. Null: the same with A's samples in another order."
)
AGREEMENT = (
    "The correlation between π(A) and B, over all weights that an axis takes part in: 1 is the same weights."
    " Nothing moved: the same without π."
)
SEARCHED = (
    " Null: the correlation that the same search finds between unrelated models, for this kind of axis."
)
SHUFFLED = " Null: A's units in a random order; a search between unrelated models reaches more than this."


@dataclass(frozen=True)
class AxisQuality:
    """How well one axis matches: under π, with nothing moved, and in the null."""

    id: str
    found: float
    identity: float
    null: float

    @property
    def kind(self) -> str:
        return kind_of(self.id)

    @property
    def layer(self) -> int:
        """The number of the block; 0 for an axis of no block, such as a tied stream."""
        return layer_of(self.id) or 0


@dataclass(frozen=True)
class Qualities:
    """The quality of all axes, and a description of the measure."""

    axes: tuple[AxisQuality, ...]
    name: str
    """The measure's name on the scale of a chart."""
    title: str
    """The measure's name beside a number."""
    about: str
    """The definition of the measure."""

    def kinds(self) -> dict[str, list[AxisQuality]]:
        """Group the axes by kind, in the order of their blocks."""
        found: dict[str, list[AxisQuality]] = {}
        for axis in self.axes:
            found.setdefault(axis.kind, []).append(axis)
        return found

    def at(self, id: str, parents: Mapping[str, str]) -> AxisQuality | None:
        """Return the quality of an axis, or else of the axis that it lies within."""
        known = {axis.id: axis for axis in self.axes}
        place: str | None = id
        while place is not None and place not in known:
            place = parents.get(place)
        return known[place] if place is not None else None


def qualities(
    advice: Mapping[str, Any], pi: Alignment | None, bases: Bases, proofs: Sequence[Result]
) -> Qualities | None:
    """Return the quality that was measured when π was found or verified.

    Without such a measurement, a π of permutations is compared by weights. Otherwise return None.
    """
    info = advice.get("axes") or next((one.info["axes"] for one in proofs if "axes" in one.info), None)
    if info:
        axes = tuple(AxisQuality(id, one["found"], one["identity"], one["null"]) for id, one in info.items())
        return Qualities(axes, "share predicted", "of B's activations predicted", PREDICTED)
    if pi is None or bases.a is None or bases.b is None:
        return None
    if not all(map_.permutes for map_ in pi.maps.values()):
        return None
    return _by_weights(pi, bases, {kind: one.get("null") for kind, one in advice.get("margins", {}).items()})


def _by_weights(pi: Alignment, bases: Bases, nulls: Mapping[str, float | None]) -> Qualities | None:
    """Compare both bases tensor by tensor: under π, with nothing moved, and shuffled."""
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
