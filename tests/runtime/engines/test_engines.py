"""Engines: the same result wherever it is computed, and nothing lost when a worker is."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from small_models import PRINCIPAL, often
from transfusion.alignment.alignment import random_maps
from transfusion.errors import CheckpointError, ClusterError, LibraryError, SettingError
from transfusion.matching.align import align
from transfusion.matching.gains import Gains
from transfusion.matching.methods import preset
from transfusion.matching.weights import WeightPair
from transfusion.model.model import Model
from transfusion.runtime import ray_engine
from transfusion.runtime.engines import Threads, open_engine
from transfusion.runtime.ray_engine import start
from transfusion.runtime.resources import Resources

# ── what workers are asked in these tests ────────────────────────────────────────────────────


def squared(factor: int, task: int) -> int:
    return factor * task**2


def dying(always: bool, place: Path) -> str:
    """Kills the first worker that comes, and every one if told to."""
    if always or not place.exists():
        place.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def complaining(task: str) -> None:
    raise CheckpointError(f"{task} is broken", hint="mend it")


def failing(task: str) -> None:
    raise ZeroDivisionError(task)


# ── tasks ────────────────────────────────────────────────────────────────────────────────────


def test_results_come_in_the_order_of_their_tasks(two):
    told = []
    with Threads.opened(2) as workers:
        for engine in (two, workers):
            assert engine.count == 2
            told.clear()
            done = engine.map(partial(squared, 3), range(20), on_result=lambda *one: told.append(one))
            assert done == [3 * task**2 for task in range(20)]
            assert sorted(told) == list(enumerate(done))
            assert engine.map(partial(squared, 2), []) == []


def test_a_worker_that_dies_costs_its_task_only(two, tmp_path):
    assert two.map(partial(dying, False), [tmp_path / "one", tmp_path / "two"]) == ["survived"] * 2
    assert two.map(partial(squared, 3), range(4)) == [0, 3, 12, 27]


def test_a_task_that_kills_every_worker_is_given_up(two, tmp_path):
    with pytest.raises(ClusterError, match="4 workers died at one task"):
        two.map(partial(dying, True), [tmp_path / "one"])


def test_an_error_says_where_it_comes_from(two):
    with pytest.raises(CheckpointError, match=r"^on \S+: x is broken") as info:
        two.map(complaining, ["x"])
    assert info.value.hint == "mend it"
    with pytest.raises(ZeroDivisionError):
        two.map(failing, ["x"])
    assert two.map(partial(squared, 3), [2]) == [12], "the engine is good for more"


def test_every_machine_must_have_the_same_release(ray, monkeypatch):
    monkeypatch.setattr(ray_engine, "__version__", "0.0.1")
    with (
        pytest.raises(ClusterError, match=r"has transfusion .*, and here it is 0\.0\.1"),
        open_engine("ray", jobs=1),
    ):
        pass


def test_without_ray_one_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LibraryError) as info, open_engine("ray"):
        pass
    assert "transfusion-rebasin[ray]" in info.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere.invalid:6379", "nonsense"])
def test_an_address_where_nobody_listens_is_refused_at_once(address, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with (
        pytest.raises(ClusterError, match=f"no Ray cluster can be reached at {address}"),
        open_engine("ray", address=address),
    ):
        pass


class Reluctant:
    """A Ray that starts when it has been asked often enough."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.asked = refusals, 0

    def init(self, **settings) -> None:
        self.asked += 1
        if self.asked <= self.refusals:
            raise Exception("The current node timed out during startup.\nmore")

    def shutdown(self) -> None:
        pass


def test_a_cluster_that_does_not_start_is_asked_again_and_then_given_up():
    reluctant = Reluctant(2)
    start(reluctant, num_cpus=1)
    assert reluctant.asked == 3
    with pytest.raises(
        ClusterError, match=r"could not be started on this machine \(The current node timed out"
    ):
        start(Reluctant(3), num_cpus=1)


@pytest.mark.parametrize(("asked", "about"), [({"engine": "dask"}, "dask"), ({"address": "h:1"}, "h:1")])
def test_settings_that_make_no_sense_are_refused(asked, about):
    with pytest.raises(SettingError, match=about), open_engine(**asked):
        pass


def test_a_cluster_without_a_free_core_is_waited_for_and_then_given_up(two, monkeypatch):
    monkeypatch.setattr(ray_engine, "PATIENCE", 0.0)
    more_than_there_are = two.ray.remote(num_cpus=1000)(ray_engine.greet)
    monkeypatch.setattr(two, "_greet", more_than_there_are)
    with pytest.raises(ClusterError, match="no worker started within 0 seconds"):
        two.require_workers()


