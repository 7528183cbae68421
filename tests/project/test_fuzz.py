"""Files from outside that are malformed, hostile or odd: nothing runs, nothing is lost, nothing hangs.

``PYTHONPATH=tests python -m fuzzing FORMAT NUMBER`` runs a case again, and shows all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fuzzing import FORMATS, MUTANTS, Case, Command, Place, Runner, cases
from fuzzing.checking import Ran, faults, state
from fuzzing.formats import DEEDS, WITNESS
from fuzzing.seeds import MARK, World

SAMPLE = [case for format in FORMATS for case in cases(format) if case.quick or case.number == MUTANTS]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("fuzzing")) as runner:
        yield runner


def failures(runner: Runner, chosen: Iterable[Case]) -> list[str]:
    outcomes = (runner.run(case.format, case.number) for case in chosen)
    return [str(outcome) for outcome in outcomes if outcome.faults]


def test_a_sample_of_every_format(runner):
    found = failures(runner, SAMPLE)
    assert not found, "\n\n".join([f"{len(found)} of {len(SAMPLE)} cases", *found])


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_every_case_of_a_format(format, runner):
    found = failures(runner, cases(format))
    assert not found, "\n\n".join([f"{len(found)} of {len(cases(format))} cases", *found])


def test_there_are_enough_cases_and_each_has_a_name_of_its_own():
    assert sum(len(cases(format)) for format in FORMATS) > 1000
    assert {case.format for case in SAMPLE} == set(FORMATS)
    for format in FORMATS:
        assert len({case.number for case in cases(format)}) == len(cases(format))


def test_a_case_is_the_same_wherever_it_is_made(tmp_path):
    """But for the names of folders, which some cases mention."""
    made = []
    for name in ("one", "two"):
        place = empty(tmp_path / name)
        place.world.seed("a")
        for number in (MUTANTS, MUTANTS + 1, MUTANTS + 2):
            fresh = Place(place.root / str(number), place.world, random(number))
            fresh.inputs.mkdir(parents=True)
            case(number).build(fresh)
        files = sorted(path for path in place.root.rglob("*") if path.is_file())
        made.append([file.read_bytes().replace(str(place.root).encode(), b"") for file in files])
    assert made[0] == made[1]


# ── the fuzzer notices ───────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_fuzzer_notices_every_fault_that_is_made_on_purpose(runner, monkeypatch):
    monkeypatch.setattr(runner, "limit", 1.0)
    for number, (title, (_, fault)) in enumerate(DEEDS.items()):
        outcome = runner.run(WITNESS, number)
        assert any(one.startswith(fault) for one in outcome.faults), f"{title}: {outcome}"


def random(number: int):
    from random import Random

    return Random(f"config-{number}")


def case(number: int) -> Case:
    return next(one for one in cases("config") if one.number == number)


def empty(root: Path) -> Place:
    place = Place(root / "case", World(root), random(0))
    place.inputs.mkdir(parents=True)
    place.outputs.mkdir()
    return place


def outcome_of(place: Place, tensors: dict[str, np.ndarray], index: str | None = None) -> list[str]:
    """What is found wrong with an output that was written with exit code 0."""
    output = place.outputs / "moved"
    output.mkdir()
    save_file(tensors, output / "model.safetensors")
    if index is not None:
        (output / "model.safetensors.index.json").write_text(index)
    ran = Ran(Command(("transport",), output, frozenset("ab")), 0, "", "")
    return faults(ran, place, state(place), [], [])


@pytest.mark.parametrize(
    ("tensors", "index", "said"),
    [
        ({"a": 1.0, "b": 2.0}, None, None),
        ({"a": 1.0, "b": 2.0}, '{"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}', None),
        ({"a": 1.0}, None, "1 tensors lost, such as b"),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, None, "1 tensors that nobody asked for, such as c"),
        ({"a": 1.0, "b": np.nan}, None, "b of the output is not finite"),
        ({"a": 1.0, "b": np.inf}, None, "b of the output is not finite"),
        ({"a": 1.0, "b": MARK}, None, "what is outside stands in model.safetensors"),
        (
            {"a": 1.0, "b": 2.0},
            '{"weight_map": {"a": "x", "b": "x"}}',
            "the index does not tell where the tensors are",
        ),
        (
            {"a": 1.0, "b": 2.0},
            '{"weight_map": {}, "x": NaN}',
            "model.safetensors.index.json of the output is no JSON",
        ),
    ],
)
def test_an_output_that_lost_something_is_noticed(tensors, index, said, tmp_path):
    found = outcome_of(
        empty(tmp_path), {name: np.full(3, value, np.float32) for name, value in tensors.items()}, index
    )
    assert any(one.startswith(said) for one in found) if said else not found


def test_a_tensor_in_two_files_is_noticed(tmp_path):
    place = empty(tmp_path)
    (place.outputs / "moved").mkdir()
    save_file({"a": np.ones(1), "b": np.ones(1)}, place.outputs / "moved" / "model.safetensors")
    save_file({"a": np.ones(1)}, place.outputs / "moved" / "more.safetensors")
    ran = Ran(Command(("transport",), place.outputs / "moved", frozenset("ab")), 0, "", "")
    assert "a is in ['model.safetensors', 'more.safetensors']" in faults(ran, place, state(place), [], [])
