"""Models of different shapes: planted truths that must arrive exactly, and what is refused."""

from __future__ import annotations

import copy
import json
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deepening import deepened
from small_models import CASES
from transfusion import align, apply, merge, transport
from transfusion.alignment.alignment import Alignment
from transfusion.errors import (
    AdapterError,
    AlignmentError,
    DataError,
    MismatchError,
    SettingError,
    UselessResultError,
)
from transfusion.matching import other_shapes
from transfusion.matching.align import plan_align
from transfusion.matching.methods import preset
from transfusion.matching.other_shapes import divided_path, monotone_path
from transfusion.matching.procrustes import isometry, nearest_frequencies
from transfusion.model.model import Model
from transfusion.model.part_roles import tensor_parts
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.inputs import run_model
from transfusion.running.probes.texts import _of_transformers, corpus
from transfusion.runtime.progress import Progress
from transfusion.runtime.resources import Resources
from transfusion.transport.changes import resampled_kernel, resampled_positions
from transfusion.transport.refinement import inputs as refinement_inputs
from transfusion.transport.refinement import teaching
from vocabularies import rearranged, save_tokenizer, trained_tokenizer, with_rows

LLAMA = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-12,
}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
    "initializer_range": 0.3,
    "layer_norm_eps": 1e-12,
}
BERT = {
    "vocab_size": 60,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}


def llama(**changed):
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **changed})).eval()


def vit(**changed):
    torch.manual_seed(2)
    return transformers.ViTForImageClassification(transformers.ViTConfig(**{**VIT, **changed})).eval()


def tuned(model, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    changed = copy.deepcopy(model)
    for parameter in changed.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return changed


def filled(model, state):
    model.load_state_dict(state)
    return model


def deeper(a, b):
    """B is A with a block in between that does nothing."""
    found = {}
    for name, one in b.state_dict().items():
        if ".layers.1." in name:
            ends = any(part in name for part in ("o_proj", "down_proj"))
            found[name] = torch.zeros_like(one) if ends else one
        else:
            found[name] = a.state_dict()[name.replace(".layers.2.", ".layers.1.")]
    return filled(b, found)


def wider(a, b):
    """B is A with further units of the residual stream that are always zero."""
    share = (a.config.hidden_size / b.config.hidden_size) ** 0.5
    found = {}
    for name, one in b.state_dict().items():
        ours, room = a.state_dict()[name], torch.zeros_like(one)
        if ours.ndim == 1:
            room[: len(ours)], room[len(ours) :] = ours * share, 1
        else:
            room[: ours.shape[0], : ours.shape[1]] = ours
        found[name] = room
    return filled(b, found)


def doubled_heads(a, b):
    """B has each head of A twice."""
    found = {}
    for name, ours in a.state_dict().items():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            ours = ours.reshape(4, 8, -1).repeat_interleave(2, 0).reshape(64, -1)
        if "o_proj" in name:
            ours = ours.reshape(32, 4, 8).repeat_interleave(2, 1).reshape(32, 64) / 2
        found[name] = ours
    return filled(b, found)


def qwen(a):
    """A as a Qwen 2, whose projections have biases."""
    settings = {name: value for name, value in LLAMA.items() if name != "head_dim"}
    made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings)).eval()
    own = made.state_dict()
    return filled(made, {name: a.state_dict().get(name, torch.zeros_like(one)) for name, one in own.items()})


def planted(name: str):
    """Two models of different shapes that compute the same."""
    if name == "doubled heads":
        four = {"num_key_value_heads": 4}
        a = llama(**four)
        return a, doubled_heads(a, llama(num_attention_heads=8, num_key_value_heads=8))
    a = llama()
    match name:
        case "deeper":
            return a, deeper(a, llama(num_hidden_layers=3))
        case "wider":
            return a, wider(a, llama(hidden_size=48))
        case "other type":
            return a, qwen(a)
    raise AssertionError(name)


def error(moved, wanted, before, ids) -> float:
    """How far the moved model is from the wanted one, as a share of what the fine-tune changed."""
    with torch.no_grad():
        got, want, was = (model(input_ids=ids).logits for model in (moved, wanted, before))
    return float((got - want).norm() / (want - was).norm())


