"""Engines: the same result wherever it is computed, and nothing lost when a worker is."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from small_models import PRINCIPAL, often
from transfusion.alignment.alignment import random_maps
from transfusion.errors import CheckpointError, ClusterError, LibraryError, SettingError
from transfusion.matching.alignment_run import align
from transfusion.matching.block_solutions import _shares
from transfusion.matching.methods import preset
from transfusion.matching.weights.gains import Gains
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.runtime import ray_engine
from transfusion.runtime.engines import LocalEngine, open_engine
from transfusion.runtime.ray_cluster import start
from transfusion.runtime.resources import Resources
from transfusion.runtime.threads import Threads

# ── what workers are asked in these tests ────────────────────────────────────────────────────


def squared(subject: int, item: int) -> int:
    return subject * item**2


def whereabouts(subject: str, item: str) -> int:
    return os.getpid()


def pids(engine: ray_engine.RayEngine) -> list[int]:
    """The processes of both workers: each is given one of two pieces."""
    found = engine.each("", whereabouts, ["here", "there"])
    assert len(set(found)) == 2
    return found


def dying(subject: str, item: Path) -> str:
    """Kills the first worker that comes, and every one if told to."""
    if subject == "always" or not item.exists():
        item.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def complaining(subject: str, item: str) -> None:
    raise CheckpointError(f"{item} is broken", hint="mend it")


def failing(subject: str, item: str) -> None:
    raise ZeroDivisionError(item)


def ones(subject: int, item: int) -> torch.Tensor:
    return torch.full((item,), float(subject))


def together(subject: int, parts: list[torch.Tensor]) -> float:
    return float(torch.cat(parts).sum())


# ── pieces of work ───────────────────────────────────────────────────────────────────────────


def test_results_come_in_the_order_of_their_items(two):
    with Threads.opened(2) as workers:
        for engine in (two, LocalEngine(workers)):
            assert engine.count == 2
            assert engine.each(3, squared, range(20)) == [3 * item**2 for item in range(20)]
            assert engine.each(2, squared, []) == []
            assert engine.map_reduce(2, ones, [3, 4, 5], together) == 24.0


def test_what_was_kept_is_gone_on_with_where_it_is(two):
    words = [str(number) for number in range(9)]
    first = dict(zip(words, two.each("", whereabouts, words, affinity=str), strict=True))
    some = [next(word for word, pid in first.items() if pid == one) for one in sorted(set(first.values()))]
    assert len(some) == 2
    for _ in range(3):
        assert two.each("", whereabouts, some, affinity=str) == [first[word] for word in some]


def test_a_worker_that_dies_costs_its_piece_only(two, tmp_path):
    before = pids(two)
    places = [tmp_path / "one", tmp_path / "two"]
    assert two.each("once", dying, places) == ["survived"] * 2
    assert two.each(3, squared, range(4)) == [0, 3, 12, 27]
    assert two.each("", whereabouts, ["1"])[0] not in before, "nobody new was hired"


def test_a_piece_that_kills_every_worker_is_given_up(two, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "ATTEMPTS", 2)
    with pytest.raises(ClusterError, match="2 workers died at one task"):
        two.each("always", dying, [tmp_path / "one"])


def test_an_error_says_where_it_comes_from(two):
    with pytest.raises(CheckpointError, match=r"^on \S+: x is broken") as info:
        two.each("", complaining, ["x"])
    assert info.value.hint == "mend it"
    with pytest.raises(ZeroDivisionError):
        two.each("", failing, ["x"])
    assert two.each(3, squared, [2]) == [12], "the engine is good for more"


def test_every_machine_must_have_the_same_release(ray, monkeypatch):
    monkeypatch.setattr(ray_engine, "__version__", "0.0.1")
    with (
        pytest.raises(ClusterError, match=r"has transfusion .*, and here it is 0\.0\.1"),
        open_engine("ray", jobs=1) as one,
    ):
        one.each(1, squared, [1])


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


class Waiting:
    """A Ray in which nothing is ever said, or a signal comes while it waits."""

    def __init__(self, signal: BaseException | None = None) -> None:
        self.signal, self.times = signal, []

    def wait(self, waited_for, timeout):
        self.times.append(timeout)
        if self.signal is not None:
            raise SystemError("wait returned a result with an exception set") from self.signal
        return [], waited_for


def waiting(ray: Waiting) -> ray_engine.RayEngine:
    engine = ray_engine.RayEngine.__new__(ray_engine.RayEngine)
    engine.ray = ray
    return engine


def test_a_cluster_without_a_free_core_is_waited_for_and_then_given_up(caplog, monkeypatch):
    ray = Waiting()
    monkeypatch.setattr(ray_engine, "PATIENCE", 100.0)
    with pytest.raises(ClusterError, match="no worker started within 120 seconds"):
        waiting(ray)._next([1], busy=False)
    assert ray.times == [20.0, 100.0]
    assert "the cluster has no free core" in caplog.text


def test_a_signal_that_comes_while_ray_waits_is_that_signal():
    with pytest.raises(KeyboardInterrupt):
        waiting(Waiting(KeyboardInterrupt()))._next([1], busy=True)


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


def test_gains_that_were_sent_have_the_same_digits_and_nothing_kept(made):
    weights = WeightPair(*(Model.open(made("llama", seed)) for seed in (1, 2)))
    gains = Gains(weights, Threads(2))
    maps = random_maps(weights.architecture, 1)
    history = gains.history("layer.0.ffn", maps, weights.sections["layer.0.ffn"])
    here = gains.of("layer.0.ffn", history)
    there = pickle.loads(pickle.dumps(gains))
    assert not there._kept
    assert torch.equal(there.of("layer.0.ffn", pickle.loads(pickle.dumps(history))), here)


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
    assert there.digest == here.digest
    assert there.provenance == here.provenance


def test_a_gain_that_is_divided_among_workers_is_the_same(made, two, monkeypatch):
    """Rows of a gain go to several workers only where it has several blocks of rows: smaller ones, here."""
    divided = []
    monkeypatch.setattr("transfusion.matching.block_solutions.BLOCK", 8)
    monkeypatch.setattr(
        ray_engine.RayEngine,
        "map_reduce",
        lambda self, *asked, joined=ray_engine.RayEngine.map_reduce, **more: [
            divided.append(len(asked[2])),
            joined(self, *asked, **more),
        ][1],
    )
    models = made("llama", 1), made("llama", 2)
    there = align(*models, resources=Resources(two), advice=False)
    assert max(divided) == 2
    assert there.digest == align(*models, resources=Resources(jobs=1), advice=False).digest


@pytest.mark.parametrize(("size", "count"), [(1, 3), (512, 2), (513, 2), (5632, 4), (14336, 100)])
def test_shares_are_whole_blocks_that_make_up_the_gain(size, count):
    shares = _shares(size, count)
    assert [row for share in shares for row in share] == list(range(size))
    assert len(shares) == min(count, -(-size // 512))
    assert all(share.start % 512 == 0 for share in shares)


class Interfering:
    """Does something after so many steps of a search."""

    def __init__(self, after: int, do) -> None:
        self.left, self.do = after, do

    def __call__(self, step) -> None:
        self.left -= 1
        if self.left == 0:
            self.do()


@pytest.mark.parametrize("after", often([1, 30], [30]))
def test_a_worker_killed_in_the_middle_of_a_search_changes_nothing(after, made, two):
    models = made("llama", 1), made("llama", 2)
    here = pids(two)
    killed = []

    def kill() -> None:
        killed.append(here[0])
        os.kill(here[0], signal.SIGKILL)

    found = align(*models, resources=Resources(two), on_step=Interfering(after, kill))
    assert killed
    assert found.digest == align(*models, resources=Resources(jobs=1)).digest


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
        two.each(weights, _read, ["any"])
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
