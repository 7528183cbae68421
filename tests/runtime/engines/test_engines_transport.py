"""Outputs on an engine and within a memory: the same files whoever writes them, and nothing half-written."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from blake3 import blake3

import transporting
from own_process import run_alone
from small_models import CASES, finetuned
from tests.files.test_staging import in_shards
from tests.transport.test_merging import lora
from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map
from transfusion.errors import SettingError
from transfusion.matching.align import align
from transfusion.runtime.engines import Threads
from transfusion.runtime.resources import PROGRAM, WORKER, Resources, parse_bytes
from transfusion.transport.output import Output
from transfusion.transport.record import PI_FILE
from transfusion.transport.transport import transport


@pytest.fixture(scope="module")
def inputs(made, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    a, b = in_shards(made("llama", 1), root / "a"), in_shards(made("llama", 2), root / "b")
    tuned = finetuned(CASES["llama"], a, root / "tuned")
    align(a, b, method="random", residual="tied").save(root / "pi.safetensors")
    lora(a, root / "lora", 1, r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    return {"a": a, "b": b, "tuned": tuned, "pi": root / "pi.safetensors", "lora": root / "lora"}


def moved(inputs: dict[str, Path]) -> Output:
    found = transport(inputs["tuned"], base=inputs["a"], onto=inputs["b"], via=inputs["pi"])
    assert isinstance(found, Output)
    return found


def rotated(inputs: dict[str, Path]) -> Output:
    """By maps that mix units, so that tensors are moved whole."""
    pi = Alignment.load(inputs["pi"])
    maps = {id: Map.plan(map_.matrix) for id, map_ in pi.maps.items() if id not in pi.parents.values()}
    via = replace(pi, maps=maps)
    found = transport(inputs["tuned"], base=inputs["a"], onto=inputs["b"], via=via, alpha=1.0)
    assert isinstance(found, Output)
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


def test_an_address_where_nobody_listens_is_refused_and_nothing_is_written(
    inputs, tmp_path, cli, monkeypatch
):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # that of other tests
    asked = ("--engine", "ray", "--address", "127.0.0.1:1")
    for verb in (
        ("transport", inputs["tuned"], *options(inputs)),
        ("merge", inputs["tuned"], inputs["tuned"], *options(inputs)),
    ):
        code, _, said = cli(*verb, *asked, "-o", tmp_path / "out")
        assert code == 1
        assert "no Ray cluster can be reached at 127.0.0.1:1" in said
        assert "hint:" in said
    assert not list(tmp_path.iterdir())


def test_settings_that_make_no_sense_are_wrong_usage(inputs, tmp_path, cli):
    begin = ("transport", inputs["tuned"], *options(inputs), "-o", tmp_path / "out")
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
        Resources(two, memory=PROGRAM + 200).within_memory(100, "both")
        with pytest.raises(SettingError, match="both takes 200 bytes"):
            Resources(two, memory=PROGRAM + 199).within_memory(100, "both")


def test_the_least_memory_that_is_named_is_accepted(inputs, tmp_path, cli):
    begin = ("transport", inputs["tuned"], *options(inputs), "-o", tmp_path / "out", "--jobs", 3)
    code, _, said = cli(*begin, "--memory", "300MB")
    assert code == 2
    assert cli(*begin, "--memory", "300MB", "--dry-run")[0] == 2
    least = said.split("give at least ")[1].split("\n")[0].replace(" ", "")
    assert not list(tmp_path.iterdir())
    assert cli(*begin, "--memory", least)[0] == 0
    assert hashes(tmp_path / "out") == hashes(moved(inputs).save(tmp_path / "unbound"))


def test_tensors_that_are_moved_whole_need_more_memory(inputs, monkeypatch):
    monkeypatch.setattr(import_module("transfusion.transport.output"), "BLOCK", 64)
    least = Resources(jobs=8, memory=PROGRAM + 200_000)
    assert moved(inputs).within_memory(least).jobs > 1
    with pytest.raises(SettingError, match=r"one thread \(most of it for .*\) takes"):
        rotated(inputs).within_memory(least)


@pytest.mark.slow
def test_on_the_command_line_with_an_alignment_on_the_way(ray, inputs, tmp_path, cli):
    asked = (
        "transport",
        inputs["tuned"],
        "--base",
        inputs["a"],
        "--onto",
        inputs["b"],
        "-q",
        "--force-unrelated",
    )
    assert cli(*asked, "-o", tmp_path / "here")[0] == 0
    assert cli(*asked, "-o", tmp_path / "there", "--engine", "ray", "--jobs", 2)[0] == 0
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["permutations", "rotations"])
def test_the_memory_that_is_given_is_kept(kind, tmp_path):
    """A model of 290 MB in a process of its own, with the least that is accepted."""
    made = transporting.make(tmp_path / "models", transporting.Size(5, 1024, 4096, 16, 8, 65536))
    if kind == "rotations":
        pi = Alignment.load(made.pi)
        maps = {id: Map.plan(map_.matrix) for id, map_ in pi.maps.items() if id not in pi.parents.values()}
        made = made._replace(pi=replace(pi, maps=maps).save(tmp_path / "turned.safetensors"))
    run = [*transporting.command(made, tmp_path / "out"), "--alpha", "1"]
    refused = subprocess.run([*run, "--memory", "1MB"], capture_output=True, text=True)
    assert refused.returncode == 2
    least = refused.stderr.split("give at least ")[1].split("\n")[0].replace(" ", "")
    assert run_alone([*run, "--memory", least]).require().peak <= parse_bytes(least)
