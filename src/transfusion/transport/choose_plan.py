"""The plan of a transport: for two bases of one shape, or of two."""

from __future__ import annotations

from pathlib import Path

from transfusion.alignment.alignment import Alignment
from transfusion.errors import MismatchError
from transfusion.model.bases import differing_shape
from transfusion.model.model import Model
from transfusion.transport.rectangular.rectangular_plan import RectangularPlan
from transfusion.transport.transport_plan import Base, TransportPlan


def plan_through(base: Base, onto: Base, via: Alignment | str | Path) -> TransportPlan:
    """Return the plan of an alignment, checked against both models."""
    alignment = Alignment.load(via) if isinstance(via, str | Path) else via
    if alignment.other_shape:
        return RectangularPlan.through(base, onto, alignment)
    return TransportPlan.between(base, onto, alignment)


def assumed_plan(a: Model, b: Model, via: Alignment | None = None) -> TransportPlan:
    """Return a plan for dry runs and early refusals; without an alignment, every map is assumed."""
    if differing_shape(a, b) is None:
        if via is not None and via.other_shape:
            raise MismatchError(
                f"this π is one between models of different shapes, and {a.label} and {b.label} have the"
                " same",
                hint="give the π that belongs to these models",
            )
        return TransportPlan.planned(a, b, via, assumed=True)
    if via is not None and via.other_shape:
        return RectangularPlan(a, b, via)
    return RectangularPlan.assumed(a, b)