class Noted(Progress):
    """Keeps what was noted."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


IDS = torch.randint(1, 99, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A, B with one block more, and a fine-tune of A, as folders."""
    folder = tmp_path_factory.mktemp("shapes")
    a, b = planted("deeper")
    for name, model in (("a", a), ("b", b), ("tuned", tuned(a))):
        model.save_pretrained(folder / name)
    align(folder / "a", folder / "b", method="functional", output=folder / "pi.safetensors")
    return folder


# ── planted truths ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["deeper", "wider", "doubled heads", "other type"])
def test_what_was_planted_arrives_exactly(name):
    a, b = planted(name)
    wanted = tuned(a)
    with torch.no_grad():
        assert torch.allclose(a(input_ids=IDS).logits, b(input_ids=IDS).logits, atol=1e-3)
    pi = align(a, b, method="functional")
    assert pi.other_shape
    moved = transport(wanted, base=a, onto=b, via=pi, alpha=1.0).module()
    assert error(moved, wanted, a, IDS) < 1e-4


@pytest.mark.parametrize("case", ["vit-classifier", "siglip-vision", "gpt2", "opt", "falcon-7b"])
def test_a_block_that_does_nothing_is_found_in_every_family(case):
    a = CASES[case].build(1).float()
    b, wanted = deepened(a), tuned(a)
    live = LiveModel.of(Model.open(a))
    inputs = {name: one.float() if one.is_floating_point() else one for name, one in live.inputs.items()}
    pi = align(a, b, method="functional")
    moved = transport(wanted, base=a, onto=b, via=pi, alpha=1.0).module().float()
    was, want, got = (run_model(one, live.family, inputs, double=False) for one in (a, wanted, moved))
    name = "logits" if "logits" in was else "last_hidden_state"
    assert (got[name] - want[name]).norm() < 1e-4 * (want[name] - was[name]).norm()


@pytest.mark.parametrize(("ours", "theirs"), [(16, 24), (24, 16)])
def test_positions_of_texts_stay_in_their_places(ours, theirs):
    settings = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    torch.manual_seed(1)
    a, b = (
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, n_positions=count)).eval()
        for count in (ours, theirs)
    )
    table, kept = b.transformer.wpe.weight.data.clone(), min(ours, theirs)
    table[:kept] = a.transformer.wpe.weight.data[:kept]
    filled(b, a.state_dict() | {"transformer.wpe.weight": table})
    wanted = tuned(a)
    moved = transport(wanted, base=a, onto=b, method="functional", alpha=1.0).module().eval()
    assert error(moved, wanted, a, IDS) < 1e-4
    rest = moved.transformer.wpe.weight[kept:]
    assert torch.equal(rest, table[kept:])


def test_experts_are_refused():
    a = CASES["mixtral"].build(1).float()
    with pytest.raises(MismatchError, match="mixture of experts"):
        align(a, deepened(a), method="functional")


