"""Planted truths: in every family, and at the depth of real models with noise on top."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import CASES, Case, finetuned, transformers_model
from transfusion.live import Live, largest_difference
from transfusion.matching import align
from transfusion.model import Model
from transfusion.transportation import apply, transport

WIDE = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 200, "num_hidden_layers": 12}
DEEP = (
    ("vit", "ViTModel", "ViTConfig", {**WIDE, "image_size": 32, "patch_size": 8}),
    ("bert", "BertForPreTraining", "BertConfig", {**WIDE, "vocab_size": 300}),
    (
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 96, "n_layer": 12, "n_head": 6, "n_inner": 200, "vocab_size": 300}
        | {"n_positions": 50, "bos_token_id": 1, "eos_token_id": 1},
    ),
    (
        "llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        {**WIDE, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"head_dim": 16, "vocab_size": 300},
    ),
)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("residual", ["untied", "tied"])
@pytest.mark.parametrize(("family", "model", "config", "settings"), DEEP, ids=[case[0] for case in DEEP])
def test_deep_models_are_recovered_under_noise(family, model, config, settings, residual, noise, tmp_path):
    """Every axis comes out as it was planted, from the library's own initial weights."""
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


FIRST = {case.family: name for name, case in reversed(CASES.items())}


@pytest.mark.parametrize("family", sorted(FIRST))
def test_every_family_goes_the_whole_way(family, made, tmp_path):
    """B is A shuffled: the shuffle is found again, and the moved fine-tune computes what it computed."""
    case = CASES[FIRST[family]]
    a = made(case)
    planted = align(a, a, method="random", residual="tied", seed=2)
    b = apply(planted, a).save(tmp_path / "b")
    pi = align(a, b, residual="tied")
    model, target = Model.open(a).under(pi.provenance.policy), Model.open(b)
    for name, layout in model.architecture.tensors.items():
        assert torch.equal(pi.move(model.read(name), layout), target.read(name)), name
    tuned = finetuned(case, a, tmp_path / "tuned")
    moved = transport(tuned, base=a, onto=b, via=pi).save(tmp_path / "moved")
    wanted = replace(Live.of(Model.open(tuned)), architecture=model.architecture)
    expected = wanted.expected(pi, wanted.outputs())
    scale = max(float(value.abs().max()) for value in expected.values())
    assert largest_difference(expected, Live.of(Model.open(moved)).outputs()) / scale < 1e-5
