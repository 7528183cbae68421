"""Mixtures of experts: who is who is found from what the router and the neurons compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned, often
from transfusion.alignment.alignment import Alignment
from transfusion.matching import heads_and_experts
from transfusion.matching.align import align
from transfusion.matching.methods import preset
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
ROUTER = "model.layers.0.block_sparse_moe.gate.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.{}.w{}.weight"


def shuffled(a: Path, folder: Path) -> tuple[Alignment, Path]:
    planted = align(a, a, method="random", residual="tied", seed=3)
    return planted, apply(planted, a).save(folder)


def functional(a: Path, b: Path, residual: str = "tied") -> Alignment:
    return align(a, b, method=preset("functional").changed(probes=64), residual=residual)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A folder with something done to its tensors."""
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    change(state)
    save_file(state, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("case", "residual"),
    often(product(MIXTURES, ["untied", "tied"]), [("mixtral", "untied"), ("qwen2_moe", "tied")]),
)
def test_experts_and_their_neurons_are_found_again(case, residual, made, tmp_path):
    a = made(case)
    planted, b = shuffled(a, tmp_path / "b")
    pi = functional(a, b, residual)
    assert planted.maps["layer.0.ffn"].blocks == 5
    for id in (f"layer.{i}.{axis}" for i in range(3) for axis in ("expert", "ffn")):
        assert pi.maps[id] == planted.maps[id]


@pytest.mark.parametrize("case", often(MIXTURES, ["qwen3_moe"]))
def test_a_fine_tune_computes_the_same_on_the_shuffled_model(case, made, tmp_path):
    a = made(case)
    planted, b = shuffled(a, tmp_path / "b")
    tuned = finetuned(CASES[case], a, tmp_path / "tuned")
    moved = transport(tuned, base=a, onto=b, via=functional(a, b)).save(tmp_path / "moved")
    base = Model.open(a).under(planted.provenance.policy)
    live = replace(LiveModel.of(Model.open(tuned)), architecture=base.architecture)
    expected = live.expected(planted, live.outputs())
    scale = max(float(value.abs().max()) for value in expected.values())
    assert largest_difference(expected, LiveModel.of(Model.open(moved)).outputs()) < 1e-4 * scale


def test_they_are_found_under_noise(made, tmp_path):
    a = made("mixtral")
    planted, b = shuffled(a, tmp_path / "b")
    generator = torch.Generator().manual_seed(5)

    def noisy(state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            noise = torch.randn(value.shape, generator=generator)
            state[name] = value + 0.1 * value.std(unbiased=False) * noise

    pi = functional(a, changed(b, noisy))
    assert all(pi.maps[f"layer.{i}.expert"] == planted.maps[f"layer.{i}.expert"] for i in range(3))
    same = np.mean(pi.maps["layer.0.ffn"].index == planted.maps["layer.0.ffn"].index)
    assert same > 0.9


def test_neurons_tell_experts_apart_where_the_router_does_not(tmp_path):
    """Only block 0: who is chosen there is a matter of order, so that later ones see other things."""

    def silent(state: dict[str, torch.Tensor]) -> None:
        state[ROUTER] = torch.zeros_like(state[ROUTER])

    a = changed(CASES["mixtral"].save(tmp_path / "a", 1), silent)
    planted, b = shuffled(a, tmp_path / "b")
    pi = functional(a, b)
    assert not planted.maps["layer.0.expert"].is_identity()
    for id in ("layer.0.expert", "layer.0.ffn"):
        assert pi.maps[id] == planted.maps[id]


def test_the_router_tells_experts_apart_where_neurons_do_not(tmp_path):
    def alike(state: dict[str, torch.Tensor]) -> None:
        for expert in range(5):
            for matrix in (1, 2, 3):
                state[EXPERT.format(expert, matrix)] = state[EXPERT.format(0, matrix)].clone()

    a = changed(CASES["mixtral"].save(tmp_path / "a", 1), alike)
    planted, b = shuffled(a, tmp_path / "b")
    assert functional(a, b).maps["layer.0.expert"] == planted.maps["layer.0.expert"]


def test_some_neurons_are_enough_to_tell_experts_apart(made, tmp_path, monkeypatch):
    monkeypatch.setattr(heads_and_experts, "COMPARED", 10)
    monkeypatch.setattr(
        heads_and_experts, "_router_agreement", lambda stack, given: torch.zeros(5, 5, dtype=torch.float64)
    )
    a = made("mixtral")
    assert Model.open(a).architecture.sizes["layer.0.ffn"] > 8
    planted, b = shuffled(a, tmp_path / "b")
    pi = functional(a, b)
    for id in (f"layer.{i}.{axis}" for i in range(3) for axis in ("expert", "ffn")):
        assert pi.maps[id] == planted.maps[id]


def test_what_the_maps_are_worth_includes_the_router(made, tmp_path):
    a = made("mixtral")
    _, b = shuffled(a, tmp_path / "b")
    worth = functional(a, b).provenance.advice["axes"]
    assert worth["layer.0.expert"]["found"] > 0.999
    assert worth["layer.0.expert"]["identity"] < 0.9