def test_images_of_another_library_with_another_head(tmp_path):
    import timm

    a = vit()
    b = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=4,
        embed_dim=32,
        depth=2,
        num_heads=4,
        mlp_ratio=1.5,
        num_classes=5,
    ).eval()
    b.pretrained_cfg = {**b.pretrained_cfg, "input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.25,) * 3}
    for part in b.modules():
        if isinstance(part, torch.nn.LayerNorm):
            part.eps = 1e-12
    ours = tensor_parts(Model.open(a).architecture)
    state = {name: torch.zeros_like(one) for name, one in b.state_dict().items()}
    opened = Model.open(a)
    for role, part in tensor_parts(Model.open(b).architecture).items():
        part.put(state[part.tensor], opened.read(ours[role].tensor))
    b.load_state_dict(state)
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    wanted = tuned(a)
    with torch.no_grad():
        assert torch.allclose(a(pixels).logits, b(pixels), atol=1e-4), "the same ViT in both libraries"
        moved = transport(wanted, base=a, onto=b, method="functional").module()
        change = wanted(pixels).logits - a(pixels).logits
        assert (moved(pixels) - wanted(pixels).logits).norm() < 1e-3 * change.norm()


def test_a_head_that_only_the_fine_tune_has_is_carried_in_b_s_width(tmp_path):
    torch.manual_seed(5)
    other = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    for name, changed in (("a", {}), ("b", other)):
        made = transformers.BertModel(transformers.BertConfig(**{**BERT, **changed}))
        made.save_pretrained(tmp_path / name)
    wanted = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "a", num_labels=3)
    tuned(wanted).save_pretrained(tmp_path / "tuned")
    transport(
        tmp_path / "tuned",
        base=tmp_path / "a",
        onto=tmp_path / "b",
        method="functional",
        alpha=1.0,
        force_unrelated=True,
    ).save(tmp_path / "out")
    load = transformers.BertForSequenceClassification.from_pretrained
    moved, expected = load(tmp_path / "out").eval(), load(tmp_path / "tuned").eval()
    assert moved.config.num_labels == 3
    assert moved.config.num_hidden_layers == 3
    assert moved.classifier.weight.shape == (3, 32)
    ids = torch.randint(0, 60, (4, 9), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        got, want = moved(input_ids=ids).logits, expected(input_ids=ids).logits
    assert torch.isfinite(got).all()
    assert got.shape == want.shape


GONE = [(290, 300, 310), (), tuple(range(262, 318, 2))]
"""Tokens that B does not have."""


@pytest.mark.parametrize("gone", [GONE[0], *(pytest.param(one, marks=pytest.mark.slow) for one in GONE[1:])])
def test_tokens_move_by_string_between_shapes(gone, tmp_path):
    """Texts are compared token by token if nearly all are the same, and by characters otherwise."""
    whole = json.loads(trained_tokenizer(320).to_str())
    other, rows = rearranged(whole, gone)
    a = llama(vocab_size=320)
    wanted = tuned(a)
    plain = deeper(a, llama(vocab_size=320, num_hidden_layers=3))
    for name, model in (("a", a), ("plain", plain), ("tuned", wanted)):
        model.save_pretrained(tmp_path / name)
    for name in ("a", "tuned"):
        save_tokenizer(tmp_path / name, whole)
    save_tokenizer(with_rows(tmp_path / "plain", tmp_path / "b", rows), other)
    notes = Noted()
    moved = transport(
        tmp_path / "tuned",
        base=tmp_path / "a",
        onto=tmp_path / "b",
        method="functional",
        alpha=1.0,
        progress=notes,
    )
    about = moved.pi.provenance.advice["probes"]
    assert ("in the tokens of both" in about) == (len(gone) > 10)
    assert any("the vocabularies differ" in note for note in notes.texts)
    at = {row: place for place, row in enumerate(rows)}
    known = [row for row in range(320) if row in at]
    ids = torch.tensor(known)[torch.randint(len(known), (3, 12), generator=torch.Generator().manual_seed(1))]
    places = torch.tensor([[at[one] for one in row] for row in ids.tolist()])
    with torch.no_grad():
        before, want = (model(input_ids=ids).logits[..., known] for model in (a, wanted))
        got = moved.module()(input_ids=places).logits[..., [at[row] for row in known]]
    assert (got - want).norm() < (0.4 if gone else 1e-3) * (want - before).norm()
    if len(gone) < 10:
        chosen = transport(tmp_path / "tuned", base=tmp_path / "a", onto=tmp_path / "b", via=moved.pi)
        assert chosen.metadata()["output_shift"]["direction"] > 0.9, "logits of common tokens are compared"


# ── adapters ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def lora(pair) -> Path:
    import peft

    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM.from_pretrained(pair / "a")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(pair / "lora")
    return pair / "lora"


def test_a_lora_becomes_a_lora_of_the_same_rank(pair, lora, tmp_path):
    import peft

    moved = transport(
        str(lora),
        base=pair / "a",
        onto=pair / "b",
        via=pair / "pi.safetensors",
        alpha=1.0,
        output=tmp_path / "out",
    )
    load = transformers.LlamaForCausalLM.from_pretrained
    wanted = peft.PeftModel.from_pretrained(load(pair / "a"), str(lora)).eval()
    got = peft.PeftModel.from_pretrained(load(pair / "b"), str(tmp_path / "out")).eval()
    assert error(got, wanted, load(pair / "a").eval(), IDS) < 1e-4
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {min(one.shape) for one in stored.values()} == {4}
    assert all("model.layers." in name for name in stored), "B's own names"
    info = json.loads((tmp_path / "out" / "transfusion.json").read_text())
    assert info["kind"] == "adapter"
    assert info["kept"] > 0.999
    assert moved.plan()["tensors"] == len(stored)


def test_a_lora_can_become_part_of_the_moved_model(pair, lora, tmp_path):
    import peft

    load = transformers.LlamaForCausalLM.from_pretrained
    wanted = peft.PeftModel.from_pretrained(load(pair / "a"), str(lora)).eval()
    asked = {"base": pair / "a", "onto": pair / "b", "via": pair / "pi.safetensors", "alpha": 1.0}
    moved = transport(str(lora), full=True, **asked).module().eval()
    assert error(moved, wanted, load(pair / "a").eval(), IDS) < 1e-4


def test_an_adapter_of_another_kind_is_refused(pair, tmp_path):
    import peft

    model = transformers.LlamaForCausalLM.from_pretrained(pair / "a")
    config = peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "ia3")
    with pytest.raises(AdapterError, match="IA3 cannot be moved to another shape"):
        transport(str(tmp_path / "ia3"), base=pair / "a", onto=pair / "b", via=pair / "pi.safetensors")


