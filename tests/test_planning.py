"""Plans on paper: counts as a real search has them, shapes as real models have them, refusals that say why."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import transfusion
from families import CASES, FIRST, often
from transfusion.cli import main
from transfusion.errors import ArchitectureError, CheckpointError, LibraryError, SettingError
from transfusion.matching import blocks as blocks_module
from transfusion.matching.methods import SearchStart, preset
from transfusion.matching.search import Search, Trial
from transfusion.matching.search_memory import SearchMemory, plan_memory
from transfusion.matching.solvers import assignment
from transfusion.matching.weights import gain_products
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.runtime.engines import LocalEngine
from transfusion.runtime.threads import Threads
from transfusion.transportation.planning import costs as costs_module
from transfusion.transportation.planning.cost_plan import plan
from transfusion.transportation.planning.costs import Costs
from transfusion.transportation.planning.machine import Machine
from transfusion.transportation.planning.paper import sketch
from transfusion.transportation.planning.phases import SearchRehearsal
from transfusion.transportation.planning.schedule import makespan, shared
from transfusion.transportation.planning.sweep_cost import Rehearsed
from transfusion.transportation.planning.work import Work

CONFIGS = Path(__file__).parent.parent / "benchmarks" / "scale" / "configs"
MACHINE = Machine(
    cores=2,
    product=1e11,
    together=0.8,
    summing=1e10,
    reading=1e9,
    hashing=1e9,
    picking=1e9,
    placing=1e8,
    moving=5e8,
    comparing=1e9,
    eigen=1e10,
    fresh=4e9,
    storage=1e9,
    writing=5e8,
    assignments={4: 4e-5, 64: 7e-5, 1024: 0.01, 4096: 0.4},
    candidates={2048: 0.2, 4096: 0.8},
)
"""Not a machine that there is: round numbers."""


# ── models on paper ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama", "mixtral", "vit", "bert", "clip"])
def test_a_configuration_alone_has_the_shapes_of_the_saved_model(family: str, tmp_path: Path):
    saved = tmp_path / "saved"
    CASES[FIRST[family]].save(saved, 0)
    real = Model.open(saved)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text((saved / "config.json").read_text())
    for reference in (alone, alone / "config.json"):
        paper = sketch(reference)
        assert paper.family.name == real.family.name
        assert {n: paper.info(n).shape for n in paper.architecture.tensors} == {
            n: real.info(n).shape for n in real.architecture.tensors
        }
        assert paper.architecture.digest() == real.architecture.digest()


def test_a_paper_model_holds_nothing_to_read():
    paper = sketch(CONFIGS / "llama-0.1b.json")
    assert paper.info("norm.weight").dtype is torch.bfloat16
    with pytest.raises(CheckpointError, match="cannot be read"):
        paper.read("norm.weight")


def changed(tmp_path: Path, **settings: Any) -> Path:
    config = {**json.loads((CONFIGS / "llama-0.1b.json").read_text()), **settings}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return file


def test_the_type_of_weights_is_the_configurations(tmp_path: Path):
    assert sketch(changed(tmp_path, dtype="float32")).info("norm.weight").dtype is torch.float32
    old = changed(tmp_path, dtype=None, torch_dtype="float16")
    assert sketch(old).info("norm.weight").dtype is torch.float16
    assert sketch(changed(tmp_path, dtype=None)).info("norm.weight").dtype is torch.bfloat16
    with pytest.raises(ArchitectureError, match="dtype 'int8', which is no type of weights"):
        sketch(changed(tmp_path, dtype="int8"))


def test_configurations_that_say_too_little_are_refused(tmp_path: Path):
    with pytest.raises(ArchitectureError, match="'unheard_of' is not supported"):
        sketch(changed(tmp_path, model_type="unheard_of"))
    with pytest.raises(ArchitectureError, match="lacks 'intermediate_size', which the llama table needs"):
        sketch(changed(tmp_path, intermediate_size=None))
    with pytest.raises(
        ArchitectureError, match=r"config\.json: hidden_size: input should be a valid integer"
    ):
        sketch(changed(tmp_path, hidden_size="wide"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="no weights in this folder"):
        sketch(empty)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(LibraryError, match="this needs transformers") as refused:
        sketch(CONFIGS / "llama-0.1b.json")
    assert refused.value.hint == "pip install 'transfusion[transformers]'"


# ── counts ───────────────────────────────────────────────────────────────────────────────────


class Watch:
    """What a real search does: operations of products, bytes read, assignments by size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clear()
        addmm, mm, read, solve = torch.addmm, torch.mm, WeightPair.read, assignment.solve

        def multiplied(left: Any, right: Any) -> None:
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]

        def added(into: Any, left: Any, right: Any, *, out: Any) -> Any:
            multiplied(left, right)
            return addmm(into, left, right, out=out)

        def made(left: Any, right: Any, *, out: Any) -> Any:
            multiplied(left, right)
            return mm(left, right, out=out)

        def seen(weights: WeightPair, side: str, name: str, rows: Any = None) -> Any:
            found = read(weights, side, name, rows)
            self.read += found.numel() * weights.a.info(name).dtype.itemsize
            return found

        def solved(gain: Any, **known: Any) -> Any:
            self.assignments[gain.shape[1]] += gain.shape[0]
            return solve(gain, **known)

        monkeypatch.setattr(torch, "addmm", added)
        monkeypatch.setattr(torch, "mm", made)
        monkeypatch.setattr(WeightPair, "read", seen)
        for module in (assignment, blocks_module):
            monkeypatch.setattr(module, "solve", solved)

    def clear(self) -> None:
        self.flops, self.read, self.assignments = 0, 0, Counter()

    def agrees_with(self, work: Work) -> bool:
        return (self.flops, self.read, self.assignments) == (work.flops, work.read, Counter(work.assignments))


