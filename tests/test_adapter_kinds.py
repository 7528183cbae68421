"""Every kind of adapter that moves does on B what it did on A, as PEFT itself computes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from transfusion.live import Live, largest_difference
from transfusion.matching import align
from transfusion.model import Model
from transfusion.naming import Naming, without_part
from transfusion.probes import probes, run
from transfusion.transportation import AdapterTransport, transport

pytestmark = pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out",
    "ignore:Setting `save_embedding_layers`",
    "ignore:Model has `tie_word",
    "ignore:Detected that the base layer has no bias",
    "ignore:`lora_bias=True` was passed",
    "ignore:Adapter 'default'",
    "ignore:Unsupported layer type",
)


@dataclass(frozen=True)
class Made:
    """An adapter that PEFT makes: on which model, of which kind, with which settings."""

    case: str
    config: str
    settings: dict[str, Any]


def lora(case: str, targets: list[str], **settings: Any) -> Made:
    return Made(case, "LoraConfig", {"r": 3, "lora_alpha": 5, "target_modules": targets, **settings})


def of(config: str, case: str, **settings: Any) -> Made:
    return Made(case, f"{config}Config", settings)


LAYER = ["q_proj", "down_proj"]
ON_WEIGHTS = {
    "lora, ranks by pattern": lora("llama", LAYER, rank_pattern={"down_proj": 2, r"layers\.1.*q_proj": 4}),
    "lora, alphas by pattern": lora(
        "llama", LAYER, alpha_pattern={"down_proj": 2, r"layers.1.self_attn.q_proj": 9}
    ),
    "lora, scaled by the root of the rank": lora(
        "llama", LAYER, use_rslora=True, rank_pattern={"down_proj": 2}
    ),
    "lora with biases": lora("bert", ["query", "value"], lora_bias=True),
    "lora, biases of the base trained": lora("bert", ["query"], bias="all"),
    "lora, transposed": lora("gpt2", ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    "lora on embeddings": lora("bert-pretraining", ["word_embeddings", "query"]),
    "lora on a convolution": lora("vit-classifier", ["projection"]),
    "lora beside a trained head": lora("bert-classifier", ["query"], modules_to_save=["classifier"]),
    "lora beside trained tokens": lora("llama", ["q_proj"], trainable_token_indices=[1, 5]),
    "lora on parts of a tensor": lora("dinov2-gated", ["gate_proj", "up_proj"]),
    "dora": lora("llama", LAYER, use_dora=True),
    "dora, transposed": lora("gpt2", ["c_attn", "c_proj"], use_dora=True, fan_in_fan_out=True),
    "dora on embeddings": lora("bert-pretraining", ["word_embeddings"], use_dora=True),
    "dora on a convolution": lora("vit-classifier", ["projection"], use_dora=True),
    "dora on parts of a tensor": lora("dinov2-gated", ["gate_proj", "up_proj"], use_dora=True),
    "adalora": of("AdaLora", "llama", init_r=4, target_r=2, total_step=9, target_modules=LAYER),
    "adalora, transposed": of(
        "AdaLora", "gpt2", init_r=4, total_step=9, target_modules=["c_attn"], fan_in_fan_out=True
    ),
    "ia3": of("IA3", "llama", target_modules=LAYER, feedforward_modules=["down_proj"]),
    "ia3 with biases": of(
        "IA3", "bert", target_modules=["key", "value"], feedforward_modules=[]
    ),
    "ia3, transposed": of(
        "IA3",
        "gpt2",
        target_modules=["c_attn", "mlp.c_proj"],
        feedforward_modules=["mlp.c_proj"],
        fan_in_fan_out=True,
    ),
    "loha": of("LoHa", "llama", r=3, alpha=5, target_modules=LAYER, rank_pattern={"down_proj": 2}),
    "loha on a convolution": of("LoHa", "vit-classifier", r=3, target_modules=["projection"]),
    "hra": of("HRA", "llama", r=4, target_modules=LAYER),
    "hra, orthogonal": of("HRA", "llama", r=4, apply_GS=True, target_modules=LAYER),
    "hra on a convolution": of("HRA", "vit-classifier", r=2, target_modules=["projection"]),
    "delora": of("Delora", "llama", r=3, target_modules=LAYER),
    "hira": of("Hira", "llama", r=3, target_modules=LAYER),
    "hira, transposed": of("Hira", "gpt2", r=3, target_modules=["c_attn"], fan_in_fan_out=True),
    "beft": of("Beft", "bert", target_modules=["query", "dense"]),
    "ln_tuning": of("LNTuning", "bert", target_modules=["LayerNorm"]),
    "trainable_tokens": of("TrainableTokens", "llama", target_modules=["embed_tokens"], token_indices=[1, 7]),
    "trainable_tokens, tied": of(
        "TrainableTokens", "mistral-tied", target_modules=["embed_tokens"], token_indices=[1, 7]
    ),
}
PROMPTS = {
    "prompt_tuning": of("PromptTuning", "llama", num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prompt_tuning of a classifier": of(
        "PromptTuning", "bert-classifier", num_virtual_tokens=4, task_type="SEQ_CLS"
    ),
    "p_tuning": of(
        "PromptEncoder", "gpt2", num_virtual_tokens=4, task_type="CAUSAL_LM", encoder_hidden_size=9
    ),
    "prefix_tuning": of("PrefixTuning", "llama", num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prefix_tuning, fused": of("PrefixTuning", "gpt2", num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prefix_tuning, projected": of(
        "PrefixTuning",
        "mistral-tied",
        num_virtual_tokens=4,
        task_type="CAUSAL_LM",
        prefix_projection=True,
        encoder_hidden_size=9,
    ),
}
ALL = {**ON_WEIGHTS, **PROMPTS}


@contextmanager
def in_double():
    """PEFT makes some of its matrices in the default type."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def make(made: Made, base: Path, folder: Path) -> Path:
    """An adapter in PEFT's own files, every number in them a little off where training starts."""
    import peft

    config = getattr(peft, made.config)(**made.settings)
    peft.get_peft_model(Live.of(Model.open(base)).module.float(), config).save_pretrained(folder)
    path = folder / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(2)
    tensors = {
        key: value + 0.2 * torch.randn(value.shape, generator=generator)
        for key, value in sorted(load_file(path).items())
    }
    if (tied := "base_model.model.lm_head.trainable_tokens_delta") in tensors:
        tensors[tied] = tensors["base_model.model.model.embed_tokens.trainable_tokens_delta"].clone()
    save_file(tensors, path, {"format": "pt"})
    return folder


