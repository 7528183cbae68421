"""Outputs on an engine and within a memory: the same files whoever writes them, and nothing half-written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3

import transporting
from own_process import run_alone
from small_models import CASES, finetuned
from tests.files.test_staging import in_shards
from tests.transport.test_merging import lora
from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map
from transfusion.errors import CheckpointError, ClusterError, LibraryError, OutputError, SettingError
from transfusion.matching.alignment_run import align
from transfusion.runtime.byte_sizes import parse_bytes
from transfusion.runtime.engines import LocalEngine
from transfusion.runtime.resources import PROGRAM, WORKER, Resources
from transfusion.runtime.threads import Threads
from transfusion.transport.applied_model import apply
from transfusion.transport.dense_transport import DenseTransport
from transfusion.transport.output_record import PI_FILE
from transfusion.transport.transport_run import merge, transport


@pytest.fixture(scope="module")
def inputs(made, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    a, b = in_shards(made("llama", 1), root / "a"), in_shards(made("llama", 2), root / "b")
    tuned = finetuned(CASES["llama"], a, root / "tuned")
    align(a, b, method="random", residual="tied").save(root / "pi.safetensors")
    lora(a, root / "lora", 1, r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    return {"a": a, "b": b, "tuned": tuned, "pi": root / "pi.safetensors", "lora": root / "lora"}


@pytest.fixture
def workers(two, monkeypatch):
    """Whoever hires workers of Ray gets those two."""
    real = Resources.opened
    monkeypatch.setattr(
        Resources, "opened", lambda resources: real(resources) if resources.shared else nullcontext(two)
    )


def moved(inputs: dict[str, Path]) -> DenseTransport:
    found = transport(inputs["tuned"], base=inputs["a"], onto=inputs["b"], via=inputs["pi"])
    assert isinstance(found, DenseTransport)
    return found


def rotated(inputs: dict[str, Path]) -> DenseTransport:
    """By maps that mix units, so that tensors are moved whole."""
    pi = Alignment.load(inputs["pi"])
    maps = {
        id: Map.rotation(map_.matrix, [1.0] * map_.blocks, [1.0] * map_.blocks)
        for id, map_ in pi.maps.items()
        if id not in pi.parents.values()
    }
    via = replace(pi, maps=maps)
    found = transport(inputs["tuned"], base=inputs["a"], onto=inputs["b"], via=via, alpha=1.0)
    assert isinstance(found, DenseTransport)
    return found


def hashes(folder: Path) -> dict[str, str]:
    about = {folder / name for name in ("transfusion.json", "README.md", PI_FILE)}  # which tell of the run
    return {
        str(path.relative_to(folder)): blake3(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in about
    }


def options(inputs: dict[str, Path]) -> list[object]:
    return ["--base", inputs["a"], "--onto", inputs["b"], "--via", inputs["pi"], "-q"]


# ── without Ray; the first two must run before it is started ─────────────────────────────────


def test_without_ray_one_line_says_how_to_get_it(inputs, tmp_path, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    out = tmp_path / "out"
    code, _, said = cli("transport", inputs["tuned"], *options(inputs), "-o", out, "--engine", "ray")
    assert code == 1
    assert "transfusion-rebasin[ray]" in said
    assert not list(tmp_path.iterdir())
    with pytest.raises(LibraryError):
        moved(inputs).save(out, resources=Resources("ray"))
    assert not list(tmp_path.iterdir())


def test_an_address_where_nobody_listens_is_refused_and_nothing_is_written(
    inputs, tmp_path, cli, monkeypatch
):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # that of other tests
    asked = ("--engine", "ray", "--address", "127.0.0.1:1")
    for verb in (
        ("transport", inputs["tuned"], *options(inputs)),
        ("merge", inputs["tuned"], inputs["tuned"], *options(inputs)),
        ("apply", inputs["pi"], inputs["a"]),
    ):
        code, _, said = cli(*verb, *asked, "-o", tmp_path / "out")
        assert code == 1
        assert "no Ray cluster can be reached at 127.0.0.1:1" in said
        assert "hint:" in said
    assert not list(tmp_path.iterdir())


def test_settings_that_make_no_sense_are_wrong_usage(inputs, tmp_path, cli):
    begin = ("apply", inputs["pi"], inputs["a"], "-o", tmp_path / "out")
    for asked, answer in (
        (("--address", "127.0.0.1:1"), "only Ray has an address hint: add --engine ray"),
        (("--engine", "spark"), "'spark' is not one of local, ray"),
        (("--memory", "2 heaps"), "'2 heaps' is not a size"),
        (("--memory", "1MB"), "memory of 1.0 MB is too little"),
    ):
        code, _, said = cli(*begin, *asked)
        assert code == 2
        assert answer in " ".join(said.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_what_is_sent_holds_no_weights(inputs):
    for output in (moved(inputs), rotated(inputs), full(inputs)):
        output.state_dict()  # whatever is remembered on the way
        read = sum(checkpoint.nbytes for checkpoint in output.checkpoints)
        maps = sum(map_.nbytes for map_ in output.alignment.maps.values())
        assert len(pickle.dumps(output)) - 2 * maps < read / 4
        again = pickle.loads(pickle.dumps(output)).state_dict()
        assert all(torch.equal(again[name], one) for name, one in output.state_dict().items())


def full(inputs: dict[str, Path]) -> DenseTransport:
    found = transport(inputs["lora"], base=inputs["a"], onto=inputs["b"], via=inputs["pi"], full=True)
    assert isinstance(found, DenseTransport)
    return found


# ── within a memory ──────────────────────────────────────────────────────────────────────────


def test_threads_are_as_many_as_fit():
    assert Resources(jobs=8).within_memory(100, "a thread", 1000).jobs == 8
    for room, threads in ((1100, 1), (1199, 1), (1200, 2), (1500, 5), (10**6, 8)):
        resources = Resources(jobs=8, memory=PROGRAM + room)
        assert resources.within_memory(100, "a thread", 1000).jobs == threads
    with pytest.raises(SettingError, match=r"a thread takes 1.1 kB"):
        Resources(jobs=8, memory=PROGRAM + 1099).within_memory(100, "a thread", 1000)


def test_a_worker_of_ray_has_one_thread():
    resources = Resources("ray", jobs=8, memory=WORKER + 1100)
    assert resources.within_memory(100, "a thread", 1000) == resources
    with pytest.raises(SettingError, match="too little"):
        replace(resources, memory=WORKER + 1099).within_memory(100, "a thread", 1000)


def test_an_open_engine_must_fit():
    with Threads.opened(2) as two:
        Resources(LocalEngine(two), memory=PROGRAM + 200).within_memory(100, "both")
        with pytest.raises(SettingError, match="both takes 200 bytes"):
            Resources(LocalEngine(two), memory=PROGRAM + 199).within_memory(100, "both")


def test_the_least_memory_that_is_named_is_accepted(inputs, tmp_path, cli):
    begin = ("transport", inputs["tuned"], *options(inputs), "-o", tmp_path / "out", "--jobs", 3)
    code, _, said = cli(*begin, "--memory", "300MB")
    assert code == 2
    assert cli(*begin, "--memory", "300MB", "--dry-run")[0] == 2
    least = said.split("give at least ")[1].split("\n")[0].replace(" ", "")
    assert not list(tmp_path.iterdir())
    assert cli(*begin, "--memory", least)[0] == 0
    assert hashes(tmp_path / "out") == hashes(moved(inputs).save(tmp_path / "unbound"))


# ── workers of Ray ───────────────────────────────────────────────────────────────────────────


def test_any_number_of_workers_writes_the_same_files(workers, inputs, tmp_path, monkeypatch):
    wanted = hashes(moved(inputs).save(tmp_path / "here"))
    assert len([name for name in wanted if name.endswith(".safetensors")]) > 3
    for jobs in (2, 1):
        if jobs == 1:
            monkeypatch.undo()
        on_result: list[str] = []
        output = moved(inputs)
        output.save(tmp_path / f"by-{jobs}", resources=Resources("ray", jobs), on_tensor=on_result.append)
        assert hashes(tmp_path / f"by-{jobs}") == wanted
        assert sorted(on_result) == sorted(entry.name for entry in output.entries)
        metadata = json.loads((tmp_path / f"by-{jobs}/transfusion.json").read_text())
        assert metadata["moved"] == len(output.entries)
    assert not list(tmp_path.glob(".*"))


def test_every_kind_of_output_is_the_same(workers, inputs, tmp_path, cli):
    """Ties, which looks at all changes first; a model with an adapter in it; whole tensors; π(A)."""
    pi, where = Alignment.load(inputs["pi"]), {"base": inputs["a"], "onto": inputs["b"]}
    both = [inputs["tuned"], inputs["lora"]]
    outputs = {
        "ties": lambda: merge(both, how="ties", density=0.3, via=pi, **where),
        "full": lambda: full(inputs),
        "turned": lambda: rotated(inputs),
        "single.safetensors": lambda: moved(inputs),
    }
    for name, prepare in outputs.items():
        here = prepare().save(tmp_path / "here" / name)
        there = prepare().save(tmp_path / "there" / name, resources=Resources("ray", 2))
        assert here.is_file() == there.is_file() == name.endswith(".safetensors")
        assert hashes(here.parent if here.is_file() else here) == hashes(
            there.parent if there.is_file() else there
        )
        shutil.rmtree(tmp_path / "here"), shutil.rmtree(tmp_path / "there")
    asked = ("apply", inputs["pi"], inputs["a"], "--engine", "ray", "--jobs", 2)
    assert cli(*asked, "-o", tmp_path / "applied")[0] == 0
    assert hashes(tmp_path / "applied") == hashes(apply(pi, inputs["a"]).save(tmp_path / "here"))


@pytest.mark.slow
def test_on_the_command_line_with_an_alignment_on_the_way(ray, inputs, tmp_path, cli):
    begin = ("transport", inputs["tuned"], "--base", inputs["a"], "--onto", inputs["b"], "--anyway", "-q")
    for name, engine in (("here", "local"), ("there", "ray")):
        code, _, said = cli(*begin, "-o", tmp_path / name, "--engine", engine, "--jobs", 2)
        assert code == 0, said
    assert hashes(tmp_path / "here") == hashes(tmp_path / "there")


@dataclass(repr=False)
class Watched(DenseTransport):
    """An output at which a worker stops, or does something to its files, at a tensor in the middle."""

    signs: Path = Path()
    at: str = ""

    @classmethod
    def of(cls, output: DenseTransport, signs: Path) -> Watched:
        signs.mkdir()
        given = {one.name: getattr(output, one.name) for one in fields(DenseTransport)}
        middle = output.entries[len(output.entries) // 2].name
        return cls(**given, signs=signs, at=middle)

    def rows(self, entry, rows):
        if entry.name == self.at and (self.signs / "stop").exists():
            (self.signs / "stop").unlink()
            (self.signs / "staged").write_text(str(os.getpid()))
            (self.signs / "staged").rename(self.signs / "pid")
            time.sleep(600)
        if entry.name == self.at and (self.signs / "remove").exists():
            shutil.rmtree((self.signs / "remove").read_text())
        return super().rows(entry, rows)


def killing(output: Watched, making: Path) -> tuple[threading.Thread, list[str]]:
    """Kill the worker that stops at a tensor; tells which files were begun at that moment."""
    (output.signs / "stop").touch()
    begun: list[str] = []

    def kill() -> None:
        while not (output.signs / "pid").exists():
            time.sleep(0.05)
        begun.extend(file.name for file in making.iterdir())
        os.kill(int((output.signs / "pid").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    return killer, begun


def test_a_worker_that_is_killed_costs_its_shard_only(workers, inputs, tmp_path):
    wanted = hashes(moved(inputs).save(tmp_path / "here"))
    output = Watched.of(moved(inputs), tmp_path / "signs")
    killer, begun = killing(output, tmp_path / ".there.partial/making")
    on_result: list[str] = []
    output.save(tmp_path / "there", resources=Resources("ray", 2), on_tensor=on_result.append)
    killer.join()
    assert any(name.endswith((output.signs / "pid").read_text()) for name in begun)  # half-written
    assert hashes(tmp_path / "there") == wanted
    assert sorted(on_result) == sorted(entry.name for entry in output.entries)  # nothing was finished twice


def test_a_run_that_is_interrupted_is_taken_up_by_any_engine(workers, inputs, tmp_path):
    wanted = hashes(moved(inputs).save(tmp_path / "here"))

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moved(inputs).save(tmp_path / "there", resources=Resources("ray", 2), on_tensor=interrupt)
    kept = tmp_path / ".there.partial/output"
    finished = {file.name: file.stat().st_mtime_ns for file in kept.iterdir()}
    assert 0 < len(finished) < len([name for name in wanted if name.endswith(".safetensors")])
    assert not (tmp_path / "there").exists()
    on_result: list[str] = []
    last = moved(inputs)
    last.save(tmp_path / "there", resources=Resources(jobs=1), on_tensor=on_result.append)
    assert hashes(tmp_path / "there") == wanted
    assert len(on_result) < len(last.entries)
    assert last.metadata()["moved"] == len(last.entries)  # what workers had remarked is known
    assert {name: (tmp_path / "there" / name).stat().st_mtime_ns for name in finished} == finished


def test_an_input_that_changes_spoils_the_run(workers, inputs, tmp_path):
    now = {name: tmp_path / name for name in ("a", "b", "tuned")}
    for name, place in now.items():
        shutil.copytree(inputs[name], place)

    def meddle(name: str) -> None:
        os.utime(sorted(now["tuned"].glob("*.safetensors"))[0], ns=(1, 1))

    with pytest.raises(CheckpointError, match="changed while it was being read"):
        moved({**inputs, **now}).save(tmp_path / "out", resources=Resources("ray", 1), on_tensor=meddle)
    assert not list(tmp_path.glob("*out*"))


def test_storage_that_a_worker_does_not_see_is_named(workers, inputs, tmp_path):
    place = shutil.copytree(inputs["b"], tmp_path / "b")
    output = moved({**inputs, "b": place})
    output.recipe()
    place.rename(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match="on .*: .*b/model-00001.* cannot be seen\n.*is not mounted"):
        output.save(tmp_path / "out", resources=Resources("ray", 1))
    assert not list(tmp_path.glob("*out*"))


def test_a_place_that_a_worker_cannot_write_is_named_and_the_run_goes_on(workers, inputs, tmp_path):
    output = Watched.of(moved(inputs), tmp_path / "signs")
    (output.signs / "remove").write_text(str(tmp_path / ".out.partial/making"))
    with pytest.raises(
        OutputError, match=r"(?s)out could not be written \(No such file .* on .*the same command"
    ):
        output.save(tmp_path / "out", resources=Resources("ray", 1))
    assert not (tmp_path / "out").exists()
    (output.signs / "remove").unlink()
    output.save(tmp_path / "out", resources=Resources("ray", 1))
    assert hashes(tmp_path / "out") == hashes(moved(inputs).save(tmp_path / "here"))


def test_workers_that_do_not_come_leave_what_is_finished(workers, inputs, tmp_path, monkeypatch):
    """A cluster that fails is no reason to make anything again."""
    from transfusion.runtime.ray_engine import RayEngine

    def gone(self, worker, place, batch, error):
        raise ClusterError("4 workers died", hint="look at the memory")

    monkeypatch.setattr(RayEngine, "_again", gone)
    output = Watched.of(moved(inputs), tmp_path / "signs")

    killing(output, tmp_path / ".out.partial/making")
    with pytest.raises(ClusterError, match="the same command resumes from"):
        output.save(tmp_path / "out", resources=Resources("ray", 2))
    assert any((tmp_path / ".out.partial/output").iterdir())


def test_a_model_in_memory_cannot_be_sent(workers, inputs, tmp_path):
    import transformers

    tuned = transformers.LlamaForCausalLM.from_pretrained(inputs["tuned"])
    output = transport(tuned, base=inputs["a"], onto=inputs["b"], via=inputs["pi"])
    with pytest.raises(CheckpointError, match="in memory cannot be read by other processes"):
        output.save(tmp_path / "out", resources=Resources("ray", 1))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["permutations", "rotations"])
def test_the_memory_that_is_given_is_kept(kind, tmp_path):
    """A model of 290 MB in a process of its own: with the least that is accepted, and with twice as much."""
    made = transporting.make(tmp_path / "models", transporting.Size(5, 1024, 4096, 16, 8, 65536))
    if kind == "rotations":
        pi = Alignment.load(made.pi)
        maps = {
            id: Map.rotation(map_.matrix, [1.0] * map_.blocks, [1.0] * map_.blocks)
            for id, map_ in pi.maps.items()
            if id not in pi.parents.values()
        }
        made = made._replace(pi=replace(pi, maps=maps).save(tmp_path / "turned.safetensors"))
    run = [*transporting.command(made, tmp_path / "out"), "--alpha", "1"]
    refused = subprocess.run([*run, "--memory", "1MB"], capture_output=True, text=True)
    assert refused.returncode == 2
    least = refused.stderr.split("give at least ")[1].split("\n")[0].replace(" ", "")
    assert run_alone([*run, "--memory", least]).require().peak <= parse_bytes(least)
