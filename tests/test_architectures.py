"""The certification that every table must pass, through the real library's own model code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from families import CASES
from transfusion.alignment import Alignment, Provenance, random_maps
from transfusion.architecture import Architecture, Inner, Residual
from transfusion.architectures import families
from transfusion.binding import bind
from transfusion.errors import ArchitectureError
from transfusion.live import Live, largest_difference
from transfusion.model import Model
from transfusion.tables import Group

EXACT = 1e-9
APART = 1e-6


def moving(architecture: Architecture, seed: int = 5, only: str | None = None) -> Alignment:
    """A random move of every free axis, or of all axes of one name, whether they are free or not."""
    if only is not None:
        spaces = {
            id: replace(space, group=Group.PERMUTATION if space.axis == only else Group.FIXED)
            for id, space in architecture.spaces.items()
        }
        architecture = replace(architecture, spaces=spaces)
    story = Provenance("", "", architecture.residual, architecture.inner, "random", {}, seed, "", "", "", "")
    return Alignment.of(random_maps(architecture, seed), architecture, story)


@pytest.fixture(params=CASES, scope="module")
def model(request, made) -> Model:
    return Model.open(made(request.param))


def differences(live: Live, alignment: Alignment, *, shortcuts: bool = True) -> float:
    before = live.outputs()
    with live.moved(alignment, shortcuts=shortcuts):
        return largest_difference(live.expected(alignment, before), live.outputs())


def test_a_tied_stream_keeps_the_function(model: Model):
    model = model.under(Residual.TIED, Inner.FREE)
    alignment = moving(model.architecture)
    assert len(alignment.maps) == len(model.architecture.free())
    assert all(not map_.is_identity() for map_ in alignment.maps.values())
    assert differences(Live.of(model), alignment, shortcuts=False) <= EXACT


def test_inner_maps_may_be_tied_too(model: Model):
    model = model.under(Residual.TIED, Inner.TIED)
    assert differences(Live.of(model), moving(model.architecture)) <= EXACT


def test_an_untied_stream_keeps_the_function_with_its_shortcuts_and_not_without(model: Model):
    model = model.under(Residual.UNTIED, Inner.FREE)
    alignment = moving(model.architecture)
    live = Live.of(model)
    assert differences(live, alignment) <= EXACT
    assert differences(live, alignment, shortcuts=False) > APART


def test_every_fixed_axis_is_fixed_for_a_reason(model: Model):
    live = Live.of(model)
    named = {space.axis for space in model.architecture.spaces.values() if space.group is Group.FIXED}
    assert named, "a table that fixes nothing forgot the vocabulary or the pixels"
    for axis in sorted(named):
        assert model.architecture.spaces[
            next(id for id, space in model.architecture.spaces.items() if space.axis == axis)
        ].why, f"{axis} is fixed without a reason"
        assert differences(live, moving(model.architecture, only=axis)) > APART, f"{axis} could move"


def test_a_table_without_a_row_leaves_a_tensor_unclaimed(model: Model):
    table = model.family.table(model.config, frozenset(model.names))
    stack = table.stacks[0]
    rows = stack.rows.strip().splitlines()
    shapes = {name: model.info(name).shape for name in model.names}
    short = replace(table, stacks=(replace(stack, rows="\n".join(rows[:-1])), *table.stacks[1:]))
    with pytest.raises(ArchitectureError, match="the table does not know"):
        bind(short, shapes, model.family.name)


def test_a_table_with_a_row_twice_claims_a_tensor_twice(model: Model):
    table = model.family.table(model.config, frozenset(model.names))
    stack = table.stacks[0]
    rows = stack.rows.strip().splitlines()
    shapes = {name: model.info(name).shape for name in model.names}
    long = replace(table, stacks=(replace(stack, rows="\n".join([*rows, rows[-1]])), *table.stacks[1:]))
    with pytest.raises(ArchitectureError, match="is claimed twice"):
        bind(long, shapes, model.family.name)


def test_every_family_is_certified():
    assert {family.name for family in families()} == {case.family for case in CASES.values()}
