"""Planted truths: in every family, and at the depth of real models with noise on top."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, FIRST, OFTEN, Case, finetuned, often, transformers_model
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport

WIDE = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 200, "num_hidden_layers": 12}
DEEP = {
    "vit": ("ViTModel", "ViTConfig", {**WIDE, "image_size": 32, "patch_size": 8}),
    "bert": ("BertForPreTraining", "BertConfig", {**WIDE, "vocab_size": 300}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 96, "n_layer": 12, "n_head": 6, "n_inner": 200, "vocab_size": 300}
        | {"n_positions": 50, "bos_token_id": 1, "eos_token_id": 1},
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**WIDE, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"head_dim": 16, "vocab_size": 300},
    ),
}


HARDEST = {("bert", "tied", 0.3), ("gpt2", "untied", 0.3)}
"""With most noise, and each policy of the stream: on a stack with its norms behind, and on one with small outputs."""


@pytest.mark.parametrize(
    ("family", "residual", "noise"), often(product(DEEP, ["untied", "tied"], [0.0, 0.3]), HARDEST)
)
def test_deep_models_are_recovered_under_noise(family, residual, noise, tmp_path):
    """Every axis comes out as it was planted, from the library's own initial weights."""
    model, config, settings = DEEP[family]
    torch.manual_seed(0)
    case = Case(family, partial(transformers_model, model, config, **settings), family)
    a = case.store(case.make(), tmp_path / "a")
    planted = align(a, a, method="random", residual="tied", seed=2)
    b = apply(planted, a).save(tmp_path / "b")
    state = load_file(b / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, value in state.items():
        spread = value.std(unbiased=False)
        state[name] = value + noise * spread * torch.randn(value.shape, generator=generator)
    save_file(state, b / "model.safetensors", {"format": "pt"})
    found = align(a, b, residual=residual)
    for id, map_ in found.maps.items():
        on_stream = id.endswith((".x", ".y", ".stream"))
        assert map_ == planted.maps["layer.stream" if on_stream else id], id


every_family = pytest.mark.parametrize("family", often(sorted(FIRST), OFTEN))
"""One of each sort; that the tables of all are true is certified in every run (test_architectures)."""


def rewritten(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A folder in whose files every tensor of numbers that are not whole is changed."""
    for file in folder.glob("*.safetensors"):
        state = {
            name: change(value) if value.is_floating_point() else value
            for name, value in load_file(file).items()
        }
        save_file(state, file, {"format": "pt"})
    return folder


def upcast(folder: Path) -> Path:
    """A folder with all weights in float64."""
    return rewritten(folder, torch.Tensor.double)


def whole_way(case: Case, a: Path, root: Path, finish: Callable[[Path], Path]) -> float:
    """How far the outputs of a moved fine-tune are from those of the fine-tune, in shares of the largest.

    B is A shuffled, and the shuffle must be found again; ``finish`` has the last word on every model made.
    """
    a = finish(shutil.copytree(a, root / "a"))
    planted = align(a, a, method="random", residual="tied", seed=2)
    b = apply(planted, a).save(root / "b")
    pi = align(a, b, residual="tied", advice=False)
    model, target = Model.open(a).under(pi.provenance.policy), Model.open(b)
    for name, layout in model.architecture.tensors.items():
        assert torch.equal(pi.move(model.read(name), layout), target.read(name)), name
    tuned = finish(finetuned(case, a, root / "tuned"))
    moved = transport(tuned, base=a, onto=b, via=pi).save(root / "moved")
    wanted = replace(LiveModel.of(Model.open(tuned)), architecture=model.architecture)
    expected = wanted.expected(pi, wanted.outputs())
    scale = max(float(value.abs().max()) for value in expected.values())
    return largest_difference(expected, LiveModel.of(Model.open(moved)).outputs()) / scale


@every_family
def test_every_family_goes_the_whole_way(family, made, tmp_path):
    """In float64, where nothing but the last digits can differ."""
    case = CASES[FIRST[family]]
    assert whole_way(case, made(case), tmp_path, upcast) < 1e-10


@pytest.mark.parametrize("family", often(["bert", "clip", "gpt2", "llama", "t5", "vit"], ["clip", "llama"]))
def test_in_float32_the_whole_way_costs_a_few_digits(family, made, tmp_path):
    case = CASES[FIRST[family]]
    assert 0 < whole_way(case, made(case), tmp_path, lambda folder: folder) < 1e-5


@every_family
def test_every_family_is_recovered_under_a_little_noise(family, made, tmp_path):
    """1 % of each tensor's standard deviation on B: map for map, what was planted is found."""
    a = made(CASES[FIRST[family]])
    planted = align(a, a, method="random", residual="tied", seed=2)
    generator = torch.Generator().manual_seed(3)

    def noisy(value: torch.Tensor) -> torch.Tensor:
        return value + 0.01 * value.std(unbiased=False) * torch.randn(value.shape, generator=generator)

    b = rewritten(apply(planted, a).save(tmp_path / "b"), noisy)
    found = align(a, b, residual="tied", advice=False)
    wrong = [id for id, map_ in planted.maps.items() if found.maps.get(id) != map_]
    assert wrong == []