@pytest.fixture(scope="module")
def lora_with_head(tmp_path_factory) -> Path:
    """A LoRA of a classifier, whose head is stored whole; B has another width and no such head."""
    import peft

    folder = tmp_path_factory.mktemp("lora-head")
    torch.manual_seed(12)
    wider_one = {"hidden_size": 40, "num_hidden_layers": 3}
    for name, changed in (("a", {}), ("b", wider_one)):
        made = transformers.ViTModel(transformers.ViTConfig(**{**VIT, **changed}), add_pooling_layer=False)
        made.save_pretrained(folder / name)
    model = transformers.ViTForImageClassification.from_pretrained(folder / "a", num_labels=5)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn_like(parameter)
    adapted.save_pretrained(folder / "lora")
    align(
        folder / "a",
        folder / "b",
        method="functional",
        force_unrelated=True,
        output=folder / "pi.safetensors",
    )
    return folder


@pytest.mark.parametrize("refine", [False, True])
def test_the_head_of_a_lora_is_stored_in_b_s_width(lora_with_head, refine, tmp_path, monkeypatch):
    import peft

    monkeypatch.setattr(refinement_inputs, "INVERTED", 16)
    monkeypatch.setattr(refinement_inputs, "INVERSION_STEPS", 5)
    monkeypatch.setattr(refinement_inputs, "HELD_OUT", 32)
    monkeypatch.setattr(teaching, "BATCH", 16)
    folder = lora_with_head
    more = {"refine": True, "refine_steps": 4} if refine else {"alpha": 1.0}
    transport(
        str(folder / "lora"),
        base=folder / "a",
        onto=folder / "b",
        via=folder / "pi.safetensors",
        output=tmp_path / "out",
        **more,
    )
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    heads = {name: one for name, one in stored.items() if "classifier" in name}
    assert {tuple(one.shape) for one in heads.values()} == {(5, 40), (5,)}
    assert {min(one.shape) for name, one in stored.items() if "lora_" in name} == {3}
    base = transformers.ViTForImageClassification.from_pretrained(folder / "b", num_labels=5)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
    state = loaded.state_dict()
    assert torch.equal(
        state["base_model.model.classifier.modules_to_save.default.weight"],
        next(one for name, one in heads.items() if name.endswith("weight")),
    )


# ── files ────────────────────────────────────────────────────────────────────────────────────


def test_a_file_of_pi_keeps_everything(pair, tmp_path):
    pi = Alignment.load(pair / "pi.safetensors")
    again = Alignment.load(pi.save(tmp_path / "again.safetensors"))
    assert again.digest == pi.digest
    assert (again.folds, again.folds_b, again.paths) == (pi.folds, pi.folds_b, pi.paths)
    assert [(i, j) for i, j, _ in pi.paths["layer"]] == [(0, 0), (1, 1), (1, 2)]
    assert (again.sizes, again.sizes_b) == (pi.sizes, pi.sizes_b)
    assert again.provenance == pi.provenance