def loaded(adapter: Path, base: Path) -> Any:
    """What PEFT makes of a base and an adapter, in float64."""
    import peft

    with in_double():
        return peft.PeftModel.from_pretrained(Live.of(Model.open(base)).module, adapter).double().eval()


def outputs(module: Any, base: Path) -> dict[str, torch.Tensor]:
    model = Model.open(base)
    inputs = probes(model.family, model.config)
    if not {"pixel_values"} & inputs.keys():  # virtual tokens need positions, too
        inputs = {name: value[:, :8] for name, value in inputs.items()}
    with in_double():
        found = run(module, model.family, inputs)
    return {name: value for name, value in found.items() if not name.startswith("past_key_values")}


@pytest.fixture(scope="module")
def aligned(shuffled) -> Callable[[str], tuple[Path, Path, Any]]:
    """A, B and the π between them."""
    done: dict[str, Any] = {}

    def find(case: str) -> tuple[Path, Path, Any]:
        a, b = shuffled(case)
        if case not in done:
            done[case] = align(a, b, residual="tied")
        return a, b, done[case]

    return find


@pytest.mark.parametrize("name", ALL)
def test_a_moved_adapter_does_on_b_what_it_did_on_a(name, aligned, tmp_path):
    a, b, pi = aligned(ALL[name].case)
    adapter = make(ALL[name], a, tmp_path / "adapter")
    moved = transport(adapter, base=a, onto=b, via=pi)
    assert isinstance(moved, AdapterTransport)
    moved.save(tmp_path / "moved")
    live = Live.of(Model.open(a).under(pi.provenance.policy))
    wanted = live.expected(pi, outputs(loaded(adapter, a), a))
    assert largest_difference(wanted, outputs(loaded(tmp_path / "moved", b), b)) < 1e-5
    if name in PROMPTS:
        astray = outputs(loaded(adapter, b), b)
        assert largest_difference(wanted, astray) > 1e-3, "it need not have been moved"
    else:
        bare = outputs(Live.of(Model.open(b)).module, b)
        assert largest_difference(wanted, bare) > 1e-3, "the adapter did nothing"
    was, is_now = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "moved"))
    assert {key: value.shape for key, value in was.items()} == {k: v.shape for k, v in is_now.items()}


def by_canonical_name(module: Any, model: Model) -> dict[str, torch.Tensor]:
    """The parameters of a live module, what files keep as one tensor joined again."""
    naming = Naming(model.family, live=True)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        ours, part = without_part(naming.canonical(name))
        found[ours] = parameter.data if not part else torch.cat([found[ours], parameter.data])
    return found


@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_merging_gives_what_peft_merges_on_b(name, aligned, tmp_path):
    a, b, pi = aligned(ALL[name].case)
    moved = transport(make(ALL[name], a, tmp_path / "adapter"), base=a, onto=b, via=pi)
    moved.save(tmp_path / "moved")
    onto = Model.open(b)
    with in_double():
        peft_says = by_canonical_name(loaded(tmp_path / "moved", b).merge_and_unload(), onto)
    assert moved.changed
    for tensor in onto.architecture.tensors:
        ours = onto.read(tensor)
        if tensor in moved.changed:
            weight, ours = ours, moved.merged(tensor, ours)
            assert ours.dtype is torch.float32
            assert (ours - weight).abs().max() > 1e-3, f"{tensor} is called changed, and is not"
            assert torch.allclose(moved.delta(tensor), ours - weight, atol=1e-5)
        assert torch.allclose(ours.double(), peft_says[tensor], atol=1e-5), tensor
