"""Blocks that predict further tokens: files have them, the library does not read them, and they move all the same.

What they compute is written here, of the library's own parts: a norm of the next token's embedding and one of the
last outputs, a map of both, an ordinary block, and a norm before the head.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from small_models import CASES, finetuned
from transfusion.alignment.alignment import Alignment
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.probes.inputs import in_double, plain_experts
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport


@dataclass(frozen=True)
class Predictor:
    """How the tensors of one family's further block are named, and which block of the model it is like."""

    like: int
    above: str = "mtp."
    block: str = "mtp.layers.0."
    embedding: str = "pre_fc_norm_embedding"
    hidden: str = "pre_fc_norm_hidden"
    joined: str = "fc"
    norm: str = "norm"


BEHIND = Predictor(2, "model.layers.3.", "model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
PREDICTORS = {
    **dict.fromkeys(("qwen3_5", "qwen3_5-tied", "qwen3_5_moe", "qwen3_next"), Predictor(1)),
    **dict.fromkeys(("deepseek_v3", "deepseek_v3-groups", "glm4_moe", "glm4_moe-normed"), BEHIND),
}
every = pytest.mark.parametrize("case", PREDICTORS)


def with_predictor(folder: Path, case: str, seed: int = 3) -> Path:
    """Add a further block with random values to a model's file, named as its released files name it."""
    parts, (file,) = PREDICTORS[case], folder.glob("*.safetensors")
    state, generator = load_file(file), torch.Generator().manual_seed(seed)
    if not any(name.startswith(parts.above) for name in state):
        begin = f"model.layers.{parts.like}."
        like = {name.removeprefix(begin): one for name, one in state.items() if name.startswith(begin)}
        wide = state["model.norm.weight"].shape[0]
        new = {parts.block + name: one.shape for name, one in like.items()}
        new |= {f"{parts.above}{parts.joined}.weight": torch.Size((wide, 2 * wide))}
        norms = (parts.embedding, parts.hidden, parts.norm)
        new |= {f"{parts.above}{name}.weight": torch.Size((wide,)) for name in norms}
        drawn = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in new.items()}
        save_file(state | drawn, file, {"format": "pt"})
    return folder


def predicted(folder: Path, case: str) -> Tensor:
    """What the further block says about a text, in float64."""
    parts, model = PREDICTORS[case], Model.open(folder)
    whole: Any = build(model)
    below = parts.above.removeprefix("model.")
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad(), in_double(True), plain_experts(whole):
        hidden = whole.model(tokens[:, :-1]).last_hidden_state
    block = whole.model.layers[parts.like]
    inside = parts.block.removeprefix("model.")
    state = {
        name.removeprefix(inside): model.read(name).double()
        for name in model.architecture.unread
        if name.startswith(inside) and name.removeprefix(inside) in block.state_dict()
    }
    block.load_state_dict(state)
    norms = {}
    for name in (parts.embedding, parts.hidden, parts.norm):
        norms[name] = deepcopy(whole.model.norm)
        norms[name].weight.data = model.read(f"{below}{name}.weight").double()
    join = model.read(f"{below}{parts.joined}.weight").double().T
    with torch.no_grad(), in_double(True), plain_experts(whole):
        both = [norms[parts.embedding](whole.model.embed_tokens(tokens[:, 1:])), norms[parts.hidden](hidden)]
        x = torch.cat(both, -1) @ join
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        angles = whole.model.rotary_emb(x, places)
        x = block(x, position_embeddings=angles, attention_mask=mask, position_ids=places)
        return whole.lm_head(norms[parts.norm](x[0] if isinstance(x, tuple) else x))


@pytest.fixture
def moved(tmp_path):
    """A with a further block, a random π for all axes, and π(A)."""

    def make(case: str) -> tuple[Path, Alignment, Path]:
        a = with_predictor(CASES[case].save(tmp_path / "a", 1), case)
        pi = align(a, a, method="random", residual="tied", seed=3)
        return a, pi, apply(pi, a).save(tmp_path / "b")

    return make


@every
def test_a_further_token_is_predicted_as_before(case, moved):
    a, pi, b = moved(case)
    wanted, found = predicted(a, case), predicted(b, case)
    assert (wanted - found).abs().max() < 1e-9
    architecture = Model.open(a).under(pi.provenance.policy).architecture
    inside = {id for name in architecture.unread for id in architecture.tensors[name].names()}
    own = {id.rpartition(".")[2] for id in inside & pi.maps.keys()}
    assert own >= ({"stream", "vo", "ffn"} | ({"latent", "qk"} if "deepseek" in case else {"group", "rep"}))


@every
def test_a_fine_tune_without_it_keeps_that_of_b(case, moved, tmp_path):
    """The library saves fine-tunes without it; bases from the hub have it."""
    a, _, b = moved(case)
    tuned = finetuned(CASES[case], a, tmp_path / "tuned")
    assert not Model.open(tuned).architecture.unread
    out = transport(tuned, base=a, onto=b, residual="tied", force_unrelated=True).save(tmp_path / "out")
    arrived, kept = Model.open(out), Model.open(b)
    assert arrived.architecture.unread == kept.architecture.unread
    assert all(torch.equal(arrived.read(name), kept.read(name)) for name in kept.architecture.unread)


@every
def test_an_adapter_is_folded_into_a_base_that_has_it_or_not(case, moved, tmp_path):
    a, _, b = moved(case)
    bare = CASES[case].save(tmp_path / "bare", 1)
    model = Model.open(a)
    name = "layers.1.self_attn.o_proj"
    high, wide = model.info(f"{name}.weight").shape
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    key = f"base_model.model.model.{name}.lora_"
    factors = {f"{key}A.weight": torch.randn(2, wide), f"{key}B.weight": torch.randn(high, 2)}
    save_file(factors, adapter / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["o_proj"],
        "task_type": "CAUSAL_LM",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    for base, onto in ((a, b), (bare, b), (a, bare)):
        full = transport(adapter, base=base, onto=onto, method="naive", full=True, force_unrelated=True)
        arrived = Model.open(full.save(tmp_path / f"{base.name}-{onto.name}"))
        assert arrived.architecture.unread == Model.open(onto).architecture.unread


@every
def test_it_is_no_evidence_and_may_be_missing(case, moved, tmp_path):
    """A release with it and one without it have the same architecture."""
    a, _, _ = moved(case)
    bare = CASES[case].save(tmp_path / "bare", 1)
    found = align(a, bare, method="random", residual="tied", seed=3)
    assert (
        found.provenance.architecture
        == align(bare, bare, method="random", residual="tied").provenance.architecture
    )
