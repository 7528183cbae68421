"""Transport: what arrives on B computes what it should, loads where it should, and is written safely."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepening import deepened
from making import written_by_us
from small_models import CASES, PRINCIPAL, finetuned, often
from transfusion.errors import AlignmentError, MismatchError, OutputError, SettingError
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.runtime.progress import Progress
from transfusion.runtime.resources import Resources
from transfusion.transport.apply import apply
from transfusion.transport.output import Action
from transfusion.transport.plan import TransportPlan
from transfusion.transport.task_vector import TaskVector, added, wide
from transfusion.transport.transport import merge, transport

WITH_HEADS = (
    ("vit", "vit-classifier"),
    ("bert", "bert-classifier"),
    ("bert-pretraining", "bert-classifier"),
    ("bert-pretraining", "bert-tokens"),
    ("bert", "bert-questions"),
    ("gpt2", "gpt2-classifier"),
    ("llama", "llama-classifier"),
)


def same_function(found: Path, wanted: Path) -> float:
    """The largest difference between what two folders compute, each run by its own library."""
    one, two = LiveModel.of(Model.open(found)), LiveModel.of(Model.open(wanted))
    return largest_difference(two.outputs(), one.outputs())


@pytest.mark.parametrize(
    "residual", often(["untied", "tied"], ["untied"])
)  # tied: test_planted, in every family
@pytest.mark.parametrize("case", PRINCIPAL)
def test_a_planted_truth_arrives_whole(case, residual, shuffled, aligned, tmp_path):
    """B is an exactly moved A: B + π(τ) computes what the fine-tune computes, and loads in its library."""
    a, b = shuffled(case)
    tuned = finetuned(CASES[case], a, tmp_path / "tuned")
    pi = aligned(a, b, residual=residual)
    moved = transport(tuned, base=a, onto=b, via=pi).save(tmp_path / "moved")
    tuned_live, moved_live = LiveModel.of(Model.open(tuned)), LiveModel.of(Model.open(moved))
    wanted, found = tuned_live.outputs(), moved_live.outputs()
    under = Model.open(a).under(pi.provenance.policy)
    wanted = LiveModel(tuned_live.module, under.family, under.architecture, tuned_live.inputs).expected(
        pi, wanted
    )
    assert largest_difference(wanted, found) < 1e-5
    scale = max(float(value.abs().max()) for value in wanted.values())
    assert largest_difference(wanted, found) / scale < 1e-6
    assert largest_difference(wanted, LiveModel.of(Model.open(b)).outputs()) > 1e-2, (
        "the fine-tune did nothing"
    )


@pytest.mark.parametrize(("base", "kind"), WITH_HEADS)
def test_heads_of_the_fine_tune_are_carried_over(base, kind, shuffled, aligned, tmp_path):
    a, b = shuffled(base)
    tuned = finetuned(CASES[kind], a, tmp_path / "tuned")
    moved = transport(tuned, base=a, onto=b, via=aligned(a, b, residual="tied"))
    moved.save(tmp_path / "moved")
    carried = moved.names(Action.CARRIED)
    assert carried
    assert set(carried) <= Model.open(tuned).architecture.task_heads
    assert json.loads((tmp_path / "moved" / "transfusion.json").read_text())["carried"] == carried
    config = json.loads((tmp_path / "moved" / "config.json").read_text())
    assert config["architectures"] == json.loads((tuned / "config.json").read_text())["architectures"]
    assert same_function(tmp_path / "moved", tuned) < 1e-5


@pytest.mark.parametrize(
    ("case", "labels"), [("vit-classifier", 5), ("bert-classifier", 3), ("bert-classifier", 7)]
)
def test_a_head_with_labels_of_its_own_replaces_that_of_the_base(case, labels, made, aligned, tmp_path):
    """The bases were trained on other labels, perhaps as many: head and labels are the fine-tune's."""
    from functools import partial

    import transformers

    from small_models import BERT, VIT, Case, transformers_model

    model = {"vit-classifier": ("ViTForImageClassification", "ViTConfig", VIT)}.get(
        case, ("BertForSequenceClassification", "BertConfig", BERT)
    )
    names = {i: f"own {i}" for i in range(labels)}
    settings = {**model[2], "id2label": names, "label2id": {v: k for k, v in names.items()}}
    settings.pop("num_labels")
    kind = Case(case, partial(transformers_model, *model[:2], **settings), CASES[case].family)
    a, b = made(case, 1), made(case, 2)
    tuned = (
        finetuned(kind, a, tmp_path / "tuned") if labels == 7 else _with_own_head(kind, a, tmp_path / "tuned")
    )
    moved = transport(tuned, base=a, onto=b, via=aligned(a, b, residual="tied")).save(tmp_path / "moved")
    loaded = getattr(transformers, model[0]).from_pretrained(moved)
    assert loaded.config.id2label == names
    assert loaded.classifier.weight.shape[0] == labels


