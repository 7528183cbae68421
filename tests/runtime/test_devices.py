"""Every verb computes on the device that is asked for: nothing heavy is left on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fake_device import NAME, fake_device
from small_models import CASES, finetuned, often
from tests.transport.test_adapter import train_adapter
from tests.transport.test_refinement import Interrupted
from transfusion import align, ask, barrier, evaluate, fewshot, predict, sweep, transport, verify
from transfusion.alignment.alignment import Alignment
from transfusion.runtime.resources import Resources
from transfusion.transport.refinement import descent, starts, teaching
from transfusion.transport.refinement import inputs as refinement_inputs

VIT = "vit-classifier"
Result = TypeVar("Result")


DRAWN = {"running.probes.photographs", "running.probes.audio"}
"""What draws inputs, which are on the CPU until a module reads them."""
READ = {"transport.adapters.drift"}
"""What compares weights as they are read from files."""


@pytest.fixture(autouse=True)
def few_inputs(monkeypatch):
    """Few inputs, so that the runs are short."""
    for place, settings in (
        (refinement_inputs, {"INVERTED": 8, "INVERSION_STEPS": 2, "HELD_OUT": 8, "LEAST_HELD_OUT": 4}),
        (refinement_inputs, {"WRITTEN": 8, "LEAST_WRITTEN": 8, "POOL": 32}),
        (teaching, {"BATCH": 8}),
        (starts, {"FITTED": 16}),
        (descent, {"TRIED": 1, "LEAST_TRIAL": 2}),
    ):
        for name, value in settings.items():
            monkeypatch.setattr(place, name, value)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {
        name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-4) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), atol=atol), name


def both(verb: Callable[..., Result], *given: object, **asked: object) -> tuple[Result, Result]:
    """Return what a verb finds, and what it finds on the device, where all products are."""
    memory, exact = asked.pop("memory", None), asked.pop("exact", True)
    with sdpa_kernel(SDPBackend.MATH):  # the device has no other
        here = verb(*given, **asked, resources=Resources(jobs=1, memory=memory))
    with fake_device(exact=exact) as products:
        there = verb(*given, **asked, resources=Resources(device=NAME, jobs=1, memory=memory))
    assert products.on_device
    assert not products.on_cpu.keys() - DRAWN - READ
    return here, there


@pytest.fixture(scope="module")
def given(made, aligned, tmp_path_factory):
    """Return the parameters of a transport onto a stranger: ``given(case)``, or with a LoRA."""

    def of(case: str, onto: str | None = None, lora: list[str] | None = None, **about):
        a, b = made(onto or case), made(onto or case, 2)
        folder = tmp_path_factory.mktemp("tuned")
        if lora is None:
            finetuned(CASES[case], a, folder / "tuned")
        else:
            train_adapter(a, folder / "tuned", lora, **about)
        pi = folder / "pi.safetensors"
        aligned(a, b, method="naive").save(pi)
        return {"finetuned": folder / "tuned", "base": a, "onto": b, "via": pi}

    return of


# ── matching, and what runs models to judge π ────────────────────────────────────────────────

ALIGNED = [
    ("vit", "guarded", {}),
    ("vit", "transfusion", {}),
    ("vit", "git-rebasin", {}),
    ("vit", "brute-force", {}),
    ("vit", "ot", {}),
    ("vit", "functional", {}),
    ("vit", "guarded", {"memory": 4 * 10**9}),
    ("mixtral", "guarded", {}),
    ("mixtral", "functional", {}),
    ("llama", "functional", {}),
    ("llama", "functional", {"memory": 4 * 10**9}),
    ("llama", "auto", {}),
]


@pytest.mark.parametrize(("case", "method", "more"), often(ALIGNED, [ALIGNED[place] for place in (0, 4, 10)]))
def test_alignments_are_found_there(case, method, more, made, tmp_path):
    same_maps(both(align, made(case), made(case, 2), method=method, **more), tmp_path)


def test_alignments_between_shapes_are_found_and_judged_there(made, tmp_path):
    a, b = made("llama"), made("qwen2")
    found = both(align, a, b, method="functional")
    same_maps(found, tmp_path)
    here, there = both(predict, a, b, via=found[0])
    assert here.mean.found == pytest.approx(there.mean.found, abs=1e-6)


def same_maps(found: tuple[Alignment, Alignment], folder: Path) -> None:
    same(*(load_file(pi.save(folder / f"{name}.safetensors")) for name, pi in zip("ab", found, strict=True)))


@pytest.mark.parametrize("memory", [None, 10**9])
def test_a_is_compared_with_its_image_there(memory, made, aligned):
    a = made("llama")
    here, there = both(verify, a, via=aligned(a, made("llama", 2), residual="tied"), memory=memory)
    assert here.equal
    assert there.equal


def test_alpha_is_chosen_there(given, tmp_path):
    for more in (
        {"alpha": "auto"},
        {"keep_support": 0.1, "exact": False},
        {"alpha": "auto", "memory": 10**9},
    ):
        here, there = both(transport, **given(VIT), **more)
        assert here.metadata()["output_shift"] == there.metadata()["output_shift"]


# ── evaluation ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.safetensors"
    images = torch.randn(21, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    save_file({"pixel_values": images, "labels": torch.arange(21) % 7}, file)
    return file


@pytest.mark.parametrize("exact", [True, False])
def test_models_are_measured_there(exact, given, data):
    job = given(VIT)
    tuned, a, b = job["finetuned"], job["base"], job["onto"]
    here, there = both(evaluate, [tuned], data=data, against=b, exact=exact)
    assert here.metadata()["models"] == there.metadata()["models"]
    here, there = both(barrier, a, b, data=data, via=job["via"], points=3, exact=exact)
    assert close(here.metadata()["curves"], there.metadata()["curves"])


@pytest.mark.parametrize(
    ("verb", "more"), [(sweep, {"alphas": [0, 1]}), (fewshot, {"shots": 1, "epochs": 1})]
)
def test_lines_are_followed_there(verb, more, given, data):
    here, there = both(verb, **given(VIT), data=data, **more, exact=False)
    assert close(here.metadata()["curves"], there.metadata()["curves"])


def close(one: Any, other: Any) -> bool:
    """Whether two results are alike, to rounding."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(close(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(close, one, other))
    return one == pytest.approx(other, abs=1e-5) if isinstance(one, float) else one == other