def test_a_changed_file_of_pi_is_refused(pair, tmp_path):
    pi = Alignment.load(pair / "pi.safetensors")
    pi.save(tmp_path / "pi.safetensors")
    tensors = load_file(tmp_path / "pi.safetensors")
    from safetensors import safe_open

    with safe_open(tmp_path / "pi.safetensors", "pt") as opened:
        metadata = opened.metadata()
    first = next(iter(tensors))
    tensors[first] = tensors[first] + 0.1
    save_file(tensors, tmp_path / "other.safetensors", metadata)
    with pytest.raises(AlignmentError, match="damaged"):
        Alignment.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize("what", ["inverted", "chained"])
def test_a_pi_between_shapes_has_no_algebra(pair, what):
    pi = Alignment.load(pair / "pi.safetensors")
    with pytest.raises(AlignmentError, match=f"different shapes cannot be {what}"):
        pi.inverse() if what == "inverted" else pi.after(pi)


def test_a_pi_of_other_models_is_refused(pair, tmp_path):
    tuned(transformers.LlamaForCausalLM.from_pretrained(pair / "b")).save_pretrained(tmp_path / "other")
    with pytest.raises(AlignmentError, match="has other weights"):
        transport(pair / "tuned", base=pair / "a", onto=tmp_path / "other", via=pair / "pi.safetensors")


def test_a_run_is_repeated_bit_for_bit(pair, tmp_path):
    transport(pair / "tuned", base=pair / "a", onto=pair / "b", method="functional", output=tmp_path / "out")
    transport(repeat=tmp_path / "out" / "transfusion.json", output=tmp_path / "again")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_dry_run_counts_what_is_written(pair, tmp_path):
    asked = {"base": pair / "a", "onto": pair / "b", "method": "functional"}
    planned = transport(pair / "tuned", **asked, dry_run=True).plan()
    transport(pair / "tuned", **asked, output=tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert planned["tensors"] == len(written)
    assert planned["bytes_to_write"] == sum(one.nbytes for one in written.values())
    assert plan_align(pair / "a", pair / "b", method="functional")["axes"] > 0


# ── refusals ─────────────────────────────────────────────────────────────────────────────────


def test_methods_that_compare_weights_need_one_shape(pair):
    with pytest.raises(MismatchError, match="do not have the same tensors") as refused:
        align(pair / "a", pair / "b", method="guarded")
    assert "functional" in str(refused.value.hint)
    with pytest.raises(UselessResultError, match=r"different shapes \(.* blocks") as refused:
        align(pair / "a", pair / "b")
    assert "functional" in str(refused.value.hint)


def test_models_that_compute_unrelated_things_are_refused(pair):
    other = llama(num_hidden_layers=3, hidden_size=40)
    generator = torch.Generator().manual_seed(9)
    for parameter in other.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    noise = torch.Generator().manual_seed(10)
    a = llama()
    for parameter in a.parameters():
        parameter.data = torch.randn(parameter.shape, generator=noise)
    wanted = tuned(a)
    pi = align(a, other, method="functional", force_unrelated=True)
    with pytest.raises(UselessResultError, match="would change in another direction than A's did"):
        transport(wanted, base=a, onto=other, via=pi)
    moved = transport(wanted, base=a, onto=other, via=pi, force_unrelated=True)
    assert moved.metadata()["output_shift"]["direction"] < 0.05


def test_kinds_of_inputs_must_agree():
    with pytest.raises(MismatchError, match="compared only if both read images, or both read texts"):
        align(vit(), llama(), method="functional")


def test_memory_and_engines_are_refused(pair):
    with pytest.raises(SettingError, match="holds whole models"):
        align(pair / "a", pair / "b", method="functional", resources=Resources(memory=2**30))


def test_vocabularies_that_cannot_be_compared_are_refused():
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
    with pytest.raises(MismatchError, match="has 99 tokens and"):
        align(llama(), bert, method="functional")


def test_activations_must_predict_more_than_chance(pair, monkeypatch):
    monkeypatch.setattr(other_shapes, "MARGIN", 1.0)
    with pytest.raises(UselessResultError, match="compute unrelated things: A's activations predict"):
        align(pair / "a", pair / "b", method="functional")
    assert align(pair / "a", pair / "b", method="functional", force_unrelated=True).maps


def test_a_pi_between_shapes_does_not_serve_one_shape(pair):
    pi = Alignment.load(pair / "pi.safetensors")
    with pytest.raises(AlignmentError, match="this is a π between models of different shapes"):
        apply(pi, pair / "a")
    with pytest.raises(MismatchError, match="different shapes, and"):
        transport(pair / "tuned", base=pair / "a", onto=pair / "a", via=pi, dry_run=True)


def test_new_tokens_are_not_kept(pair):
    with pytest.raises(SettingError, match="new tokens cannot be kept"):
        transport(
            pair / "tuned", base=pair / "a", onto=pair / "b", via=pair / "pi.safetensors", new_tokens="keep"
        )


def test_a_head_becomes_that_of_b_s_own_class(tmp_path):
    a = llama()
    a.save_pretrained(tmp_path / "a")
    qwen(a).save_pretrained(tmp_path / "b")
    load = transformers.LlamaForSequenceClassification.from_pretrained
    wanted = tuned(load(tmp_path / "a", num_labels=3).eval())
    wanted.save_pretrained(tmp_path / "tuned")
    places = {"base": tmp_path / "a", "onto": tmp_path / "b"}
    moved = transport(tmp_path / "tuned", **places, method="functional", alpha=1.0, output=tmp_path / "out")
    found = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert type(moved.module()).__name__ == type(found).__name__ == "Qwen2ForSequenceClassification"
    with torch.no_grad():
        got, want = found(input_ids=IDS).logits, wanted(input_ids=IDS).logits
    assert torch.allclose(got, want, atol=1e-3)


def test_a_head_that_another_family_lacks_is_refused():
    import timm

    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    b = timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes).eval()
    b.pretrained_cfg = {**b.pretrained_cfg, "input_size": (3, 16, 16)}
    a = vit()
    with pytest.raises(MismatchError, match="has the head classifier"):
        transport(tuned(a), base=a, onto=b, method="functional", alpha=1.0, force_unrelated=True)