def test_a_classifier_of_timm_has_the_classes_of_the_fine_tune(made, tmp_path):
    a, b = made("timm-vit", 1), made("timm-vit", 2)
    tuned = tmp_path / "tuned"
    shutil.copytree(a, tuned)
    state = {name: 1.1 * value for name, value in load_file(a / "model.safetensors").items()}
    state |= {"head.weight": torch.randn(5, state["head.weight"].shape[1]), "head.bias": torch.randn(5)}
    save_file(state, tuned / "model.safetensors", {"format": "pt"})
    config = json.loads((a / "config.json").read_text())
    config |= {"num_classes": 5, "label_names": list("abcde")}
    config["model_args"]["num_classes"] = 5
    (tuned / "config.json").write_text(json.dumps(config))
    moved = transport(tuned, base=a, onto=b, method="naive").save(tmp_path / "moved")
    assert json.loads((moved / "config.json").read_text())["label_names"] == list("abcde")
    assert LiveModel.of(Model.open(moved)).module.head.out_features == 5


def _with_own_head(kind, base: Path, folder: Path) -> Path:
    """A fine-tune that shares all but the classifier with its base."""
    from transfusion.architecture.naming import Naming

    origin, model = Model.open(base), kind.build(7)
    naming = Naming(origin.family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "classifier" not in name:
                parameter.copy_(origin.read(naming.canonical(name)) * 1.1)
    return kind.store(model, folder)


def test_a_fine_tune_without_heads_leaves_those_of_b_in_place(made, tmp_path):
    a, b = made("bert-pretraining", 1), made("bert-pretraining", 2)
    tuned = finetuned(CASES["bert"], a, tmp_path / "tuned")
    state = load_file(tuned / "model.safetensors")
    for name in [name for name in state if name.startswith("pooler")]:
        del state[name]
    save_file(state, tuned / "model.safetensors", {"format": "pt"})
    moved = transport(tuned, base=a, onto=b, method="random")
    assert "cls.predictions.transform.dense.weight" in moved.names(Action.KEPT)
    assert moved.config["architectures"] == ["BertForPreTraining"]


def test_a_tied_language_model_of_a_bare_base_says_what_it_is(made, tmp_path):
    import transformers

    folders = []
    for seed in (1, 2):
        bare = transformers.GPT2Model.from_pretrained(made("gpt2", seed))
        bare.save_pretrained(tmp_path / f"base-{seed}")
        folders.append(tmp_path / f"base-{seed}")
    tuned = finetuned(CASES["gpt2"], folders[0], tmp_path / "tuned")
    moved = transport(tuned, base=folders[0], onto=folders[1], method="random")
    assert moved.config["architectures"] == ["GPT2LMHeadModel"]


@pytest.mark.parametrize("residual", ["untied", "tied"])
@pytest.mark.parametrize("ties", [("tied", "untied"), ("untied", "tied")])
def test_a_fine_tune_that_unties_or_ties_its_embeddings(ties, residual, tmp_path):
    """The output has both tensors and says so, and is what the fine-tune is, whatever A and B tie."""
    import transformers

    def saved(model, folder, tie):
        config = json.loads((model / "config.json").read_text())
        state = load_file(model / "model.safetensors")
        if tie:
            state.pop("lm_head.weight", None)
        else:
            state.setdefault("lm_head.weight", state["model.embed_tokens.weight"].clone())
        folder.mkdir()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tie}))
        return folder

    base, tuned = (CASES["mistral-tied" if one == "tied" else "llama"] for one in ties)
    a = base.save(tmp_path / "a", 1)
    b = apply(align(a, a, method="random", residual="tied", seed=3), a).save(tmp_path / "b")
    changed = finetuned(base, a, tmp_path / "changed")
    tuned = saved(changed, tmp_path / "tuned", ties[1] == "tied")
    if ties[1] == "untied":
        state = load_file(tuned / "model.safetensors")
        state["lm_head.weight"] += 0.1 * torch.randn(state["lm_head.weight"].shape)
        save_file(state, tuned / "model.safetensors", {"format": "pt"})
    moved = transport(tuned, base=a, onto=b, via=align(a, b, residual=residual)).save(tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (load(moved)(ids).logits - load(tuned)(ids).logits).abs().max() < 1e-4


def test_a_head_apart_from_a_tied_embedding_is_refused_between_shapes(made, tmp_path):
    a = Model.open(made("mistral-tied", 1))
    b = Model.open(deepened(CASES["mistral-tied"].build(2)))
    tuned = Model.open(a.checkpoint.root).untied()
    with pytest.raises(MismatchError, match="lm_head.weight apart from its embedding, and .* ties them"):
        TransportPlan.planned(a, b).change(tuned)


def with_settings(model: Path, folder: Path, **changed) -> Path:
    """The same model with other settings in its config.json; null removes one."""
    shutil.copytree(model, folder)
    config = {**json.loads((model / "config.json").read_text()), **changed}
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SETTINGS = {
    "yarn": {"rope_parameters": {**YARN, "rope_theta": 10000.0}, "max_position_embeddings": 64},
    "yarn, in older keys": {
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    "activation": {"hidden_act": "gelu"},
    "epsilon": {"rms_norm_eps": 0.3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_the_fine_tune_changed_come_along(name, shuffled, aligned, tmp_path):
    """A long-context fine-tune has other rotary positions: without them its weights compute something else."""
    import transformers

    a, b = shuffled("llama")
    changed = finetuned(CASES["llama"], a, tmp_path / "changed")
    tuned = with_settings(changed, tmp_path / "tuned", **SETTINGS[name])
    notes = []

    class Noted(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    moved = transport(tuned, base=a, onto=b, via=aligned(a, b), output=tmp_path / "moved", progress=Noted())
    load = transformers.LlamaForCausalLM.from_pretrained
    ids = torch.randint(0, 31, (2, 15), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = load(tuned)(ids).logits, load(tmp_path / "moved")(ids).logits
        assert (found - wanted).abs().max() < 1e-4
        assert (load(changed)(ids).logits - wanted).abs().max() > 1e-3, "the setting does nothing"
    key = "rope_parameters" if "rope_parameters" in SETTINGS[name] else next(iter(SETTINGS[name]))
    assert key in moved.metadata()["changed_settings"]["carried"]
    assert any(key in note for note in notes)
    assert (
        load(tmp_path / "moved").config.max_position_embeddings == load(tuned).config.max_position_embeddings
    )


def test_settings_that_b_has_otherwise_are_refused_and_lengths_are_kept(shuffled, aligned, tmp_path):
    a, b = shuffled("llama")
    changed = finetuned(CASES["llama"], a, tmp_path / "changed")
    one = with_settings(changed, tmp_path / "one", rms_norm_eps=0.3, max_position_embeddings=64)
    other = with_settings(b, tmp_path / "other", rms_norm_eps=0.1)
    with pytest.raises(MismatchError, match=r"changed settings .* rms_norm_eps \(.* → 0.3; B has 0.1\)"):
        transport(one, base=a, onto=other, via=aligned(a, b))
    longer = with_settings(b, tmp_path / "longer", max_position_embeddings=96)
    moved = transport(one, base=a, onto=longer, via=aligned(a, b))
    assert moved.config["max_position_embeddings"] == 96
    assert moved.metadata()["changed_settings"]["kept"] == {"max_position_embeddings": 96}
    assert moved.config["rms_norm_eps"] == 0.3
    with pytest.raises(MismatchError, match="different settings in config.json: rms_norm_eps"):
        merge([one, with_settings(changed, tmp_path / "two")], base=a, onto=b, via=aligned(a, b))


def test_settings_that_the_library_does_not_accept_are_compared_as_they_are(shuffled, aligned, tmp_path):
    a, b = shuffled("llama")
    changed = finetuned(CASES["llama"], a, tmp_path / "changed")
    tuned = with_settings(changed, tmp_path / "tuned", pretraining_tp={"x": 2})
    assert transport(tuned, base=a, onto=b, via=aligned(a, b)).config["pretraining_tp"] == {"x": 2}


def test_a_fine_tune_with_another_number_of_heads_is_refused(shuffled, aligned, tmp_path):
    a, b = shuffled("gpt2")
    changed = finetuned(CASES["gpt2"], a, tmp_path / "changed")
    heads = json.loads((a / "config.json").read_text())["n_head"]
    tuned = with_settings(changed, tmp_path / "tuned", n_head=2 * heads if heads != 4 else 2)
    with pytest.raises(MismatchError, match=r"other settings: layer\.head \(\d+ and 4\)"):
        transport(tuned, base=a, onto=b, via=aligned(a, b))


@pytest.mark.parametrize("case", PRINCIPAL)
def test_there_and_back_returns_the_task_vector_bit_for_bit(case, made, tmp_path):
    a, b = made(case, 1), made(case, 2)
    tuned = finetuned(CASES[case], a, tmp_path / "tuned")
    pi = align(a, b, method="random", seed=5)
    under = [Model.open(m).under(pi.provenance.policy) for m in (tuned, a)]
    vector, back = TaskVector.between(*under), pi.inverse()
    for name, layout in under[1].architecture.tensors.items():
        tau = vector.difference(name)
        assert torch.equal(back.move(pi.move(tau, layout), layout), tau), name


def test_alpha_scales_the_change(shuffled, aligned, tmp_path):
    a, b = shuffled("vit-classifier")
    tuned = finetuned(CASES["vit-classifier"], a, tmp_path / "tuned")
    pi = aligned(a, b)
    whole = transport(tuned, base=a, onto=b, via=pi).state_dict()
    half = transport(tuned, base=a, onto=b, via=pi, alpha=0.5).state_dict()
    none = transport(tuned, base=a, onto=b, via=pi, alpha=0.0).state_dict()
    target = Model.open(b).checkpoint
    for name, value in whole.items():
        own = target.read(name)
        assert torch.equal(none[name], own)
        assert torch.allclose(half[name] - own, (value - own) / 2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_output_has_the_type_asked_for(dtype, shuffled, tmp_path):
    a, b = shuffled("llama")
    tuned = finetuned(CASES["llama"], a, tmp_path / "tuned")
    transport(tuned, base=a, onto=b, method="naive", dtype=dtype).save(tmp_path / "moved")
    assert {info.dtype for info in Model.open(tmp_path / "moved").checkpoint.tensors.values()} == {dtype}
    import transformers

    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "moved", dtype="auto")
    assert loaded.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_type_can_be_moved(dtype, made, tmp_path):
    import transformers

    folders = {}
    for role, seed in (("a", 1), ("b", 2), ("tuned", 1)):
        model = transformers.LlamaForCausalLM.from_pretrained(made("llama", seed)).to(dtype)
        if role == "tuned":
            model.model.norm.weight.data *= 1.5
        model.save_pretrained(tmp_path / role)
        folders[role] = tmp_path / role
    bases = {"base": folders["a"], "onto": folders["b"], "residual": "fixed", "force_unrelated": True}
    state = transport(folders["tuned"], **bases).state_dict()
    assert {value.dtype for value in state.values()} == {dtype}
    own = Model.open(folders["b"]).checkpoint.read("model.norm.weight").double()
    was = Model.open(folders["a"]).checkpoint.read("model.norm.weight").double()
    tolerance = {torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    assert torch.allclose(state["model.norm.weight"].double(), own + 0.5 * was, atol=tolerance)


def test_sharded_models_keep_their_shards(made, tmp_path):
    import transformers

    folders = {}
    for role, seed in (("a", 1), ("b", 2)):
        model = transformers.LlamaForCausalLM.from_pretrained(made("llama", seed))
        model.save_pretrained(tmp_path / role, max_shard_size="20KB")
        folders[role] = tmp_path / role
    tuned = finetuned(CASES["llama"], folders["a"], tmp_path / "tuned")
    (folders["b"] / "tokenizer_config.json").write_text('{"b": 1}')
    transport(tuned, base=folders["a"], onto=folders["b"], method="random").save(tmp_path / "moved")

    def shards(folder):
        return sorted(path.name for path in folder.glob("*.safetensors"))

    assert len(shards(folders["b"])) > 2
    assert shards(tmp_path / "moved") == shards(folders["b"])
    index = "model.safetensors.index.json"
    placed = [json.loads((f / index).read_text())["weight_map"] for f in (folders["b"], tmp_path / "moved")]
    assert placed[0] == placed[1]
    assert (tmp_path / "moved" / "tokenizer_config.json").read_text() == '{"b": 1}'
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "moved")


def test_pickles_come_out_as_safetensors_that_the_library_loads(made, tmp_path):
    import transformers

    folders = {}
    for role, seed in (("a", 1), ("b", 2)):
        folder = tmp_path / role
        folder.mkdir()
        source = made("gpt2", seed)
        model = transformers.GPT2LMHeadModel.from_pretrained(source)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")  # ties stored twice, as of old
        (folder / "config.json").write_text((source / "config.json").read_text())
        folders[role] = folder
    tuned = finetuned(CASES["gpt2"], made("gpt2", 1), tmp_path / "tuned")
    pi = align(folders["a"], folders["b"], method="random", residual="tied")
    moved = transport(tuned, base=folders["a"], onto=folders["b"], via=pi).save(tmp_path / "moved")
    assert (moved / "model.safetensors").exists()
    assert "lm_head.weight" not in Model.open(moved).checkpoint.tensors, "tied tensors are stored once"
    loaded = transformers.GPT2LMHeadModel.from_pretrained(moved)
    assert torch.equal(loaded.lm_head.weight, loaded.transformer.wte.weight)


def test_a_single_file_can_be_written(made, tmp_path):
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    tuned = finetuned(CASES["vit-classifier"], a, tmp_path / "tuned")
    moved = transport(tuned, base=a, onto=b, method="random")
    path = moved.save(tmp_path / "moved.safetensors")
    assert Model.open(path, config=b / "config.json").checkpoint.tensors.keys() == moved.state_dict().keys()


def test_open_clip_loads_the_output(shuffled, aligned, tmp_path):
    import open_clip

    a, b = shuffled("open_clip")
    tuned = finetuned(CASES["open_clip"], a, tmp_path / "tuned")
    moved = transport(tuned, base=a, onto=b, via=aligned(a, b)).save(tmp_path / "moved")
    loaded = open_clip.create_model(f"local-dir:{moved}")
    stored = Model.open(moved).checkpoint
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, stored.read(name)), name


def test_names_of_the_live_modules_are_names_of_the_same_tensors(made, tmp_path):
    """transformers 5 calls ViT's tensors otherwise in memory than on disk; both are one model."""
    import transformers
    from safetensors.torch import save_file

    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    tuned = finetuned(CASES["vit-classifier"], a, tmp_path / "tuned")
    live = transformers.ViTForImageClassification.from_pretrained(tuned)
    (tmp_path / "raw").mkdir()
    save_file(live.state_dict(), tmp_path / "raw" / "model.safetensors")
    (tmp_path / "raw" / "config.json").write_text((tuned / "config.json").read_text())
    assert set(live.state_dict()) != set(Model.open(tuned).checkpoint.tensors)
    pi = align(a, b, method="random")
    one = transport(tuned, base=a, onto=b, via=pi).state_dict()
    two = transport(tmp_path / "raw", base=a, onto=b, via=pi).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_values_that_a_type_cannot_hold_are_refused(made, tmp_path):
    tuned = finetuned(CASES["vit"], made("vit", 1), tmp_path / "tuned")
    moved = transport(
        tuned, base=made("vit", 1), onto=made("vit", 2), alpha=1e6, dtype="float16", method="naive"
    )
    with pytest.raises(OutputError, match="has values that float16 cannot hold"):
        moved.save(tmp_path / "moved")
    assert not (tmp_path / "moved").exists()


# ── refusals ─────────────────────────────────────────────────────────────────────────────────


def test_a_fine_tune_of_another_base_is_refused(made, tmp_path):
    tuned = finetuned(CASES["llama"], made("llama", 2), tmp_path / "tuned")
    bases = {"base": made("llama", 1), "onto": made("llama", 2), "method": "naive"}
    with pytest.raises(MismatchError, match="does not look like a fine-tune of") as caught:
        transport(tuned, **bases)
    assert "`trust_base=True`" in str(caught.value.hint)
    transport(tuned, **bases, trust_base=True)


def test_a_fine_tune_of_another_size_is_refused(made, tmp_path):
    from functools import partial

    from small_models import LLAMA, Case, transformers_model

    bigger = partial(transformers_model, "LlamaForCausalLM", "LlamaConfig", **{**LLAMA, "vocab_size": 33})
    tuned = Case("llama", bigger, "llama").save(tmp_path / "tuned", 1)
    with pytest.raises(MismatchError, match=r"2 token\(s\) more .* embed_tokens.weight has shape \(33, 36\)"):
        transport(tuned, base=made("llama", 1), onto=made("llama", 2), method="naive")
    fewer = partial(transformers_model, "LlamaForCausalLM", "LlamaConfig", **{**LLAMA, "vocab_size": 30})
    tuned = Case("llama", fewer, "llama").save(tmp_path / "fewer", 1)
    with pytest.raises(MismatchError, match=r"embed_tokens.weight has shape \(30, 36\)") as caught:
        transport(tuned, base=made("llama", 1), onto=made("llama", 2), new_tokens="keep", method="naive")
    assert "rearranged its vocabulary" in str(caught.value.hint)


def test_a_fine_tune_of_another_family_is_refused(made):
    with pytest.raises(MismatchError, match="is a bert and its base .* a vit"):
        transport(made("bert"), base=made("vit", 1), onto=made("vit", 2))


def test_a_fine_tune_that_equals_its_base_is_refused_and_nothing_is_written(made, tmp_path):
    moved = transport(made("vit", 1), base=made("vit", 1), onto=made("vit", 2), method="naive")
    with pytest.raises(MismatchError, match="there is nothing to move"):
        moved.save(tmp_path / "moved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -0.5])
def test_an_alpha_that_makes_no_sense_is_refused(alpha, made):
    with pytest.raises(SettingError, match="must be a number of at least 0"):
        transport(made("vit", 1), base=made("vit", 1), onto=made("vit", 2), alpha=alpha, method="naive")


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ({"dtype": "int8", "method": "naive"}, "dtype = int8 is not a choice"),
        ({"residual": "loose"}, "residual = 'loose' is not a choice"),
        ({"inner": "loose"}, "inner = 'loose' is not a choice"),
        ({"seed": -1}, "a seed cannot be negative"),
        ({"resources": Resources(device="moon")}, "device 'moon' cannot be used here"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, shown, made):
    with pytest.raises(SettingError, match=shown):
        transport(made("vit", 1), base=made("vit", 1), onto=made("vit", 2), **setting)


def test_a_pi_of_other_weights_is_refused(made, tmp_path):
    a, b, other = made("vit", 1), made("vit", 2), made("vit", 3)
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    pi = align(a, b, method="random")
    with pytest.raises(
        AlignmentError, match=r"was made for the weights of .*vit-2 .*vit-3 has other weights"
    ):
        transport(tuned, base=a, onto=other, via=pi)
    with pytest.raises(AlignmentError, match=r"was made from the weights of"):
        transport(tuned, base=other, onto=b, via=pi, trust_base=True)


@pytest.fixture
def occupied(made, tmp_path):
    """A transport, and a place that an older model occupies."""
    a, b = made("vit", 1), made("vit", 2)
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    old = written_by_us(tmp_path / "moved", {"config.json": "{}", "old": "output"})
    return transport(tuned, base=a, onto=b, method="naive"), old


def test_an_output_that_exists_is_kept_unless_forced(occupied):
    moved, place = occupied
    with pytest.raises(OutputError, match="exists already") as caught:
        moved.save(place)
    assert "`force=True`" in str(caught.value.hint)
    assert (place / "old").read_text() == "output"
    moved.save(place, force=True)
    assert not (place / "old").exists()
    assert (place / "model.safetensors").exists()
    moved.save(place, force=True)  # its own output is known again


@pytest.mark.parametrize("marker", ["ours", "absent", "damaged", "odd", "of a model"])
def test_force_deletes_nothing_that_this_program_did_not_write(marker, occupied):
    moved, place = occupied
    (place / "notes").mkdir()
    (place / "notes" / "thesis.tex").write_text("mine")
    details = {"damaged": "{", "odd": '{"contents": [3]}', "of a model": '{"contents": "thesis.tex"}'}
    if marker == "absent":
        (place / "transfusion.json").unlink()
    elif marker in details:
        (place / "transfusion.json").write_text(details[marker])
    with pytest.raises(OutputError, match=r"did not write, and is not replaced: .*thesis\.tex"):
        moved.save(place, force=True)
    assert (place / "notes" / "thesis.tex").read_text() == "mine"


def test_force_does_not_replace_what_is_neither_a_file_nor_a_folder(occupied, tmp_path):
    moved, _ = occupied
    os.mkfifo(pipe := tmp_path / "moved.safetensors")
    with pytest.raises(OutputError, match="not a regular file"):
        moved.save(pipe, force=True)
    assert pipe.is_fifo()
    with pytest.raises(OutputError, match="not a regular file"):
        moved.pi.save("/dev/null", force=True)


def test_an_interrupted_run_leaves_the_old_output_whole(occupied, tmp_path):
    moved, place = occupied

    def interrupt(name: str) -> None:
        if "layer.2" in name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moved.save(place, force=True, on_tensor=interrupt)
    assert sorted(path.name for path in place.iterdir()) == ["config.json", "old", "transfusion.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "tuned"]


def test_an_unwritable_place_is_refused_before_any_work(made, tmp_path):
    a, b = made("vit", 1), made("vit", 2)
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        transport(tuned, base=a, onto=b, method="naive").save(tmp_path / "file" / "moved")


def test_applying_an_untied_pi_is_refused_with_the_reason(made):
    pi = align(made("vit"), made("vit"), method="random", residual="untied")
    with pytest.raises(AlignmentError, match="different maps before and after 6 shortcut") as caught:
        apply(pi, made("vit"))
    assert '`residual="tied"`' in str(caught.value.hint)


def test_applying_to_other_weights_is_refused(made, tmp_path):
    pi = align(made("vit"), made("vit"), method="random", residual="tied")
    with pytest.raises(AlignmentError, match="was made from the weights of"):
        apply(pi, made("vit", 2)).save(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_sums_in_place_have_the_bits_of_plain_sums_and_leave_shared_tensors_alone(dtype):
    """Tensors in memory are shared with the user's model."""
    generator = torch.Generator().manual_seed(0)
    a, tuned, b = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(3))
    before = [one.clone() for one in (a, tuned, b)]
    change = added(tuned, a, -1)
    assert torch.equal(change, wide(tuned) - wide(a))
    assert torch.equal(added(b, change), wide(b) + change)
    assert torch.equal(added(b, change.double()), wide(b) + change.double())
    assert all(torch.equal(one, was) for one, was in zip((a, tuned, b), before, strict=True))


def test_buffers_that_older_libraries_stored_are_written_as_they_are(made, tmp_path):
    """As in most checkpoints of BERT on the hub."""
    a, b = made("bert", 1), made("bert", 2)
    folders = {"a": a, "b": b, "tuned": finetuned(CASES["bert"], a, tmp_path / "plain")}
    name, rows = "embeddings.position_ids", torch.arange(7)[None]
    for place, folder in folders.items():
        shutil.copytree(folder, tmp_path / place)
        file = tmp_path / place / "model.safetensors"
        save_file({**load_file(file), name: rows}, file, {"format": "pt"})
    bases = {"base": tmp_path / "a", "onto": tmp_path / "b"}
    transport(tmp_path / "tuned", **bases, force_unrelated=True, output=tmp_path / "moved")
    assert torch.equal(load_file(tmp_path / "moved" / "model.safetensors")[name], rows)
