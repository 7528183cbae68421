"""--full: an adapter in, a whole model out, which loads where B does and computes what B with it computes."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from small_models import CASES
from transfusion.errors import AdapterError, LibraryError, MismatchError
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.transport.adapters.classes import class_for_type, classes_of
from transfusion.transport.transport import transport

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word"
)


def adapted(base, folder, config, *, into="LlamaForCausalLM", **settings):
    """An adapter with random values, made by PEFT."""
    import peft
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, into).from_pretrained(base, **settings)
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator) / 4
    wrapped.save_pretrained(folder)
    return folder


def lora(**settings):
    import peft

    return peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], **settings})


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_the_model_computes_what_b_with_the_adapter_computes(settings, shuffled, tmp_path):
    import peft
    import transformers

    a, b = shuffled("llama")
    adapter = adapted(a, tmp_path / "adapter", lora(**settings))
    one = {"base": a, "onto": b, "method": "guarded", "residual": "tied"}
    full = transport(adapter, **one, full=True).save(tmp_path / "full")
    kept = transport(adapter, **one).save(tmp_path / "kept")
    found = transformers.LlamaForCausalLM.from_pretrained(full).double()
    own = transformers.LlamaForCausalLM.from_pretrained(b).double()
    wanted = peft.PeftModel.from_pretrained(own, kept).double()
    ids = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (found(ids).logits - wanted(ids).logits).abs().max()
        effect = (
            (wanted(ids).logits - transformers.LlamaForCausalLM.from_pretrained(b).double()(ids).logits)
            .abs()
            .max()
        )
    assert difference < 1e-5 < 1e-2 < effect
    config = json.loads((full / "config.json").read_text())
    assert config == json.loads((b / "config.json").read_text())
    assert not (full / "adapter_config.json").exists()


def test_alpha_acts_alike_in_the_adapter_and_in_the_model(shuffled, tmp_path):
    """Even where it is not linear: half of a DoRA is no half of what it adds."""
    a, b = shuffled("llama")
    adapter = adapted(a, tmp_path / "adapter", lora(use_dora=True))
    one = {"base": a, "onto": b, "method": "naive", "alpha": 0.5, "dtype": "float64"}
    full = transport(adapter, **one, full=True).state_dict()
    kept = transport(adapter, **one)
    name = "layers.0.self_attn.q_proj.weight"
    wanted = kept.moved_adapter.merged(name, Model.open(b).read(name).double())
    assert torch.allclose(full[f"model.{name}"], wanted, atol=1e-6)


EMBEDDINGS = {
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "lora on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora on the head": {"target_modules": ["q_proj", "lm_head"]},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [1, 5]}},
    "both, kept tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens of both": {"trainable_token_indices": [1, 5]},
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_tied_embeddings_that_an_adapter_changes_apart_become_two(name, shuffled, aligned, tmp_path):
    """The whole model computes what B with the adapter computes, and its configuration says what is tied."""
    import peft
    import transformers

    load = transformers.MistralForCausalLM.from_pretrained
    a, b = shuffled("mistral-tied")
    config = lora(**{"target_modules": ["q_proj"], **EMBEDDINGS[name]})
    adapter = adapted(a, tmp_path / "adapter", config, into="MistralForCausalLM")
    one = {"base": a, "onto": b, "via": aligned(a, b, residual="tied")}
    kept = transport(adapter, **one).save(tmp_path / "kept")
    full = transport(adapter, **one, full=True).save(tmp_path / "full")
    ids = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        on_a = peft.PeftModel.from_pretrained(load(a), adapter).eval()(ids).logits
        on_b = peft.PeftModel.from_pretrained(load(b), kept).eval()(ids).logits
        whole = load(full)(ids).logits
    assert (on_b - on_a).abs().max() < 1e-4
    assert (whole - on_b).abs().max() < 1e-4 < 1e-2 < (whole - load(b)(ids).logits).abs().max()
    tied = "both" in name
    assert json.loads((full / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in Model.open(full).checkpoint.tensors) is not tied


@pytest.mark.parametrize("case", ["gpt2", "bert-pretraining"])
def test_embeddings_are_untied_in_other_families_too(case, shuffled, aligned, tmp_path):
    import peft
    import transformers

    into = {"gpt2": "GPT2LMHeadModel", "bert-pretraining": "BertForPreTraining"}[case]
    words = {"gpt2": "wte", "bert-pretraining": "word_embeddings"}[case]
    a, b = shuffled(case)
    adapter = adapted(a, tmp_path / "adapter", lora(target_modules=[words]), into=into)
    one = {"base": a, "onto": b, "via": aligned(a, b, residual="tied")}
    kept = transport(adapter, **one).save(tmp_path / "kept")
    full = transport(adapter, **one, full=True).save(tmp_path / "full")
    load = getattr(transformers, into).from_pretrained
    ids = torch.randint(0, 29, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = peft.PeftModel.from_pretrained(load(b), kept).eval()(ids)[0]
        assert (load(full).eval()(ids)[0] - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("case", "into", "words"),
    [
        ("t5-gated", "T5ForConditionalGeneration", "shared"),  # it scales what a tied head reads
        ("bart-generation", "BartForConditionalGeneration", "shared"),
        ("deberta-masked", "DebertaV2ForMaskedLM", "word_embeddings"),  # its head has no matrix
    ],
)
def test_embeddings_that_cannot_be_untied_are_refused(case, into, words, shuffled, tmp_path):
    a, b = shuffled(case)
    adapter = adapted(a, tmp_path / "adapter", lora(target_modules=[words]), into=into)
    with pytest.raises(MismatchError, match="weight to its embedding, and in the output they would differ"):
        transport(adapter, base=a, onto=b, method="naive", full=True)


@pytest.mark.parametrize("bare", [True, False])
def test_a_head_that_only_the_adapter_has_makes_a_model_of_its_class(bare, made, tmp_path):
    """Whatever the bases are stored as: a bare encoder, or one with a head that the adapter does not use."""
    import peft
    import transformers

    kind = "bert" if bare else "bert-pretraining"
    a, b = made(kind, 1), made(kind, 2)
    config = lora(target_modules=["query"], task_type="SEQ_CLS", modules_to_save=["classifier"])
    adapter = adapted(a, tmp_path / "adapter", config, into="BertForSequenceClassification", num_labels=5)
    moved = transport(adapter, base=a, onto=b, method="naive", full=True)
    full = moved.save(tmp_path / "full")
    found = transformers.BertForSequenceClassification.from_pretrained(full)
    assert found.config.num_labels == 5
    own = transformers.BertForSequenceClassification.from_pretrained(b, num_labels=5)
    kept = transport(adapter, base=a, onto=b, method="naive").save(tmp_path / "kept")
    wanted = peft.PeftModel.from_pretrained(own, kept)
    ids = torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (found.eval()(ids).logits - wanted.eval()(ids).logits).abs().max() < 1e-5
    metadata = json.loads((full / "transfusion.json").read_text())
    assert metadata["carried"] == ["classifier.bias", "classifier.weight"]
    if not bare:
        assert any(name.startswith("cls.") for name in metadata["dropped"])


def test_no_class_is_guessed_for_an_output(made, tmp_path, monkeypatch):
    """Without transformers nobody knows whether B's type has the class; the adapter alone still moves."""
    config = lora(target_modules=["query"], task_type="SEQ_CLS", modules_to_save=["classifier"])
    adapter = adapted(made("bert"), tmp_path / "adapter", config, into="BertForSequenceClassification")
    one = {"base": made("bert"), "onto": made("bert", 2), "method": "naive"}
    classes_of.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.models.auto", None)
    try:
        with pytest.raises(LibraryError, match="this needs transformers"):
            transport(adapter, **one, full=True)
        with pytest.raises(LibraryError, match="this needs transformers"):
            class_for_type("LlamaForSequenceClassification", "llama", "qwen2")
        assert transport(adapter, **one).save(tmp_path / "kept").exists()
    finally:
        classes_of.cache_clear()


def test_prompts_cannot_be_merged(made, tmp_path):
    import peft

    a, b = made("llama", 1), made("llama", 2)
    adapter = adapted(
        a, tmp_path / "adapter", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(AdapterError, match="PROMPT_TUNING cannot be merged"):
        transport(adapter, base=a, onto=b, method="naive", full=True).state_dict()


def test_on_the_command_line(cli, shuffled, tmp_path):
    a, b = shuffled("llama")
    adapter = adapted(a, tmp_path / "adapter", lora())
    code, out, _ = cli(
        "transport",
        adapter,
        "--base",
        a,
        "--onto",
        b,
        "--method",
        "naive",
        "--full",
        "-o",
        tmp_path / "full",
    )
    assert code == 0, out
    assert "tensors moved onto" in out
    live = LiveModel.of(Model.open(tmp_path / "full"))
    assert largest_difference(live.outputs(), LiveModel.of(Model.open(b)).outputs()) > 1e-3
    assert CASES["llama"].family == Model.open(tmp_path / "full").family.name