# ── the user's own inputs ────────────────────────────────────────────────────────────────────


def test_own_images_are_resized_for_b(tmp_path):
    images = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    save_file({"pixel_values": images}, tmp_path / "own.safetensors")
    a, b = vit(), vit(image_size=24, patch_size=8)
    method = preset("functional").changed(calibrate=str(tmp_path / "own.safetensors"))
    pi = align(a, b, method=method, force_unrelated=True)
    assert "40 examples of" in pi.provenance.advice["probes"]


def test_own_texts_are_tokenized_for_both(tmp_path):
    for name, tokens in (("a", 320), ("b", 290)):
        llama(vocab_size=tokens, num_hidden_layers=2 + (name == "b")).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name, json.loads(trained_tokenizer(tokens).to_str()))
    texts = [passage for passages in corpus().values() for passage in passages]
    (tmp_path / "own.txt").write_text("\n".join(" ".join(one.split()) for one in texts[:60]))
    save_file({"input_ids": IDS}, tmp_path / "ids.safetensors")
    method = preset("functional").changed(calibrate=str(tmp_path / "own.txt"))
    pi = align(tmp_path / "a", tmp_path / "b", method=method, force_unrelated=True)
    assert "own.txt, in the tokens of both models" in pi.provenance.advice["probes"]
    method = preset("functional").changed(calibrate=str(tmp_path / "ids.safetensors"))
    with pytest.raises(DataError, match="these inputs are no texts"):
        align(tmp_path / "a", tmp_path / "b", method=method)


def test_long_texts_are_cut_and_short_ones_padded(tmp_path):
    save_tokenizer(tmp_path, json.loads(trained_tokenizer(290).to_str()))
    made = _of_transformers(tmp_path)
    ids, mask = made.padded(["the river", "the river " * 40], 12)
    assert ids.shape == (2, 12)
    assert mask[1].all()
    assert 0 < int(mask[0].sum()) < 12
    assert made.decode(ids)[1].startswith("the river the")


# ── refinement ───────────────────────────────────────────────────────────────────────────────