@pytest.mark.parametrize("family", ["llama", "vit", "gpt2", "mixtral"])
@pytest.mark.parametrize("start", [SearchStart.PROGRESSIVE, SearchStart.IDENTITY])
def test_a_first_sweep_is_counted_as_it_happens(
    family: str, start: SearchStart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Exactly, operation by operation and byte by byte, scores included; in chunks, as of large matrices."""
    for module in (gain_products, costs_module):
        monkeypatch.setattr(module, "BLOCK", 4)
        monkeypatch.setattr(module, "NUMBERS", 200)
    places = tmp_path / "a", tmp_path / "b"
    for seed, place in enumerate(places):
        CASES[FIRST[family]].save(place, seed)
    method = preset("guarded").changed(starts=[start])
    a, b = (Model.open(place).under(method.policy) for place in places)
    weights = WeightPair(a, b)
    watch = Watch(monkeypatch)
    search = Search(weights, method, seed=0, engine=LocalEngine(Threads(1)))
    trial = Trial("real", {}, [search.identity])
    watch.clear()
    search.sweep(trial, start)
    rehearsed = Rehearsed(search, Costs(weights), set(weights.sections))
    work = rehearsed.sweep(start).work
    if start is SearchStart.PROGRESSIVE:
        assert watch.agrees_with(work), (watch.__dict__, work)
    else:  # which proposals were taken is not known beforehand, and neither is what was scored
        assert (watch.flops, watch.assignments) == (work.flops, Counter(work.assignments))


def test_the_passes_over_all_tensors_are_counted_as_they_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    places = tmp_path / "a", tmp_path / "b"
    for seed, place in enumerate(places):
        CASES["llama"].save(place, seed)
    method = preset("guarded")
    weights = WeightPair(*(Model.open(place).under(method.policy) for place in places))
    alpha_search = SearchRehearsal(weights, method, SearchMemory.of(weights, method, 1))
    phases = {phase.name: phase for phase in alpha_search.phases(1)}
    watch = Watch(monkeypatch)
    search = Search(weights, method, seed=0, engine=LocalEngine(Threads(1)))
    assert search.identity
    assert watch.read == phases["identity"].work.read > 0
    watch.clear()
    assert search.in_place
    assert watch.read == phases["kinship"].work.read > 0
    assert phases["hashing"].work.hashed == a_and_b(weights)


def a_and_b(weights: WeightPair) -> int:
    return weights.a.checkpoint.nbytes + weights.b.checkpoint.nbytes


# ── schedules and machines ───────────────────────────────────────────────────────────────────


def test_tasks_go_to_whoever_is_free():
    assert makespan([3, 1, 1, 1], 2) == 3
    assert makespan([3, 1, 1, 1], 1) == 6
    assert makespan([], 4) == 0
    assert shared(768, 2) == pytest.approx(512 / 768)
    assert shared(2048, 2) == pytest.approx(0.5)
    assert shared(64, 8) == 1


def test_assignments_grow_by_the_power_that_was_measured():
    assert MACHINE.assigning(1024) == pytest.approx(0.01)
    assert MACHINE.growth == pytest.approx(2.66, abs=0.01)
    assert MACHINE.assigning(8192) == pytest.approx(0.4 * 2**MACHINE.growth)
    assert MACHINE.assigning(16384) == pytest.approx(0.8 * 4**2)  # among candidates
    assert MACHINE.assigning(64) < MACHINE.assigning(300) < MACHINE.assigning(1024)


def test_new_memory_costs_time():
    tight = MACHINE.with_new_memory(1.0)
    assert tight.reading == pytest.approx(1 / (1e-9 + 2 / 4e9))
    assert (tight.product, tight.moving) == (MACHINE.product, pytest.approx(1 / (2e-9 + 1e-9)))
    assert MACHINE.with_new_memory(0.0).reading == pytest.approx(MACHINE.reading)


def test_a_machine_is_written_and_read(tmp_path: Path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE.as_dict()))
    assert Machine.load(file) == MACHINE


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no json", "Expecting value"),
        ("{}", "it holds something else"),
        ("[1]", "a JSON object was expected"),
        (json.dumps({**MACHINE.as_dict(), "product": 0}), "not positive"),
        (json.dumps({**MACHINE.as_dict(), "assignments": {"4": 1}}), "fewer than two"),
        (json.dumps({**MACHINE.as_dict(), "candidates": {}}), "fewer than two"),
        (json.dumps({**MACHINE.as_dict(), "transfusion-machine": 2}), "it is of another release"),
        (json.dumps({"transfusion-machine": 1, "cores": 2}), "it is of another release"),
    ],
)
def test_what_is_no_machine_is_refused(content: str, reason: str, tmp_path: Path):
    file = tmp_path / "machine.json"
    file.write_text(content)
    with pytest.raises(SettingError, match=f"machine.json: no file of a machine's constants .*{reason}"):
        Machine.load(file)


# ── plans ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", often(["llama-405b", "mixtral-8x22b"], ["mixtral-8x22b"]))
def test_large_models_are_planned_and_more_nodes_are_never_slower(name: str):
    file = CONFIGS / f"{name}.json"
    settings: dict[str, Any] = {"machine": MACHINE, "cores": 8, "memory": 256e9, "sweeps": 3}
    one, *more = (plan(file, nodes=nodes, network=1e9, **settings) for nodes in (1, 8))
    assert one.traffic["align_network"] == 0 < more[0].traffic["align_network"]
    for fewer, other in pairwise((one, *more)):
        assert other.seconds < fewer.seconds
        assert other.transport["seconds"] < fewer.transport["seconds"]
    for found in (one, *more):
        assert found.memory["working"] >= found.memory["largest_gain"] > 1e9
        assert found.memory["total"] <= 256e9
        assert found.phase("sweep 2").seconds > 0
        assert found.phase("sweep 3").seconds > 0


def test_plans_grow_with_models():
    found = [
        plan(CONFIGS / f"llama-{size}.json", machine=MACHINE, cores=2) for size in ("0.1b", "0.3b", "1.1b")
    ]
    for smaller, larger in pairwise(found):
        assert larger.parameters > smaller.parameters
        for phase in smaller.phases:
            assert larger.phase(phase.name).seconds > phase.seconds
        assert larger.memory["total"] > smaller.memory["total"]
        assert larger.traffic["transport_written"] > smaller.traffic["transport_written"]
    assert [found[0].parameters, found[2].parameters] == [124_668_672, 1_100_048_384]


def test_where_nothing_moves_only_what_was_not_seen_is_computed():
    file = CONFIGS / "llama-0.1b.json"
    moving, still = (plan(file, machine=MACHINE, moving=share) for share in ((1.0, 0.2), (0.0,)))
    assert still.phase("sweep 1").flops == moving.phase("sweep 1").flops
    assert 0 < still.phase("sweep 2").flops < moving.phase("sweep 2").flops
    assert still.phase("sweep 3").flops == 0 < moving.phase("sweep 3").flops


def test_memory_is_what_align_plans(tmp_path: Path):
    places = tmp_path / "a", tmp_path / "b"
    for seed, place in enumerate(places):
        CASES["llama"].save(place, seed)
    a, b = map(Model.open, places)
    for memory in (None, 400_000_000):
        found = plan(a, b, machine=MACHINE, cores=2, memory=memory)
        details = plan_memory(a, b, method=preset("guarded"), memory=memory, jobs=2)
        assert (found.memory["total"], found.cluster.at_once) == (details["memory"], details["threads"])


def test_with_little_memory_gains_are_computed_again_and_weights_read_again():
    file = CONFIGS / "llama-1.1b.json"
    roomy, tight = (plan(file, machine=MACHINE, memory=memory) for memory in (64e9, 3e9))
    assert tight.memory["total"] <= 3e9 < roomy.memory["total"]
    assert tight.phase("sweep 3").flops > roomy.phase("sweep 3").flops
    assert roomy.traffic["align_read"] == roomy.bytes < tight.traffic["align_read"]


def test_what_makes_no_sense_is_refused():
    file = CONFIGS / "llama-0.1b.json"
    for name in ("nodes", "cores", "sweeps", "finetunes"):
        with pytest.raises(SettingError, match=f"{name} = 0: nothing could be done"):
            plan(file, machine=MACHINE, **{name: 0})
    with pytest.raises(SettingError, match="memory = -1: nothing could be done"):
        plan(file, machine=MACHINE, memory=-1)
    with pytest.raises(SettingError, match="method functional: it does not search"):
        plan(file, machine=MACHINE, method="functional")
    with pytest.raises(transfusion.TransfusionError, match="do not have the same tensors"):
        plan(file, CONFIGS / "llama-1.1b.json", machine=MACHINE)


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


def test_the_verb_tells_people_and_programs_the_same(machine: Path, capsys: pytest.CaptureFixture[str]):
    where = ("--nodes", 2, "--network", "8Gb", "--memory", "16GB")
    asked = ("plan", CONFIGS / "llama-0.1b.json", "--machine", machine, *where)
    assert run(*asked, "--json") == 0
    details = json.loads(capsys.readouterr().out)
    assert (details["verb"], details["cluster"]["nodes"], details["cluster"]["network"]) == ("plan", 2, 1e9)
    assert details["assumptions"]["moving"][0] == 1
    assert details["seconds"] == pytest.approx(sum(p["seconds"] for p in details["phases"] if p["counted"]))
    assert run(*asked) == 0
    shown = capsys.readouterr().out
    assert "2 nodes of 2 cores with 16 GB each" in shown
    assert "if some units are at home" in shown


def test_wrong_usage_of_the_verb(machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = CONFIGS / "llama-0.1b.json"
    for arguments, message in (
        ((), "give A"),
        ((file, "-o", tmp_path / "x.json"), "go together"),
        ((file, "--machine", machine, "--memory", "much"), "is not a size"),
        ((file, "--machine", machine, "--network", "fast"), "no amount"),
        ((file, "--machine", machine, "--memory", "400MB"), "give at least"),
        ((file, "--machine", machine, "--moving", "1,2"), "no list of shares"),
        ((file, "--machine", machine, "--nodes", 0), "0 is not between 1 and"),
        ((file, "--machine", file), "no file of a machine's constants"),
    ):
        assert run("plan", *arguments) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_machine_is_measured_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    from transfusion.transportation.planning import machine_benchmark

    monkeypatch.setattr(machine_benchmark, "ASSIGNED", (4, 64))
    monkeypatch.setattr(machine_benchmark, "AMONG_CANDIDATES", (64, 128))
    for size in ("_FILES", "_HEIGHT", "_WIDTH", "_INNER"):
        monkeypatch.setattr(machine_benchmark, size, getattr(machine_benchmark, size) // 6)
    file = tmp_path / "machine.json"
    assert run("plan", "--measure-machine", "-o", file) == 0
    assert "speed kept when all cores work" in capsys.readouterr().out
    found = Machine.load(file)
    assert set(found.assignments) == {4, 64}
    assert 0 < found.together <= 1
    assert run("plan", CONFIGS / "llama-0.1b.json", "--machine", file) == 0
    assert run("plan", "--measure-machine", "-o", file) == 1
    assert "exists" in capsys.readouterr().err
