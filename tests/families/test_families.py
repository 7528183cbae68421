"""The certification that every table must pass, through the real library's own model code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from small_models import CASES, FIRST, OFTEN, often
from transfusion.architecture.binding import bind
from transfusion.architecture.table import Symmetry
from transfusion.errors import ArchitectureError
from transfusion.families import all_families
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.verification.certify import EXACT, certify, free_axes

LAST = {case.family: name for name, case in CASES.items() if case.family in OFTEN}


@pytest.fixture(
    params=often(CASES, [*FIRST.values(), *LAST.values()]), scope="module"
)  # two of some families
def model(request, made) -> Model:
    return Model.open(made(request.param))


def test_the_table_tells_the_truth(model: Model):
    """Free axes move without a trace, fixed ones do not, an untied stream needs its shortcuts."""
    certificate = certify(LiveModel.of(model))
    assert certificate.passed, "\n".join(map(str, certificate.failures))
    assert len(certificate.checks) > 4, "a table that fixes nothing forgot the vocabulary or the pixels"


def test_every_fixed_axis_has_a_reason(model: Model):
    for space in model.architecture.spaces.values():
        assert space.why or space.group is not Symmetry.FIXED, f"{space.id} is fixed without a reason"


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


def test_a_certificate_names_the_axis_that_breaks_the_outputs(made):
    """A Llama whose table forgets about rotary positions."""
    live = LiveModel.of(Model.open(made("llama")))
    spaces = {
        id: replace(space, group=Symmetry.PERMUTATION if space.axis == "qk" else space.group)
        for id, space in live.architecture.spaces.items()
    }
    wrong = replace(live, architecture=replace(live.architecture, spaces=spaces))
    assert not certify(wrong).passed
    assert [check.what for check in free_axes(wrong) if not check.passed] == ["the free axis qk"]
    assert all(check.difference <= EXACT for check in free_axes(live))


def test_every_family_is_certified():
    assert {family.name for family in all_families()} == {case.family for case in CASES.values()}
