"""The memory of a search: what is planned from headers, and that a limit changes nothing but memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from transfusion.errors import OutputError, SettingError
from transfusion.matching import blocks
from transfusion.matching.alignment_run import align
from transfusion.matching.methods import preset
from transfusion.matching.search_memory import SearchMemory, memory_needed, plan_memory, within_memory
from transfusion.matching.solvers import assignment
from transfusion.matching.weights import gains_on_disk
from transfusion.matching.weights.gains import Gains
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.runtime.byte_sizes import parse_bytes
from transfusion.runtime.engines import LocalEngine
from transfusion.runtime.memory_budget import PROGRAM, WORKER, MemoryBudget
from transfusion.runtime.resources import Resources
from transfusion.runtime.threads import Threads

GUARDED = preset("guarded")


@pytest.fixture
def llamas(made):
    return [Model.open(made("llama", seed)) for seed in (1, 2)]


@pytest.fixture
def weights(llamas):
    return WeightPair(*llamas)


def test_without_a_limit_all_threads_work_and_most_gains_are_kept(weights):
    budget = SearchMemory.of(weights, GUARDED, 7)
    assert (budget.threads, budget.room, budget.on_disk) == (7, None, 0)
    assert 0 < budget.kept <= weights.nbytes * 3 // 4
    assert budget.block == max(memory_needed(weights, block) for block in blocks.blocks(weights, GUARDED))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_come_first_and_kept_gains_have_the_rest(weights, threads):
    free = SearchMemory.of(weights, GUARDED, 7)
    for spare in (0, 1000, free.block - 1):
        memory = PROGRAM + threads * free.block + spare
        budget = SearchMemory.of(weights, GUARDED, 7, MemoryBudget(memory))
        assert budget.threads == threads
        assert budget.total <= memory
        assert budget.kept == min(
            spare, sum(4 * weights.architecture.rows(s.id) * s.size**2 for s in weights.architecture.free())
        )


def test_too_little_memory_is_refused_with_the_least_that_would_do(weights):
    least = PROGRAM + SearchMemory.of(weights, GUARDED, 1).block
    SearchMemory.of(weights, GUARDED, 1, MemoryBudget(least))
    with pytest.raises(SettingError, match="is too little: .* takes .*, and the program itself") as info:
        SearchMemory.of(weights, GUARDED, 1, MemoryBudget(least - 1))
    enough = parse_bytes(info.value.hint.removeprefix("give at least "))
    SearchMemory.of(weights, GUARDED, 1, MemoryBudget(enough))


def test_a_limit_changes_nothing_but_the_memory(llamas):
    least = PROGRAM + SearchMemory.of(WeightPair(*llamas), GUARDED, 1).block
    free = align(*llamas, resources=Resources(jobs=2))
    for memory in (least, 2 * least):
        found = align(*llamas, resources=Resources(jobs=2, memory=memory))
        assert found.digest == free.digest
        assert found.provenance == free.provenance


def test_a_plan_is_known_from_the_headers(llamas, monkeypatch):
    monkeypatch.setattr(Model, "raw", None)
    monkeypatch.setattr(Model, "read", None)
    plan = plan_memory(*llamas, method=GUARDED, jobs=3)
    assert plan["threads"] == 3
    assert plan["memory"] == PROGRAM + 3 * plan["memory_of_a_block"] + plan["memory_of_kept_gains"]
    assert plan["bytes_to_read"] == sum(model.checkpoint.nbytes for model in llamas)
    of_a_worker = plan_memory(*llamas, method=GUARDED, jobs=3, engine="ray")
    assert of_a_worker["threads"] == 1
    assert of_a_worker["memory"] == WORKER + plan["memory_of_a_block"] + plan["memory_of_kept_gains"]
    assert "memory" not in plan_memory(*llamas, method=preset("naive"))


@pytest.mark.parametrize(
    ("asked", "named"), [({"memory": 10**9}, r"memory of 1\.00 GB"), ({"engine": "ray"}, "engine = 'ray'")]
)
def test_what_holds_whole_models_cannot_be_limited_nor_sent(asked, named, llamas):
    with pytest.raises(SettingError, match=f"{named}: the method ot holds whole models"):
        align(*llamas, method="ot", resources=Resources(**asked))


def test_workers_elsewhere_have_no_device(weights):
    weights.place["device"] = "cuda"
    with pytest.raises(SettingError, match="device 'cuda': workers of Ray compute on cpu"):
        within_memory(weights, GUARDED, None, "ray", None)


def test_an_engine_that_is_there_must_fit(llamas):
    least = PROGRAM + SearchMemory.of(WeightPair(*llamas), GUARDED, 1).block
    with (
        pytest.raises(SettingError, match=r"enough for 1 thread\(s\), and the engine has 2"),
        Threads.opened(2) as two,
    ):
        align(*llamas, resources=Resources(LocalEngine(two), memory=least))


def test_the_command_line_plans_and_keeps_to_it(cli, made, tmp_path):
    a, b, pi = made("llama", 1), made("llama", 2), tmp_path / "pi.safetensors"
    code, out, _ = cli("align", a, b, "-o", pi, "--memory", "2GB", "--jobs", "2", "--dry-run")
    assert code == 0
    assert "this process: at most" in out
    assert not pi.exists()
    code, out, _ = cli("align", a, b, "-o", pi, "--memory", "2GB", "--dry-run", "--json")
    assert json.loads(out)["memory"] <= 2e9
    code, _, err = cli("align", a, b, "-o", pi, "--memory", "1MB")
    assert code == 2
    assert "is too little" in err
    code, out, _ = cli("align", a, b, "-o", pi, "--memory", "2GB", "--json")
    assert json.loads(out)["assignment_gap"] == 0.0


# ── spilling ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_what_does_not_fit_is_spilled_and_comes_out_the_same(case, made, monkeypatch, tmp_path):
    """Huge begins at 24 units here; the limit lets nothing of that size through in one piece."""
    for place in (assignment, gains_on_disk, sys.modules["transfusion.matching.search_memory"]):
        monkeypatch.setattr(place, "HUGE", 24)
    monkeypatch.setattr(gains_on_disk, "PER_UNIT", 0)
    models = made(case, 1), made(case, 2)
    free = align(*models, resources=Resources(jobs=1))
    spilt = []
    honest = gains_on_disk.rows_at_a_time

    def tight(weights, id, room):
        if weights.architecture.sizes[id] >= 24:
            spilt.append(id)
        return honest(weights, id, 0)

    for place in ("blocks", "block_solutions"):
        monkeypatch.setattr(f"transfusion.matching.{place}.rows_at_a_time", tight)
    found = align(*models, resources=Resources(jobs=2))
    assert spilt
    assert found.digest == free.digest


def test_a_spilled_gain_is_the_gain(weights, monkeypatch):
    monkeypatch.setattr(gains_on_disk, "BLOCK", 8)
    monkeypatch.setattr("transfusion.matching.weights.gain_products.BLOCK", 8)
    gains = Gains(weights, Threads(1))
    for id in ("layer.0.ffn", "layer.0.vo"):
        history = gains.history(id, {}, weights.sections[id])
        whole = gains.of(id, history, keep=False).clone()
        with gains_on_disk.gain_on_disk(gains, id, history, step=8) as rows:
            assert len(rows) == len(whole)
            for row, of_memory in zip(rows, whole, strict=True):
                assert row.size == len(of_memory)
                assert torch.equal(row.rows(0, row.size), of_memory)
                assert torch.equal(row.rows(3, 7), of_memory[3:7])


def test_rows_are_spilled_where_they_do_not_fit_beside_their_solution(weights, monkeypatch):
    monkeypatch.setattr(gains_on_disk, "HUGE", 16)
    monkeypatch.setattr(gains_on_disk, "BLOCK", 4)
    id = "layer.0.ffn"
    size = weights.architecture.sizes[id]
    gain, beside = 4 * size**2, gains_on_disk.solving_bytes(1, size)
    assert gains_on_disk.rows_at_a_time(weights, id, None) is None
    assert gains_on_disk.rows_at_a_time(weights, id, 2 * (gain + beside)) is None
    tight = gains_on_disk.rows_at_a_time(weights, id, 2 * (gain + beside) - 2)
    assert tight is not None
    assert tight % 4 == 0
    assert gains_on_disk.rows_at_a_time(weights, id, 1) == 4


def test_a_place_without_room_is_named(weights, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    gains = Gains(weights, Threads(1))
    history = gains.history("layer.0.ffn", {}, weights.sections["layer.0.ffn"])
    monkeypatch.setattr(gains, "of", full)
    with (
        pytest.raises(
            OutputError, match=r"the gain of layer\.0\.ffn .* could not be written to .*No space"
        ) as info,
        gains_on_disk.gain_on_disk(gains, "layer.0.ffn", history, 512),
    ):
        pass
    assert "TMPDIR" in info.value.hint


@pytest.mark.slow
def test_a_limit_is_kept(tmp_path):
    """A model of 70 million parameters, in a process of its own, with the least memory that is accepted."""
    code = """
import sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
from scale.models import Size, pair
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.matching.alignment_run import align
from transfusion.runtime.memory_budget import PROGRAM
from transfusion.matching.search_memory import SearchMemory
from transfusion.matching.methods import preset
from transfusion.model.model import Model
from transfusion.runtime.resources import Resources
a, b = pair(Path(sys.argv[1]), Size("s", 6, 640, 2560, 10, 5, 32000), related=True)
free = SearchMemory.of(WeightPair(Model.open(a), Model.open(b)), preset("guarded"), 1)
memory = int((PROGRAM + free.block) * float(sys.argv[2]))
align(a, b, resources=Resources(memory=memory))
peak = next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
print(memory, peak)
"""
    for times in ("1", "2"):
        info = subprocess.check_output([sys.executable, "-c", code, str(tmp_path), times], text=True)
        memory, peak = map(int, info.split())
        assert peak <= memory