# ── what is sent ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", often(PRINCIPAL, ["clip", "llama"]))
def test_a_model_that_was_sent_is_the_same_and_small(case, made):
    model = Model.open(made(case, 1))
    packed = pickle.dumps(model)
    there = pickle.loads(packed)
    assert there.fingerprint == model.fingerprint
    assert there.architecture.digest() == model.architecture.digest()
    assert len(packed) < 300_000


def test_a_model_is_found_again_from_another_folder(made, monkeypatch, tmp_path):
    monkeypatch.chdir(made("vit", 1).parent)
    packed = pickle.dumps(Model.open(made("vit", 1).name))
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(packed).fingerprint == Model.open(made("vit", 1)).fingerprint


def test_gains_that_were_sent_are_the_same_and_nothing_is_kept(made):
    weights = WeightPair(*(Model.open(made("llama", seed)) for seed in (1, 2)))
    gains, id = Gains(weights, preset("guarded"), Threads(2)), "layer.0.ffn"
    maps, sections = random_maps(weights.architecture, 1), weights.sections[id]
    here = gains.of(id, maps, sections)
    there = pickle.loads(pickle.dumps(gains))
    assert not there._kept
    assert torch.equal(there.of(id, maps, sections), here)


def test_a_model_in_memory_cannot_be_sent(made, two):
    states = [Model.open(made("vit", seed)).checkpoint for seed in (1, 2)]
    a, b = ({name: one.read(name) for name in one.tensors} for one in states)
    with pytest.raises(CheckpointError, match="a model in memory cannot be read by other processes"):
        align(
            Model.open(a, config=states[0].config),
            Model.open(b, config=states[0].config),
            resources=Resources(two),
        )


# ── alignments ───────────────────────────────────────────────────────────────────────────────

METHODS = {
    "guarded": preset("guarded"),
    "tied": preset("guarded").changed(residual="tied"),
    "transfusion": preset("transfusion"),
    "git-rebasin": preset("git-rebasin"),
    "restarted": preset("guarded").changed(restarts=1, max_sweeps=3),
}


@pytest.mark.parametrize(
    ("case", "name"),
    often(
        product(["llama", "vit"], METHODS), [("vit", "guarded"), ("llama", "restarted"), ("llama", "tied")]
    ),
)
def test_an_alignment_is_the_same_on_every_engine(case, name, made, two):
    models, method = (made(case, 1), made(case, 2)), METHODS[name]
    here = align(*models, method=method, resources=Resources(jobs=2))
    there = align(*models, method=method, resources=Resources(two))
    assert there.maps == here.maps
    assert there.provenance.objective == pytest.approx(here.provenance.objective, rel=1e-6)


class Interfering:
    """Does something after so many steps of a search."""

    def __init__(self, after: int, do) -> None:
        self.left, self.do = after, do

    def __call__(self, step) -> None:
        self.left -= 1
        if self.left == 0:
            self.do()


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_file_that_changes_during_the_run_is_noticed(where, made, two, tmp_path):
    engine = two if where == "there" else "local"
    a, b = (Path(shutil.copytree(made("llama", seed), tmp_path / str(seed))) for seed in (1, 2))
    file = next(b.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match=f"{file.name}.* changed while it was being read"):
        align(a, b, resources=Resources(engine), on_step=Interfering(3, lambda: os.utime(file, (1, 1))))


def test_storage_that_a_worker_does_not_see_is_named(made, two, tmp_path):
    """The models were opened here; when the worker comes, their place is empty."""
    models = [Model.open(shutil.copytree(made("vit", seed), tmp_path / str(seed))) for seed in (1, 2)]
    (tmp_path / "2").rename(tmp_path / "elsewhere")
    weights = WeightPair(*models)
    with pytest.raises(CheckpointError, match=r"on \S+: .*cannot be seen") as info:
        two.map(partial(_read, weights), ["any"])
    assert "not mounted" in info.value.hint
    assert str(tmp_path / "2") in info.value.message


def _read(weights: WeightPair, name: str) -> None:
    raise AssertionError("nothing should be read of files that are not there")


@pytest.mark.parametrize("case", often(["llama", "vit-classifier", "mixtral"], ["llama"]))
def test_functional_alignment_is_the_same_on_workers(case, ray, made):
    """Every axis is solved by a worker, from samples in files."""
    a, b = made(case, 1), made(case, 2)
    here = align(a, b, method="functional", resources=Resources(jobs=2))
    there = align(a, b, method="functional", resources=Resources("ray", jobs=2))
    assert there.digest == here.digest
    assert there.provenance == here.provenance