# ── refinement ───────────────────────────────────────────────────────────────────────────────


REFINED = [
    (VIT, None, {}),
    (VIT, None, {"refine_rank": 2}),
    ("bert-classifier", "bert", {}),
    ("clip", None, {}),
    ("whisper", None, {}),
    ("t5", None, {}),
]


@pytest.mark.parametrize(("case", "onto", "more"), often(REFINED, REFINED[1:3]))
def test_models_learn_there(case, onto, more, given, tmp_path):
    refined_alike(given(case, onto), tmp_path, **more)


def test_adapters_learn_there(given, tmp_path):
    refined_alike(given(VIT, lora=["q_proj", "fc1"]), tmp_path, exact=False)


@pytest.mark.parametrize("lora", [None, ["q_proj", "down_proj"]])
def test_language_models_answer_and_learn_there(lora, given, tmp_path):
    refined_alike(given("llama", lora=lora, task_type="CAUSAL_LM"), tmp_path, exact=False)


def refined_alike(job: dict[str, Any], folder: Path, **more: object) -> None:
    """Require the same files from both devices."""
    how = {"refine": True, "refine_steps": 3, "force_unrelated": True, **more}
    here, there = both(transport, **job, **how)
    same(*(tensors(one.save(folder / name)) for name, one in zip("ab", (here, there), strict=True)))
    if "refine_rank" not in more:
        moved, learned = tensors(transport(**job, alpha=1.0).save(folder / "moved")), tensors(folder / "b")
        assert any(not torch.equal(learned[name], one) for name, one in moved.items()), "it was trained"


