"""The estimate of `plan`: it grows as it should, agrees with the accountant of memory, and refuses with reasons."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import transfusion
from small_models import CASES, FIRST
from transfusion.cli import main
from transfusion.errors import ArchitectureError, CheckpointError, LibraryError, SettingError
from transfusion.matching.blocks import blocks
from transfusion.matching.methods import METHODS, preset
from transfusion.matching.search_memory import plan_memory
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.running.config_model import open_headers
from transfusion.runtime.machine import Machine
from transfusion.transport.estimate import assignments_of, plan, products_of
from transfusion.transport.transport_plan import TransportPlan

SCALE = Path(__file__).parents[2] / "benchmarks" / "scale"
CONFIGS = SCALE / "configs"
MACHINE = Machine(cores=2, operations_per_second=1e11, bytes_per_second=1e9)
"""Round numbers, of no machine that exists."""


# ── models without weights ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama", "mixtral", "vit", "bert", "clip"])
def test_a_configuration_alone_has_the_shapes_of_the_saved_model(family: str, tmp_path: Path):
    saved = tmp_path / "saved"
    CASES[FIRST[family]].save(saved, 0)
    real = Model.open(saved)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text((saved / "config.json").read_text())
    for reference in (alone, alone / "config.json"):
        headers = open_headers(reference)
        assert headers.family.name == real.family.name
        assert {n: headers.info(n).shape for n in headers.architecture.tensors} == {
            n: real.info(n).shape for n in real.architecture.tensors
        }
        assert headers.architecture.digest() == real.architecture.digest()


def test_a_model_without_weights_holds_nothing_to_read():
    headers = open_headers(CONFIGS / "llama-0.1b.json")
    assert headers.info("norm.weight").dtype is torch.bfloat16
    with pytest.raises(CheckpointError, match="cannot be read"):
        headers.read("norm.weight")


def changed(tmp_path: Path, **settings: Any) -> Path:
    config = {**json.loads((CONFIGS / "llama-0.1b.json").read_text()), **settings}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return file


def test_the_type_of_weights_is_the_configurations(tmp_path: Path):
    assert open_headers(changed(tmp_path, dtype="float32")).info("norm.weight").dtype is torch.float32
    old = changed(tmp_path, dtype=None, torch_dtype="float16")
    assert open_headers(old).info("norm.weight").dtype is torch.float16
    assert open_headers(changed(tmp_path, dtype=None)).info("norm.weight").dtype is torch.bfloat16
    with pytest.raises(ArchitectureError, match="dtype 'int8' in the configuration is not a type of weights"):
        open_headers(changed(tmp_path, dtype="int8"))


def test_configurations_that_say_too_little_are_refused(tmp_path: Path):
    with pytest.raises(ArchitectureError, match="'unheard_of' is not supported"):
        open_headers(changed(tmp_path, model_type="unheard_of"))
    with pytest.raises(ArchitectureError, match="lacks 'intermediate_size', which the llama table needs"):
        open_headers(changed(tmp_path, intermediate_size=None))
    with pytest.raises(
        ArchitectureError, match=r"config\.json: hidden_size: input should be a valid integer"
    ):
        open_headers(changed(tmp_path, hidden_size="wide"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="no weights in this folder"):
        open_headers(empty)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(LibraryError, match="this needs transformers") as refused:
        open_headers(CONFIGS / "llama-0.1b.json")
    assert refused.value.hint == "pip install 'transfusion-rebasin[transformers]'"


# ── operations ───────────────────────────────────────────────────────────────────────────────


def test_one_pass_has_the_operations_of_its_products(made: Any):
    """An axis alone: every column of every tensor that has it, times the square of its units."""
    weights = WeightPair(*(Model.open(made("llama", seed)) for seed in (1, 2)))
    sizes = weights.architecture.sizes
    (ffn,) = (block for block in blocks(weights, preset("guarded")) if block.ids == ("layer.0.ffn",))
    width = weights.sections["layer.0.ffn"][0].width
    assert products_of(weights, ffn) == 3 * 2 * width * sizes["layer.0.ffn"] ** 2  # gate, up and down
    assert assignments_of(weights, ffn) == 32 * sizes["layer.0.ffn"] ** 2.5


# ── estimates ────────────────────────────────────────────────────────────────────────────────


def test_estimates_grow_with_models():
    found = [plan(CONFIGS / f"llama-{size}.json", machine=MACHINE) for size in ("0.1b", "0.3b", "1.1b")]
    for smaller, larger in pairwise(found):
        assert larger.parameters > smaller.parameters
        for phase in smaller.phases:
            assert larger.phase(phase.name).seconds > phase.seconds
        assert larger.memory["total"] > smaller.memory["total"]
        assert larger.traffic["transport_written"] > smaller.traffic["transport_written"]
        assert larger.transport["seconds"] > smaller.transport["seconds"]
    assert [found[0].parameters, found[2].parameters] == [124_668_672, 1_100_048_384]


def test_twice_as_deep_is_about_twice_as_long_and_twice_as_wide_eight_times(tmp_path: Path):
    """A layer has its share of products; each product grows with the cube of the width."""
    base = json.loads((CONFIGS / "llama-0.1b.json").read_text()) | {"vocab_size": 64}
    deep = {"num_hidden_layers": 2 * base["num_hidden_layers"]}
    wide = {name: 2 * base[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    wide["num_key_value_heads"] = 2 * base["num_key_value_heads"]
    first, deeper, wider = (
        plan(changed(tmp_path, vocab_size=64, **more), machine=MACHINE).phase("first sweep").operations
        for more in ({}, deep, wide)
    )
    assert deeper / first == pytest.approx(2, rel=0.1)
    assert wider / first == pytest.approx(8, rel=0.15)


def test_a_faster_machine_is_faster_and_more_nodes_are_never_slower():
    file = CONFIGS / "mixtral-8x22b.json"
    settings: dict[str, Any] = {"cores": 8, "memory": 256 * 10**9, "network": 1e9}
    one, eight = (plan(file, machine=MACHINE, nodes=nodes, **settings) for nodes in (1, 8))
    assert eight.seconds < one.seconds
    assert eight.transport["seconds"] < one.transport["seconds"]
    assert one.traffic["align_network"] == 0 < eight.traffic["align_network"]
    for found in (one, eight):
        assert found.memory["total"] <= 256e9
    fast = Machine(2, 2e11, 2e9)
    assert plan(file, machine=fast).seconds == pytest.approx(plan(file, machine=MACHINE).seconds / 2)


def test_more_sweeps_and_advice_take_longer():
    file = CONFIGS / "llama-0.1b.json"
    one, two, five = (plan(file, machine=MACHINE, sweeps=sweeps) for sweeps in (1, 2, 5))
    assert one.phase("later sweeps").seconds == 0 < two.phase("later sweeps").seconds
    assert two.seconds < five.seconds
    brief = plan(file, machine=MACHINE, sweeps=5, advice=False)
    assert five.seconds - brief.seconds == pytest.approx(five.phase("advice").seconds)


def test_finetunes_are_transported_one_after_another():
    one, three = (plan(CONFIGS / "llama-0.1b.json", machine=MACHINE, finetunes=n) for n in (1, 3))
    assert three.transport["seconds"] == pytest.approx(3 * one.transport["seconds"])
    assert three.traffic["transport_written"] == 3 * one.traffic["transport_written"]
    assert three.seconds == one.seconds


@pytest.mark.parametrize("method", [method.name for method in METHODS.values() if method.searches])
def test_every_method_that_searches_has_an_estimate(method: str):
    assert plan(CONFIGS / "llama-0.1b.json", machine=MACHINE, method=method).seconds > 0


def test_memory_is_what_dry_runs_say(tmp_path: Path):
    places = tmp_path / "a", tmp_path / "b"
    for seed, place in enumerate(places):
        CASES["llama"].save(place, seed)
    a, b = map(Model.open, places)
    for memory in (None, 400_000_000):
        found = plan(a, b, machine=MACHINE, cores=2, memory=memory)
        details = plan_memory(a, b, method=preset("guarded"), memory=memory, jobs=2)
        assert (found.memory["total"], found.cluster.workers) == (details["memory"], details["threads"])
    transport = TransportPlan.planned(a, b, assumed=True).transport(a, trust_base=True).plan()
    assert found.memory["transport"] == transport["memory_in_all"]
    assert found.traffic["transport_read"] == transport["bytes_to_read"]


def test_workers_of_a_node_share_its_memory():
    found = plan(CONFIGS / "llama-1.1b.json", machine=MACHINE, nodes=2, cores=8, memory=6 * 10**9)
    assert 2 <= found.cluster.workers < 16
    assert found.memory["total"] <= 6e9


def test_with_little_memory_gains_are_computed_again_and_weights_read_again():
    file = CONFIGS / "llama-1.1b.json"
    roomy, tight = (plan(file, machine=MACHINE, memory=memory * 10**9) for memory in (64, 3))
    assert tight.memory["total"] <= 3e9 < roomy.memory["total"]
    assert tight.phase("later sweeps").operations > roomy.phase("later sweeps").operations
    assert roomy.traffic["align_read"] == roomy.bytes < tight.traffic["align_read"]


RUNS = json.loads((SCALE / "measured.json").read_text())["local"]


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{one['size']} {one['what']}" for one in RUNS])
def test_the_estimate_is_about_right_for_runs_that_were_measured(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Recorded by `make bench-scale`, with the constants of the machine at that time."""
    monkeypatch.syspath_prepend(str(SCALE.parent))
    from scale.models import SIZES

    one, run = RUNS[number], RUNS[number]["run"]
    (tmp_path / "config.json").write_text(json.dumps(SIZES[one["size"]].config()))
    (tmp_path / "machine.json").write_text(json.dumps(one["constants"]))
    found = plan(
        tmp_path / "config.json",
        machine=tmp_path / "machine.json",
        memory=run["task"]["memory"],
        sweeps=run["sweeps"],
    )
    assert found.seconds == pytest.approx(run["total"], rel=0.25)
    assert found.memory["total"] == run["planned"]


