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


@pytest.mark.parametrize(
    ("missing", "message"), [(True, "the table does not know"), (False, "is claimed twice")]
)
def test_a_row_that_is_missing_or_stands_twice_is_an_error(missing, message, made):
    model = Model.open(made("llama"))
    table = model.family.table(model.config, frozenset(model.names))
    (stack,) = table.stacks
    rows, last = dict(stack.rows), list(stack.rows)[-1]
    layout = rows.pop(last) if missing else rows[last]
    again = {} if missing else {last: layout}
    shapes = {name: model.info(name).shape for name in model.names}
    with pytest.raises(ArchitectureError, match=message):
        bind(replace(table, stacks=(replace(stack, rows=rows),), rows=again), shapes, "llama")


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
    names = [family.name for family in all_families()]
    assert len(names) == len(set(names)), "two families have one name"
    assert set(names) == {case.family for case in CASES.values()}


def test_without_its_factor_a_branch_gets_too_much_of_the_shortcut(made):
    """Granite multiplies the output of each branch before it is added."""
    live = LiveModel.of(Model.open(made("granite")))
    cuts = tuple(replace(cut, factor=1.0) for cut in live.architecture.shortcuts)
    wrong = certify(replace(live, architecture=replace(live.architecture, shortcuts=cuts)))
    assert [check.what for check in wrong.failures] == ["all free axes, a map for every point of the stream"]


def test_the_only_mask_of_a_sam_stays_the_same_too(made):
    """It answers with three masks, or with one: both are certified."""
    live = LiveModel.of(Model.open(made("sam")))
    three = live.outputs()["pred_masks"]
    arrange = live.family.arrange
    one = replace(live.family, arrange=lambda *given: {**arrange(*given), "multimask_output": False})
    live = replace(live, family=one)
    assert (three.shape[2], live.outputs()["pred_masks"].shape[2]) == (3, 1)
    # Units that only the other masks have do not show here, so only what must not change is asked for.
    failures = [check for check in certify(live).failures if not check.should_change]
    assert not failures, failures
