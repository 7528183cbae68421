"""The zoo: its tables, and (slow) the smallest of its models through the door and through a trial."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "benchmarks" / "zoo" / "measured.json").read_text())


@pytest.fixture
def zoo(monkeypatch):
    """Return a module of the zoo: ``zoo("models")``."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield lambda name: import_module(f"zoo.{name}")
    for name in [name for name in sys.modules if name == "zoo" or name.startswith("zoo.")]:
        del sys.modules[name]


def test_every_model_and_trial_was_measured_and_has_a_licence(zoo):
    models = zoo("models").MODELS
    assert MEASURED["door"].keys() == models.keys()
    assert MEASURED["trials"].keys() == zoo("__main__").trials().keys()
    for one in models.values():
        assert one.package.licence
        assert one.package.made_by
        assert len(one.package.sha256) == 64
        assert "==" in one.package.name or "@" in one.package.name


def test_the_door_is_open_and_expectations_are_met():
    assert not [name for name, one in MEASURED["door"].items() if one["refused"]]
    assert not [name for name, one in MEASURED["door"].items() if not (one["found"] and one["equal"])]
    for name, one in MEASURED["trials"].items():
        for way, least in one["expects"].items():
            assert one["ways"][way]["share"] >= least, (name, way)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iglm-s", "rxnmapper", "rxnfp-classes"])
def test_a_model_that_others_made_comes_through_the_door(name, zoo):
    try:
        found = zoo("door").passed(zoo("models").MODELS[name])
    except SystemExit as error:
        pytest.skip(f"the registry was not reached: {error}")
    assert not found.refused
    assert found.found
    assert found.equal
    assert found.predicted > 0.99