def test_what_makes_no_sense_is_refused():
    file = CONFIGS / "llama-0.1b.json"
    for name in ("nodes", "cores", "sweeps", "finetunes"):
        with pytest.raises(SettingError, match=f"{name} = 0: at least one is needed"):
            plan(file, machine=MACHINE, **{name: 0})
    with pytest.raises(SettingError, match="memory = -1: more than 0 is needed"):
        plan(file, machine=MACHINE, memory=-1)
    for method in ("functional", "ot", "naive"):
        with pytest.raises(SettingError, match=f"method {method} does not search: no estimate"):
            plan(file, machine=MACHINE, method=method)
    with pytest.raises(transfusion.TransfusionError, match="do not have the same tensors"):
        plan(file, CONFIGS / "llama-1.1b.json", machine=MACHINE)


# ── machines ─────────────────────────────────────────────────────────────────────────────────


def test_a_machine_is_written_and_read(tmp_path: Path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE.as_dict()))
    assert Machine.load(file) == MACHINE


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no json", "Expecting value"),
        ("{}", "of another kind or release"),
        ("[1]", "a JSON object was expected"),
        (json.dumps({**MACHINE.as_dict(), "operations_per_second": 0}), "operations_per_second"),
        (json.dumps({**MACHINE.as_dict(), "bytes_per_second": "fast"}), "bytes_per_second"),
        (json.dumps({**MACHINE.as_dict(), "cores": 1.5}), "cores"),
        (json.dumps({**MACHINE.as_dict(), "transfusion-machine": 1}), "of another kind or release"),
        (json.dumps({"transfusion-machine": 3, "cores": 2}), "operations_per_second"),
    ],
)
def test_what_is_no_machine_is_refused(content: str, reason: str, tmp_path: Path):
    file = tmp_path / "machine.json"
    file.write_text(content)
    with pytest.raises(SettingError, match=f"machine.json: not a file of a machine's constants .*{reason}"):
        Machine.load(file)