def test_a_refinement_goes_on_from_another_shape(tmp_path, monkeypatch):
    monkeypatch.setattr(refinement_inputs, "INVERTED", 16)
    monkeypatch.setattr(refinement_inputs, "INVERSION_STEPS", 5)
    monkeypatch.setattr(refinement_inputs, "HELD_OUT", 32)
    monkeypatch.setattr(teaching, "BATCH", 16)
    a = vit()
    b = vit(image_size=24, patch_size=8, hidden_size=40, num_hidden_layers=3)
    asked = {"base": a, "onto": b, "method": "functional", "force_unrelated": True}
    moved = transport(tuned(a, 11), **asked, refine=True, refine_steps=24, refine_keep=0.0)
    record = moved.metadata()["refinement"]
    before, after = record["divergence"]
    assert after < 0.98 * before, record
    assert moved.module()(torch.randn(2, 3, 24, 24)).logits.shape == (2, 5)


def test_a_refinement_reads_texts_in_the_tokens_of_each_model(tmp_path, monkeypatch):
    monkeypatch.setattr(refinement_inputs, "POOL", 48)
    monkeypatch.setattr(refinement_inputs, "HELD_OUT", 32)
    monkeypatch.setattr(teaching, "BATCH", 16)
    torch.manual_seed(8)
    sizes = {"a": (320, {}), "b": (290, {"hidden_size": 32, "num_attention_heads": 4})}
    for name, (tokens, changed) in sizes.items():
        config = transformers.BertConfig(**{**BERT, "vocab_size": tokens, "num_labels": 3, **changed})
        transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / name)
    load = transformers.BertForSequenceClassification.from_pretrained
    tuned(load(tmp_path / "a")).save_pretrained(tmp_path / "tuned")
    for name in ("a", "tuned", "b"):
        tokens = sizes.get(name, sizes["a"])[0]
        save_tokenizer(tmp_path / name, json.loads(trained_tokenizer(tokens).to_str()))
    moved = transport(
        tmp_path / "tuned",
        base=tmp_path / "a",
        onto=tmp_path / "b",
        method="functional",
        refine=True,
        refine_steps=16,
        refine_keep=0.0,
        output=tmp_path / "out",
    )
    before, after = moved.metadata()["refinement"]["divergence"]
    assert after < 0.98 * before
    assert load(tmp_path / "out").config.vocab_size == 290


def test_several_fine_tunes_are_merged_onto_another_shape(pair):
    a = transformers.LlamaForCausalLM.from_pretrained(pair / "a")
    both = [tuned(a, 3), tuned(a, 4)]
    asked = {"base": a, "onto": pair / "b", "via": pair / "pi.safetensors"}
    merged = merge(both, how="sum", **asked).module()
    wanted = copy.deepcopy(a)
    for name, parameter in wanted.named_parameters():
        ours = [dict(one.named_parameters())[name] for one in both]
        parameter.data = ours[0].data + ours[1].data - parameter.data
    assert error(merged, wanted.eval(), a.eval(), IDS) < 0.05, "a scale of a norm is folded before the sum"


def test_adapters_are_not_merged_into_one_adapter(pair, lora):
    asked = {"base": pair / "a", "onto": pair / "b", "via": pair / "pi.safetensors"}
    with pytest.raises(SettingError, match="cannot be merged into one adapter"):
        merge([str(lora), str(lora)], **asked)


# ── what users see ───────────────────────────────────────────────────────────────────────────


def test_the_command_line_shows_blocks_and_says_what_to_do(pair, cli, tmp_path):
    arguments = ["transport", pair / "tuned", "--base", pair / "a", "--onto", pair / "b"]
    code, _, err = cli(*arguments, "-o", tmp_path / "x")
    assert code == 4
    assert "\ntype this next: transfusion transport" in err
    code, out, _ = cli("inspect", pair / "pi.safetensors")
    assert code == 0
    assert "those in brackets correspond" in out
    assert "[100%]" in out
    code, out, _ = cli("inspect", pair / "pi.safetensors", "--json")
    assert json.loads(out)["paths"]["layer"][0] == [0, 0]
    code, out, err = cli(*arguments, "--via", pair / "pi.safetensors", "-o", tmp_path / "out")
    assert code == 0
    assert "different shapes: 2 and 3 blocks" in err
    assert "16 tensors moved" in out
    code, out, _ = cli("verify", pair / "a", "--via", pair / "pi.safetensors", "--onto", pair / "b")
    assert code == 0
    assert "of B's activations are predicted" in out
    assert "nothing moved" not in out
    code, _, err = cli("apply", pair / "pi.safetensors", pair / "a", "-o", tmp_path / "y")
    assert code == 1
    assert "between models of different shapes" in err
    code, out, _ = cli("report", tmp_path / "out", "-o", tmp_path / "report.html")
    assert code == 0
    page = (tmp_path / "report.html").read_text()
    assert "Blocks that correspond" in page