@pytest.mark.slow
def test_an_interrupted_training_goes_on_there(given, tmp_path):
    job = {**given(VIT, lora=["q_proj", "fc1"]), "refine": True, "refine_steps": 3, "force_unrelated": True}
    with fake_device():
        how = {**job, "resources": Resources(device=NAME, jobs=1)}
        transport(**how, output=tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            transport(**how, output=tmp_path / "again", progress=Interrupted(2))
        transport(**how, output=tmp_path / "again")
    same(tensors(tmp_path / "whole"), tensors(tmp_path / "again"), atol=0)


def test_answers_are_given_there(given):
    job = given("llama", lora=["q_proj"], task_type="CAUSAL_LM")
    here, there = both(ask, job["finetuned"], base=job["base"])
    for one, other in ((here.learned, there.learned), (here.held_out, there.held_out)):
        for kind, answers in one.items():
            assert torch.equal(answers.ids, other[kind].ids)
            assert torch.allclose(answers.shares.float(), other[kind].shares.float(), atol=1e-2)


# ── devices that are not there ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("device", ["cuda", "hpu", "mps", "meta", "nonsense", "cpu:x"])
def test_a_device_that_is_not_there_is_refused_in_one_line(device, given, data, cli, tmp_path):
    job = {name: str(one) for name, one in given(VIT).items()}
    a, b, pi = job["base"], job["onto"], job["via"]
    moving = [job["finetuned"], "--base", a, "--onto", b, "--via", pi]
    for words in (
        ["align", a, b, "-o", tmp_path / "pi.safetensors"],
        ["transport", *moving, "--refine", "-o", tmp_path / "out"],
        ["transport", *moving, "--alpha", "auto", "-o", tmp_path / "out"],
        ["ask", job["finetuned"], "--base", a, "-o", tmp_path / "answers.safetensors"],
        ["verify", a, "--via", pi],
        ["verify", a, "--via", pi, "--onto", b],
        ["evaluate", a, "--data", data],
        ["barrier", a, b, "--data", data],
        ["sweep", *moving, "--data", data],
    ):
        code, _, err = cli(*words, "--device", device)
        assert code, words
        first, *more = err.strip().splitlines()
        assert f"device {device!r} cannot be used here" in first, words
        assert [one.strip() for one in more] == ["hint: leave out --device to compute on cpu"]
    assert not (tmp_path / "out").exists()


def test_where_float64_is_needed_and_missing_it_is_said_in_one_line(given, cli, tmp_path):
    job = given(VIT)
    for words in (
        ["align", job["base"], job["onto"], "-o", tmp_path / "pi.safetensors"],
        ["verify", job["base"], "--via", job["via"]],
        ["verify", job["base"], "--via", job["via"], "--onto", job["onto"]],
    ):
        with fake_device(exact=False):
            code, _, err = cli(*words, "--device", NAME)
        assert code, words
        assert "device 'fake' cannot be used here" in err
        assert "float64" in err


# ── the device of these tests ────────────────────────────────────────────────────────────────


def test_the_device_is_as_strict_as_an_accelerator():
    with fake_device() as products:
        there, here = torch.randn(32, 32, device=NAME), torch.randn(32, 32)
        assert there.device == torch.device(f"{NAME}:0")
        assert (there + torch.tensor(1.0)).device == there.device, "numbers are on any device"
        assert there[torch.tensor([1, 2])].device == there.device, "and so are indices"
        for mix in (
            lambda: there + here,
            lambda: here @ there,
            lambda: here[torch.tensor([1], device=NAME)],
            lambda: there.index_put((torch.tensor([1]),), here[:1]),
            there.numpy,
            lambda: torch.randn(2, device=NAME, generator=torch.Generator()),
        ):
            with pytest.raises((RuntimeError, TypeError), match="device|not supported"):
                mix()
        before = products.on_device
        assert torch.equal((there @ there).cpu(), there.cpu() @ there.cpu())
        assert products.on_device == before + 1
        assert [len(one) for one in products.on_cpu.values()] == [1]


def test_its_modules_train_and_their_ties_stay():
    with fake_device():
        module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        module[2].weight = module[0].weight
        module.to(NAME)
        assert module[2].weight is module[0].weight
        optimizer, before = torch.optim.Adam(module.parameters()), module[0].weight.cpu()
        module(torch.ones(2, 4, device=NAME)).square().mean().backward()
        optimizer.step()
        assert module[0].weight.grad.device.type == NAME
        assert not torch.equal(module.cpu()[0].weight, before)