# ── the verb ─────────────────────────────────────────────────────────────────────────────────


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(one) for one in arguments])
    return int(stopped.value.code or 0)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE.as_dict()))
    return file


def test_the_verb_shows_people_and_programs_the_same(machine: Path, capsys: pytest.CaptureFixture[str]):
    where = ("--nodes", 2, "--network", "8Gb", "--memory", "16GB")
    asked = ("plan", CONFIGS / "llama-0.1b.json", "--machine", machine, *where)
    assert run(*asked, "--json") == 0
    details = json.loads(capsys.readouterr().out)
    assert (details["verb"], details["cluster"]["nodes"], details["cluster"]["network"]) == ("plan", 2, 1e9)
    assert details["cluster"]["machine"]["operations_per_second"] == 1e11
    assert details["seconds"] == pytest.approx(sum(phase["seconds"] for phase in details["phases"]))
    assert {"total", "gains", "transport"} <= details["memory"].keys()
    assert {"align_read", "transport_written"} <= details["traffic"].keys()
    assert run(*asked) == 0
    shown = capsys.readouterr().out
    assert "2 nodes of 2 cores with 16 GB each" in shown
    assert "time, about" in shown
    assert "later sweeps" in shown


def test_wrong_usage_of_the_verb(machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = CONFIGS / "llama-0.1b.json"
    for arguments, message in (
        ((), "give A"),
        ((file, "-o", tmp_path / "x.json"), "go together"),
        ((file, "--machine", machine, "--memory", "much"), "is not a size"),
        ((file, "--machine", machine, "--network", "fast"), "not an amount"),
        ((file, "--machine", machine, "--memory", "400MB"), "give at least"),
        ((file, "--machine", machine, "--nodes", 0), "0 is not between 1 and"),
        ((file, "--machine", file), "not a file of a machine's constants"),
    ):
        assert run("plan", *arguments) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_machine_is_measured_and_used(tmp_path: Path, capsys: Any):
    file = tmp_path / "machine.json"
    assert run("plan", "--measure-machine", "-o", file) == 0
    assert "operations of matrix products" in capsys.readouterr().out
    found = Machine.load(file)
    assert found.operations_per_second > 1e8
    assert found.bytes_per_second > 1e6
    assert run("plan", CONFIGS / "llama-0.1b.json", "--machine", file) == 0
    assert run("plan", "--measure-machine", "-o", file) == 1
    assert "exists" in capsys.readouterr().err