def test_outputs_that_cannot_be_compared_are_not_guessed(tmp_path):
    a, b = planted("deeper")
    wanted = tuned(a)
    pi = align(a, b, method="functional")
    other = llama(num_hidden_layers=3, vocab_size=77)
    with pytest.raises(MismatchError, match="77"):
        align(a, other, method="functional")
    moved = transport(wanted, base=a, onto=b, via=pi, alpha="auto")
    assert moved.metadata()["output_shift"]["direction"] > 0.99


# ── parts ────────────────────────────────────────────────────────────────────────────────────


def every_path(depth: int, deeper_one: int):
    """All monotone paths with both ends pinned, on which every block of the deeper model occurs once."""
    for steps in combinations_with_replacement(range(depth), deeper_one):
        if set(steps) == set(range(depth)):
            yield tuple((i, j) for j, i in enumerate(steps))


@given(st.integers(1, 4), st.integers(0, 3), st.data())
def test_the_path_is_the_best_of_all(depth, more, data):
    shape = depth, depth + more
    number = st.floats(-1, 1, allow_nan=False, width=16)
    table = [[data.draw(number) for _ in range(shape[1])] for _ in range(shape[0])]
    best = max(sum(table[i][j] for i, j in path) for path in every_path(*shape))
    found = monotone_path(table)
    assert abs(sum(table[i][j] for i, j in found) - best) < 1e-9
    assert found[0] == (0, 0)
    assert found[-1] == (shape[0] - 1, shape[1] - 1)
    turned = monotone_path([list(column) for column in zip(*table, strict=True)])
    assert abs(sum(table[i][j] for j, i in turned) - best) < 1e-9


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_the_change_of_a_block_is_divided_completely(depth, other, data):
    number = st.floats(-1, 1, allow_nan=False, width=16)
    table = [[data.draw(number) for _ in range(other)] for _ in range(depth)]
    path = divided_path(table)
    for block in range(depth):
        assert abs(sum(share for i, _, share in path if i == block) - 1) < 1e-6
        assert all(share >= 0 for _, _, share in path)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_an_isometry_keeps_lengths_where_there_is_room(shape):
    found = isometry(torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    small = min(shape)
    product_ = found.T @ found if shape[1] == small else found @ found.T
    assert torch.allclose(product_, torch.eye(small, dtype=torch.float64), atol=1e-10)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_kernel_answers_alike_to_a_patch_in_another_size(size):
    kernel = torch.randn(3, 2, 1, 1, generator=torch.Generator().manual_seed(2)).expand(3, 2, 8, 8)
    flat = torch.ones(1, 2, 8, 8)
    made = resampled_kernel(kernel, size, size)
    answer = torch.einsum("ochw,bchw->bo", kernel, flat)
    assert torch.allclose(
        torch.einsum("ochw,bchw->bo", made, torch.ones(1, 2, size, size)), answer, atol=1e-4
    )


def test_positions_are_resampled_as_a_grid_and_a_class_token_stays():
    ramp = torch.arange(4.0).repeat_interleave(4)[:, None]
    table = torch.cat([torch.full((1, 1), 9.0), ramp])
    found = resampled_positions(table, 1 + 64, grid=True)
    assert found[0].item() == 9.0
    grid = found[1:].reshape(8, 8)
    assert torch.allclose(grid, grid[:, :1].expand(8, 8), atol=1e-6), "rows stay rows"
    assert bool((grid[1:, 0] >= grid[:-1, 0]).all())
    texts = resampled_positions(table, 20, grid=False)
    assert torch.equal(texts[:17], table)
    assert not texts[17:].any()


@pytest.mark.parametrize(("ours", "theirs"), list(product((2, 4, 8), (2, 4, 8))))
def test_planes_are_paired_by_their_speed(ours, theirs):
    planes = nearest_frequencies(ours, theirs).tolist()
    assert len(planes) == min(ours, theirs)
    assert all(i * theirs == j * ours for i, j in planes)
