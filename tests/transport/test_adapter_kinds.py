"""Every kind of adapter that moves does on B what it did on A, as PEFT itself computes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from transfusion.alignment.maps import Map
from transfusion.architecture.naming import Naming, without_part
from transfusion.errors import AdapterError, SettingError
from transfusion.files.tensor_files import row_blocks
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.running.probes.inputs import random_inputs, run_model
from transfusion.transport.adapters import adapter as adapter_module
from transfusion.transport.adapters import drift as adapter_drift_module
from transfusion.transport.adapters.drift import adapter_drift
from transfusion.transport.adapters.moved_adapter import MovedAdapter
from transfusion.transport.adapters.places import as_matrix
from transfusion.transport.output import Output
from transfusion.transport.transport import transport

pytestmark = pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out",
    "ignore:Setting `save_embedding_layers`",
    "ignore:Model has `tie_word",
    "ignore:Detected that the base layer has no bias",
    "ignore:`lora_bias=True` was passed",
    "ignore:Adapter 'default'",
    "ignore:Unsupported layer type",
    "ignore:The following rank_pattern keys",
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
    "lora, biases and a head trained": lora("bert-classifier", ["query"], bias="all", task_type="SEQ_CLS"),
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
    "ia3 with biases": of("IA3", "bert", target_modules=["key", "value"], feedforward_modules=[]),
    "ia3, transposed": of(
        "IA3",
        "gpt2",
        target_modules=["c_attn", "mlp.c_proj"],
        feedforward_modules=["mlp.c_proj"],
        fan_in_fan_out=True,
    ),
    "loha": of("LoHa", "llama", r=3, alpha=5, target_modules=LAYER, rank_pattern={"down_proj": 2}),
    "loha on a convolution": of("LoHa", "vit-classifier", r=3, target_modules=["projection"]),
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
    peft.get_peft_model(LiveModel.of(Model.open(base)).module.float(), config).save_pretrained(folder)
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
        return peft.PeftModel.from_pretrained(LiveModel.of(Model.open(base)).module, adapter).double().eval()


def outputs(module: Any, base: Path) -> dict[str, torch.Tensor]:
    model = Model.open(base)
    inputs = random_inputs(model.family, model.config)
    if not {"pixel_values"} & inputs.keys():  # virtual tokens need positions, too
        inputs = {name: value[:, :8] for name, value in inputs.items()}
    with in_double():
        found = run_model(module, model.family, inputs)
    return {name: value for name, value in found.items() if not name.startswith("past_key_values")}


@pytest.fixture(scope="module")
def aligned(shuffled) -> Callable[[str], tuple[Path, Path, Any]]:
    """A, B and the π between them."""
    done: dict[str, Any] = {}

    def find(case: str) -> tuple[Path, Path, Any]:
        a, b = shuffled(case)
        if case not in done:
            done[case] = align(a, b, residual="tied", advice=False)
        return a, b, done[case]

    return find


@pytest.fixture(scope="module")
def adapters(made, tmp_path_factory) -> Callable[[str], Path]:
    """The adapters listed above, each made once."""
    done: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in done:
            folder = tmp_path_factory.mktemp("adapters") / name
            done[name] = make(ALL[name], made(ALL[name].case), folder)
        return done[name]

    return find


@pytest.mark.parametrize("name", ALL)
def test_a_moved_adapter_does_on_b_what_it_did_on_a(name, aligned, adapters, tmp_path):
    a, b, pi = aligned(ALL[name].case)
    adapter = adapters(name)
    moved = transport(adapter, base=a, onto=b, via=pi)
    assert isinstance(moved, Output)
    moved.save(tmp_path / "moved")
    live = LiveModel.of(Model.open(a).under(pi.provenance.policy))
    wanted = live.expected(pi, outputs(loaded(adapter, a), a))
    assert largest_difference(wanted, outputs(loaded(tmp_path / "moved", b), b)) < 1e-5
    if name in PROMPTS:
        astray = outputs(loaded(adapter, b), b)
        assert largest_difference(wanted, astray) > 1e-3, "it need not have been moved"
    else:
        bare = outputs(LiveModel.of(Model.open(b)).module, b)
        assert largest_difference(wanted, bare) > 1e-3, "the adapter did nothing"
    was, is_now = (load_file(f / "adapter_model.safetensors") for f in (adapter, tmp_path / "moved"))
    own = {key: value.shape for key, value in was.items() if ".original_module." not in key}  # A's, not used
    assert own == {key: value.shape for key, value in is_now.items()}


TRAINED = {
    "prompt_tuning": of("PromptTuning", "llama", num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "p_tuning, encoder of linear maps": of(
        "PromptEncoder", "llama", num_virtual_tokens=4, task_type="CAUSAL_LM", encoder_hidden_size=9
    ),
    "p_tuning, recurrent encoder": of(
        "PromptEncoder",
        "mistral-tied",
        num_virtual_tokens=4,
        task_type="CAUSAL_LM",
        encoder_hidden_size=9,
        encoder_reparameterization_type="LSTM",
    ),
    "prompt_tuning of an encoder with a decoder": of(
        "PromptTuning", "t5-generation", num_virtual_tokens=4, task_type="SEQ_2_SEQ_LM"
    ),
}


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_prompt_does_its_task_on_b(name, shuffled, tmp_path):
    """PEFT trains it on A, with its encoder; moved, it has the same logits, loss and generated text on B."""
    import peft

    one = TRAINED[name]
    a, b = shuffled(one.case)
    tuned = peft.get_peft_model(
        LiveModel.of(Model.open(a)).module.float(), getattr(peft, one.config)(**one.settings)
    ).eval()  # without dropout
    ids = torch.randint(2, 31, (3, 6), generator=torch.Generator().manual_seed(4))
    task = {"input_ids": ids, "labels": torch.full_like(ids, 7), "attention_mask": torch.ones_like(ids)}
    optimizer = torch.optim.Adam((p for p in tuned.parameters() if p.requires_grad), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        tuned(**task).loss.backward()
        optimizer.step()
    tuned.save_pretrained(tmp_path / "prompt")
    transport(tmp_path / "prompt", base=a, onto=b, via=align(a, b, advice=False)).save(tmp_path / "moved")

    def on(base: Path, adapter: Path | None) -> Any:
        module = LiveModel.of(Model.open(base)).module.float()
        return (module if adapter is None else peft.PeftModel.from_pretrained(module, adapter)).eval()

    with torch.no_grad():
        wanted, found = tuned(**task), on(b, tmp_path / "moved")(**task)
        assert (found.logits - wanted.logits).abs().max() < 1e-4
        without, astray = on(b, None)(**task).loss, on(b, tmp_path / "prompt")(**task).loss
        assert found.loss < 0.85 * without, "the task arrived"
        assert astray > found.loss + 0.1, "it need not have been moved"
        if one.settings["task_type"] == "CAUSAL_LM":  # PEFT's own generation fails with T5
            some = {"input_ids": ids, "attention_mask": task["attention_mask"], "max_new_tokens": 3}
            both = (tuned, on(b, tmp_path / "moved"))
            assert torch.equal(*(model.generate(**some, do_sample=False) for model in both))


def by_canonical_name(module: Any, model: Model) -> dict[str, torch.Tensor]:
    """The parameters of a live module, what files keep as one tensor joined again."""
    naming = Naming(model.family, live=True)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        ours, part = without_part(naming.canonical(name))
        found[ours] = parameter.data if not part else torch.cat([found[ours], parameter.data])
    return found


@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_merging_gives_what_peft_merges_on_b(name, aligned, adapters, tmp_path):
    a, b, pi = aligned(ALL[name].case)
    moved = transport(adapters(name), base=a, onto=b, via=pi)
    moved.save(tmp_path / "moved")
    onto = Model.open(b)
    with in_double():
        peft_says = by_canonical_name(loaded(tmp_path / "moved", b).merge_and_unload(), onto)
    assert moved.moved_adapter.changed
    for tensor in onto.architecture.tensors:
        ours = onto.read(tensor)
        if tensor in moved.moved_adapter.changed:
            weight, ours = ours, moved.moved_adapter.merged(tensor, ours)
            assert ours.dtype is torch.float32
            assert (ours - weight).abs().max() > 1e-3, f"{tensor} is called changed, and is not"
            assert torch.allclose(moved.moved_adapter.delta(tensor), ours - weight, atol=1e-5)
        assert torch.allclose(ours.double(), peft_says[tensor], atol=1e-5), tensor


LOKR = {
    "lokr": of("LoKr", "llama", r=2, alpha=5, target_modules=LAYER, alpha_pattern={"down_proj": 3}),
    "lokr, both decomposed": of("LoKr", "llama", r=2, alpha=3, decompose_both=True, target_modules=LAYER),
    "lokr, whole": of("LoKr", "llama", r=9, alpha=2, target_modules=LAYER),
    "lokr on a convolution": of("LoKr", "vit-classifier", r=9, target_modules=["projection", "q_proj"]),
}


@pytest.mark.parametrize("name", LOKR)
def test_a_lokr_becomes_a_lora(name, aligned, made, tmp_path, monkeypatch):
    """Exactly, if the rank is high enough; what a cut costs is said."""
    a, b, pi = aligned(LOKR[name].case)
    adapter = make(LOKR[name], made(LOKR[name].case), tmp_path / "lokr")
    moved = transport(adapter, base=a, onto=b, via=pi)
    moved.save(tmp_path / "moved")
    live = LiveModel.of(Model.open(a).under(pi.provenance.policy))
    wanted = live.expected(pi, outputs(loaded(adapter, a), a))
    assert largest_difference(wanted, outputs(loaded(tmp_path / "moved", b), b)) < 1e-5
    bare = outputs(LiveModel.of(Model.open(b)).module, b)
    assert largest_difference(wanted, bare) > 1e-3, "the adapter did nothing"
    about = moved.metadata()
    assert (about["peft_type"], about["converted_from"], about["kept"]) == ("LORA", "LOKR", 1.0)
    config = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    monkeypatch.setattr(adapter_module, "MOST", 3)
    cut = transport(adapter, base=a, onto=b, via=pi)
    info = cut.metadata()
    assert info["rank"] == 3 < about["rank"]
    assert 0 < info["kept"] < 1
    assert f"a LoRA of rank 3, which holds at least {info['kept']:.1%}" in cut.notes[0]
    full = transport(adapter, base=a, onto=b, via=pi, full=True).save(tmp_path / "full")
    merged = outputs(LiveModel.of(Model.open(full)).module, full)
    assert largest_difference(wanted, merged) < 1e-5, "a model gets all of it"


MULTIPLIED = {
    "vera": of("Vera", "llama", r=9, target_modules=LAYER),
    "vera, transposed": of("Vera", "gpt2", r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "oft": of("OFT", "llama", oft_block_size=4, target_modules=LAYER),
    "oft, the transform itself": of(
        "OFT", "bert", oft_block_size=8, use_cayley_neumann=False, target_modules=["query"]
    ),
    "oft, three terms": of(
        "OFT", "bert", oft_block_size=8, num_cayley_neumann_terms=3, target_modules=["query"]
    ),
    "oft, one block for all": of("OFT", "bert", oft_block_size=4, block_share=True, target_modules=["query"]),
    "oft on parts of a tensor": of("OFT", "dinov2-gated", oft_block_size=4, target_modules=["gate_proj"]),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_projections_and_rotations_become_a_lora(name, aligned, made, tmp_path, monkeypatch):
    """Exactly, if the rank is high enough; what a cut of a rotation costs is said."""
    a, b, pi = aligned(MULTIPLIED[name].case)
    adapter = make(MULTIPLIED[name], made(MULTIPLIED[name].case), tmp_path / "adapter")
    moved = transport(adapter, base=a, onto=b, via=pi)
    moved.save(tmp_path / "moved")
    live = LiveModel.of(Model.open(a).under(pi.provenance.policy))
    wanted = live.expected(pi, outputs(loaded(adapter, a), a))
    assert largest_difference(wanted, outputs(loaded(tmp_path / "moved", b), b)) < 1e-5
    assert largest_difference(wanted, outputs(LiveModel.of(Model.open(b)).module, b)) > 1e-3
    kind = MULTIPLIED[name].config.removesuffix("Config").upper()
    about = moved.metadata()
    assert (about["peft_type"], about["converted_from"], about["kept"]) == ("LORA", kind, 1.0)
    assert f"and becomes a LoRA of rank {about['rank']}, which holds all of the change" in moved.notes[0]
    monkeypatch.setattr(adapter_module.Adapter.on_base, "__defaults__", (3,))
    cut = transport(adapter, base=a, onto=b, via=pi).metadata()
    assert cut["rank"] == (3 if kind == "OFT" else about["rank"])
    assert (0 < cut["kept"] < 1) is (kind == "OFT")
    full = transport(adapter, base=a, onto=b, via=pi, full=True).save(tmp_path / "full")
    merged = outputs(LiveModel.of(Model.open(full)).module, full)
    assert largest_difference(wanted, merged) < 1e-5, "a model gets all of it"


def test_projections_and_rotations_that_are_not_understood_are_refused(aligned, made, tmp_path):
    a, b, pi = aligned("bert")
    base, query = made("bert"), {"target_modules": ["query"]}
    bare = make(of("Vera", "bert", r=3, **query), base, tmp_path / "bare")
    path = bare / "adapter_model.safetensors"
    own = {key: value for key, value in load_file(path).items() if "vera_lambda" in key}
    save_file(own, path, {"format": "pt"})  # as with `save_projection=False`
    with pytest.raises(AdapterError, match="the random projections were not saved with it"):
        transport(bare, base=a, onto=b, via=pi)
    held = make(of("OFT", "bert", oft_block_size=8, coft=True, **query), base, tmp_path / "held")
    with pytest.raises(AdapterError, match="a OFT adapter with unknown settings: coft=True"):
        transport(held, base=a, onto=b, via=pi)
    other = make(of("OFT", "bert", oft_block_size=8, **query), base, tmp_path / "other")
    path = other / "adapter_model.safetensors"
    save_file({key: value[:-1].clone() for key, value in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(AdapterError, match=r"oft_R.weight has shape .* which does not rotate 24 inputs"):
        transport(other, base=a, onto=b, via=pi)


LOW_RANK = [name for name in ON_WEIGHTS if "lora" in name]


@pytest.mark.parametrize("name", LOW_RANK)
def test_a_change_of_low_rank_is_the_product_of_its_factors(name, aligned, adapters):
    a, b, pi = aligned(ALL[name].case)
    folded = transport(adapters(name), base=a, onto=b, via=pi).moved_adapter
    found = 0
    for tensor in folded.changed:
        layout = folded.onto.architecture.tensors[tensor]
        if (factors := folded.product(tensor)) is not None:
            assert torch.allclose(factors[0] @ factors[1], as_matrix(folded.delta(tensor), layout), atol=1e-5)
            found += 1
    assert found


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "lora, transposed",
        "lora on a convolution",
        "lora on parts of a tensor",
        "adalora",
        "dora",
        "loha",
        "ln_tuning",
    ],
)
def test_drift_is_the_same_without_factors_and_in_small_blocks(name, moving, aligned, adapters, monkeypatch):
    """Where a change is given as a product, it is not multiplied out; and weights are read in blocks."""
    a, b, pi = aligned(ALL[name].case)
    moved = transport(adapters(name), base=a, onto=b, via=pi if moving else align(a, b, method="naive"))
    found = adapter_drift(moved.moved_adapter)
    assert found == adapter_drift(moved.moved_adapter, jobs=1) is not None, "on any number of threads"
    monkeypatch.setattr(adapter_drift_module, "row_blocks", lambda shape: row_blocks(shape, 50))
    assert flat(adapter_drift(moved.moved_adapter)) == pytest.approx(flat(found), rel=1e-3, abs=1e-4)
    monkeypatch.setattr(MovedAdapter, "product", lambda self, tensor: None)
    whole, sizes = adapter_drift(moved.moved_adapter), ("moved", "strength", "contained")
    wanted = {name: found[name] for name in sizes}
    assert {name: whole[name] for name in sizes} == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def flat(drift: dict[str, Any]) -> dict[str, float]:
    whole = {name: value for name, value in drift.items() if name != "blocks"}
    every = {"all": whole, **drift["blocks"]}
    return {f"{block} {name}": value or 0.0 for block, one in every.items() for name, value in one.items()}


def test_adalora_whose_ranks_were_cut_is_the_same_adapter(aligned, tmp_path):
    """Modules keep some of their directions, and the scale that they had with all of them."""
    a, b, pi = aligned("llama")
    adapter = make(ON_WEIGHTS["adalora"], a, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    module, kept = "model.layers.1.self_attn.q_proj", [True, False, False, True]
    for part in ("lora_A", "lora_B", "lora_E"):
        key = f"base_model.model.{module}.{part}"
        tensors[key] = (tensors[key][:, kept] if part == "lora_B" else tensors[key][kept]).contiguous()
    save_file(tensors, adapter / "adapter_model.safetensors")
    edit(adapter, rank_pattern={f"{module}.lora_E": kept})
    moved = transport(adapter, base=a, onto=b, via=pi)
    moved.save(tmp_path / "moved")
    with in_double():
        peft_says = by_canonical_name(loaded(tmp_path / "moved", b).merge_and_unload(), Model.open(b))
    name = "layers.1.self_attn.q_proj.weight"
    assert torch.allclose(
        moved.moved_adapter.merged(name, Model.open(b).read(name)).double(), peft_says[name], atol=1e-5
    )


# ── α ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name",
    [
        "lora beside a trained head",
        "lora beside trained tokens",
        "dora",
        "dora, transposed",
        "dora on embeddings",
        "dora on a convolution",
        "dora on parts of a tensor",
        "ia3 with biases",
        "ln_tuning",
    ],
)
def test_alpha_0_gives_b_back(name, aligned, adapters):
    a, b, pi = aligned(ALL[name].case)
    moved = transport(adapters(name), base=a, onto=b, via=pi, alpha=0.0)
    onto = Model.open(b)
    for tensor in moved.moved_adapter.changed:
        assert torch.allclose(
            moved.moved_adapter.merged(tensor, onto.read(tensor)), onto.read(tensor), atol=1e-6
        ), tensor
        assert moved.moved_adapter.delta(tensor).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["lora, transposed", "adalora", "loha", "ia3"])
def test_half_of_an_adapter_is_half_of_its_change(name, aligned, adapters):
    a, b, pi = aligned(ALL[name].case)
    adapter = adapters(name)
    whole, half = (transport(adapter, base=a, onto=b, via=pi, alpha=alpha) for alpha in (1.0, 0.5))
    for tensor in whole.moved_adapter.changed:
        assert torch.allclose(
            half.moved_adapter.delta(tensor), 0.5 * whole.moved_adapter.delta(tensor), atol=1e-6
        ), tensor


def test_every_layer_may_have_its_alpha(aligned, adapters):
    a, b, pi = aligned("llama")
    adapter = adapters("dora")
    whole = transport(adapter, base=a, onto=b, via=pi).state_dict()
    moved = transport(adapter, base=a, onto=b, via=pi, alpha={"layers.0.*": 0.5})
    for key, value in moved.state_dict().items():
        scaled = "layers.0." in key and "lora_A" not in key
        assert torch.equal(value, whole[key]) is not scaled
    assert moved.metadata()["alpha"] == {"default": 1.0, "layers.0.*": 0.5}
    with pytest.raises(SettingError, match=r"no tensor matches layer\.0"):
        transport(adapter, base=a, onto=b, via=pi, alpha={"layer.0.*": 0.5}).state_dict()


@pytest.mark.parametrize("name", ["prompt_tuning", "p_tuning"])
def test_what_has_no_halves_is_refused_with_another_alpha(name, aligned, adapters):
    a, b, pi = aligned(ALL[name].case)
    with pytest.raises(SettingError, match=f"alpha = 0.5: a {name.upper()} adapter"):
        transport(adapters(name), base=a, onto=b, via=pi, alpha=0.5)


# ── maps that mix units ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["dora", "ia3", "loha"])
def test_what_belongs_to_single_units_moves_under_permutations_only(name, aligned, mixed, adapters):
    a, b, _ = aligned("llama")
    only = f"{name.upper()} adapters move under permutations only, .* a plan"
    with pytest.raises(AdapterError, match=only):
        transport(adapters(name), base=a, onto=b, via=mixed)


@pytest.mark.parametrize("name", ["lora, ranks by pattern", "adalora", "trainable_tokens", "prompt_tuning"])
def test_what_is_linear_moves_under_every_map(name, aligned, mixed, adapters):
    a, b, _ = aligned("llama")
    assert transport(adapters(name), base=a, onto=b, via=mixed).state_dict()


@pytest.fixture(scope="module")
def mixed(aligned) -> Any:
    """A π between the two Llamas whose maps, but for heads, are called plans."""
    _, _, pi = aligned("llama")
    heads = set(pi.parents.values())
    maps = {id: map_ if id in heads else Map.plan(map_.matrix) for id, map_ in pi.maps.items()}
    return replace(pi, maps=maps)


# ── there and back, and refusals ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["lora, ranks by pattern", "lora on a convolution", "loha"])
def test_there_and_back_again_every_bit_is_the_same(name, aligned, adapters, tmp_path):
    a, b, pi = aligned(ALL[name].case)
    adapter = adapters(name)
    transport(adapter, base=a, onto=b, via=pi).save(tmp_path / "there")
    transport(tmp_path / "there", base=b, onto=a, via=pi.inverse()).save(tmp_path / "back")
    was, there, back = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (adapter, tmp_path / "there", tmp_path / "back")
    )
    assert all(torch.equal(was[key], back[key]) for key in was)
    assert not all(torch.equal(was[key], there[key]) for key in was)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_cannot_be_merged(name, aligned, adapters):
    a, b, pi = aligned(ALL[name].case)
    moved = transport(adapters(name), base=a, onto=b, via=pi)
    with pytest.raises(AdapterError, match=r"adapters of kind P\w+ cannot be merged: they change the"):
        _ = moved.moved_adapter.changed
    with pytest.raises(AdapterError, match="cannot be merged"):
        moved.moved_adapter.merged("embed_tokens.weight", torch.zeros(2))


def test_a_new_bias_cannot_be_merged(aligned, tmp_path):
    a, b, pi = aligned("llama")
    adapter = make(lora("llama", ["q_proj"], lora_bias=True), a, tmp_path / "adapter")
    moved = transport(adapter, base=a, onto=b, via=pi)
    assert moved.state_dict()
    with pytest.raises(
        AdapterError, match="q_proj gets a bias, and in .* it has none: this cannot be merged"
    ):
        _ = moved.moved_adapter.changed


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "changes classifier.weight, which .* does not have: it cannot be merged"),
        ({"use_dora": True}, "lora_magnitude_vector has no weight to refer to"),
    ],
)
def test_adapters_on_a_head_need_that_head(settings, reason, made, tmp_path):
    base = made("bert-classifier")
    adapter = make(lora("bert-classifier", ["classifier"], **settings), base, tmp_path / "a")
    with pytest.raises(AdapterError, match=reason):
        _ = transport(adapter, base=base, onto=made("bert", 2), method="naive").moved_adapter.changed


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([1, 7, 9], "has 2 rows, and the configuration names 3 tokens"),
        ([1, 31], "token 31, and the base has 31"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens, reason, aligned, tmp_path):
    a, b, pi = aligned("llama")
    adapter = edit(make(ALL["trainable_tokens"], a, tmp_path / "adapter"), token_indices=tokens)
    with pytest.raises(AdapterError, match=reason):
        transport(adapter, base=a, onto=b, via=pi).state_dict()


def test_a_convolution_under_ia3_is_refused(aligned, tmp_path):
    a, b, pi = aligned("vit-classifier")
    made = of("IA3", "vit-classifier", target_modules=["projection"], feedforward_modules=[])
    with pytest.raises(AdapterError, match=r"has shape \(1, 24, 1, 1\), "):
        transport(make(made, a, tmp_path / "adapter"), base=a, onto=b, via=pi).state_dict()


def edit(adapter: Path, **settings: object) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return adapter
