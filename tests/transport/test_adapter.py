"""LoRA in, LoRA out: same rank, same keys, loaded by PEFT itself."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, often
from transfusion.errors import AdapterError, ArchitectureError, CheckpointError, OutputError
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.running.probes.inputs import random_inputs, run_model
from transfusion.transport.apply import apply
from transfusion.transport.outcome import outcome_of
from transfusion.transport.output import Output
from transfusion.transport.transport import transport

TARGETS = {
    "vit-classifier": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
    "clip": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "text_projection"],
    "open_clip": ["c_fc", "c_proj"],
    "bert-pretraining": ["query", "key", "value", "dense", "word_embeddings"],
    "gpt2": ["c_attn", "c_proj", "c_fc", "wpe"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    "mistral-tied": ["q_proj", "v_proj", "down_proj", "embed_tokens"],
}


def train_adapter(base: Path, folder: Path, targets: list[str], **settings: object) -> torch.nn.Module:
    """An adapter as PEFT makes it on the live model, with factors that do something."""
    import peft

    module = LiveModel.of(Model.open(base)).module.float()
    # a transposed layer (Conv1D) is set right by PEFT itself, module by module
    tuned = peft.get_peft_model(
        module, peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, **settings)
    )
    generator = torch.Generator().manual_seed(2)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    tuned.save_pretrained(folder)
    return tuned.eval()


def outputs_with(adapter: Path, base: Path) -> dict[str, torch.Tensor]:
    """What a base computes with an adapter that PEFT loaded onto it."""
    import peft

    model = Model.open(base)
    loaded = peft.PeftModel.from_pretrained(LiveModel.of(model).module.float(), adapter).double().eval()
    return run_model(loaded.get_base_model(), model.family, random_inputs(model.family, model.config))


# PEFT warns that Conv1D is transposed, and that embeddings and tied weights are being adapted.
@pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out", "ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word"
)
@pytest.mark.parametrize("residual", often(["untied", "tied"], ["untied"]))  # tied: test_adapter_kinds
@pytest.mark.parametrize("case", TARGETS)
def test_a_moved_adapter_does_on_b_what_it_did_on_a(case, residual, shuffled, aligned, tmp_path):
    a, b = shuffled(case)
    train_adapter(a, tmp_path / "adapter", TARGETS[case])
    pi = aligned(a, b, residual=residual)
    moved = transport(tmp_path / "adapter", base=a, onto=b, via=pi)
    assert isinstance(moved, Output)
    moved.save(tmp_path / "moved")
    under = Model.open(a).under(pi.provenance.policy)
    live = LiveModel.of(under)
    wanted = live.expected(pi, outputs_with(tmp_path / "adapter", a))
    assert largest_difference(wanted, outputs_with(tmp_path / "moved", b)) < 1e-5
    assert largest_difference(wanted, LiveModel.of(Model.open(b)).outputs()) > 1e-3, "the adapter did nothing"
    was, is_now = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "moved"))
    assert {key: value.shape for key, value in was.items()} == {k: v.shape for k, v in is_now.items()}


def test_adapters_made_with_older_names_are_the_same_adapters(shuffled, tmp_path):
    """transformers 4 called ViT's modules in memory as its files still do."""
    a, b = shuffled("vit-classifier")
    train_adapter(a, tmp_path / "adapter", ["q_proj", "fc1"])
    older = {
        "vit.layers.": "vit.encoder.layer.",
        ".attention.q_proj.": ".attention.attention.query.",
        ".mlp.fc1.": ".intermediate.dense.",
    }

    def rename(tensors):
        for key in list(tensors):
            old = key
            for now, before in older.items():
                old = old.replace(now, before)
            tensors[old] = tensors.pop(key)

    pi = align(a, b)
    new = transport(tmp_path / "adapter", base=a, onto=b, via=pi).state_dict()
    old = transport(rewrite(tmp_path / "adapter", rename), base=a, onto=b, via=pi).state_dict()
    assert not new.keys() & old.keys()
    rename(new)
    assert new.keys() == old.keys()
    assert all(torch.equal(new[key], old[key]) for key in new)


DELTA_NETS = ["qwen3_5", "qwen3_5_moe", "qwen3_5-vision", "qwen3_5_moe-vision"]


@pytest.mark.parametrize("case", often(DELTA_NETS, DELTA_NETS[:1]))
def test_parts_of_a_delta_net_may_have_an_adapter_each(case, shuffled, aligned, tmp_path):
    """Queries, keys and values apart, as some trainers have them, do what one adapter on all three does."""
    a, b = shuffled(case)
    whole = {"rank_pattern": {"in_proj_qkv": 9}, "alpha_pattern": {"in_proj_qkv": 15}}
    targets = [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    train_adapter(a, tmp_path / "whole", targets, **whole)
    sizes = {id.rpartition(".")[2]: size for id, size in Model.open(a).architecture.sizes.items()}
    rows = [sizes["key"] * one for one in (sizes["dqk"], sizes["dqk"], sizes["value"] * sizes["dvo"])]
    apart: dict[str, torch.Tensor] = {}

    def divide(tensors):
        """Keep what each part's own three columns give."""
        for name in [one for one in tensors if "in_proj_qkv.lora_B" in one]:
            other = name.replace("lora_B", "lora_A")
            ups = [up[:, 3 * n : 3 * n + 3] for n, up in enumerate(tensors[name].split(rows))]
            for part, up, down in zip("qkv", ups, tensors[other].split(3), strict=True):
                apart[name.replace("qkv", part)] = up.contiguous()
                apart[other.replace("qkv", part)] = down.contiguous()
            tensors[name] = torch.block_diag(*ups)
        apart.update({name: one for name, one in tensors.items() if "in_proj_qkv" not in name})

    shutil.copytree(rewrite(tmp_path / "whole", divide), tmp_path / "apart")
    save_file(apart, tmp_path / "apart" / "adapter_model.safetensors")
    config = tmp_path / "apart" / "adapter_config.json"
    plain = {
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": [f"in_proj_{one}" for one in "qkvzba"],
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | plain))
    moving = partial(transport, base=a, onto=b, via=aligned(a, b, residual="tied"))
    moved = moving(tmp_path / "apart").state_dict()
    assert {key: one.shape for key, one in moved.items()} == {key: one.shape for key, one in apart.items()}
    wanted, found = (moving(tmp_path / one, full=True).state_dict() for one in ("whole", "apart"))
    target = Model.open(b).checkpoint
    changed = {name for name, one in wanted.items() if not torch.equal(one, target.read(name))}
    assert {name.rpartition("linear_attn.")[2] for name in changed} == {f"{one}.weight" for one in targets}
    assert all(torch.allclose(one, found[name], atol=1e-5) for name, one in wanted.items())


def test_only_base_and_revision_change_in_the_configuration(shuffled, tmp_path):
    a, b = shuffled("llama")
    train_adapter(a, tmp_path / "adapter", ["q_proj"])
    transport(tmp_path / "adapter", base=a, onto=b, method="naive").save(tmp_path / "moved")
    was, now = (json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("adapter", "moved"))
    assert now["base_model_name_or_path"] == str(b)
    assert {key for key in was if was[key] != now[key]} <= {"base_model_name_or_path", "revision"}


def test_the_base_is_recorded_as_it_was_typed(shuffled, tmp_path, monkeypatch):
    """A relative path stays one, as PEFT records it, so that a folder with models and adapters can move."""
    a, b = shuffled("llama")
    train_adapter(a, tmp_path / "adapter", ["q_proj"])
    (tmp_path / "bases").symlink_to(b.parent)
    monkeypatch.chdir(tmp_path)
    transport("adapter", base=a, onto=f"bases/{b.name}", method="naive").save("moved")
    config = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"bases/{b.name}"


def test_inspect_describes_an_adapter_and_tries_it_on_a_base(made, tmp_path, cli):
    a = made("llama")
    train_adapter(a, tmp_path / "adapter", ["q_proj", "down_proj"], task_type="CAUSAL_LM")
    code, told, _ = cli("inspect", tmp_path / "adapter", "--json")
    about = json.loads(told)
    blocks = Model.open(a).config["num_hidden_layers"]
    assert code == 0
    assert (about["kind"], about["task"], about["alpha"]) == ("LORA", "CAUSAL_LM", 5)
    assert about["ranks"] == {"3": 2 * blocks}
    assert about["kinds_of_modules"] == {"mlp.down_proj": blocks, "self_attn.q_proj": blocks}
    code, told, _ = cli("inspect", tmp_path / "adapter", "--with", a)
    assert code == 0
    assert f"fits {a}" in " ".join(told.split())
    code, told, _ = cli("inspect", tmp_path / "adapter", "--with", made("gpt2"))
    assert code == 0
    assert f"fits not {made('gpt2')}: " in " ".join(told.split())
    transport(tmp_path / "adapter", base=a, onto=made("llama", 2), method="naive").save(tmp_path / "moved")
    moved = json.loads(cli("inspect", tmp_path / "moved", "--json")[1])
    assert moved["fits"] == {"base": str(made("llama", 2)), "fits": True, "reason": None}
    assert moved["moved_onto"]["name"] == str(made("llama", 2))


def test_alpha_scales_one_factor_of_each_pair(shuffled, tmp_path):
    a, b = shuffled("llama")
    train_adapter(a, tmp_path / "adapter", ["q_proj"])
    pi = align(a, b)
    whole = transport(tmp_path / "adapter", base=a, onto=b, via=pi).state_dict()
    half = transport(tmp_path / "adapter", base=a, onto=b, via=pi, alpha=0.5).state_dict()
    for key in whole:
        factor = 0.5 if "lora_B" in key else 1.0
        assert torch.allclose(half[key], factor * whole[key])


def test_a_head_trained_beside_the_adapter_is_carried_over(made, tmp_path):
    """The base has no classifier; the adapter brings one, and its input axis moves."""
    a = made("bert")
    move = align(a, a, method="random", residual="tied", seed=3)
    b = apply(move, a).save(tmp_path / "b")
    head = CASES["bert-classifier"]
    whole = {}
    for role, base in (("a", a), ("b", b)):  # the same classes on top of both bases
        module = head.build(9)
        module.bert.load_state_dict(
            {n: Model.open(base).checkpoint.read(n) for n in module.bert.state_dict()}
        )
        whole[role] = head.store(module, tmp_path / f"{role}-with-head")
    train_adapter(
        whole["a"], tmp_path / "adapter", ["query"], modules_to_save=["classifier"], task_type="SEQ_CLS"
    )
    moved = transport(tmp_path / "adapter", base=a, onto=b, residual="tied")
    moved.save(tmp_path / "moved")
    assert moved.metadata()["carried"] == ["classifier.bias", "classifier.weight"]
    line = outcome_of(moved.metadata(), str(tmp_path / "moved")).load
    exec(line, pasted := {})
    expected, found = (
        load_file(tmp_path / "moved" / "adapter_model.safetensors"),
        pasted["model"].state_dict(),
    )
    for name in ("weight", "bias"):
        own = found[f"base_model.model.classifier.modules_to_save.default.{name}"]
        assert torch.equal(own, expected[f"base_model.model.classifier.{name}"]), "B has no such head itself"
    assert (
        largest_difference(
            outputs_with(tmp_path / "adapter", whole["a"]), outputs_with(tmp_path / "moved", whole["b"])
        )
        < 1e-5
    )


def test_a_token_head_reads_the_stream_and_not_the_pooler(made, tmp_path):
    a, b = made("bert", 1), made("bert", 2)
    module = CASES["bert-tokens"].build(9)
    CASES["bert-tokens"].store(module, tmp_path / "with-head")
    train_adapter(tmp_path / "with-head", tmp_path / "adapter", ["query"], modules_to_save=["classifier"])
    moved = transport(tmp_path / "adapter", base=a, onto=b, force_unrelated=True)
    (weight,) = (factor for factor in moved.moved_adapter.factors if factor.tensor == "classifier.weight")
    assert str(weight.layout) == "label <- layer.3.x"


def test_a_whole_tensor_that_both_bases_have_moves_as_a_change(shuffled, tmp_path):
    a, b = shuffled("llama")
    train_adapter(a, tmp_path / "adapter", ["q_proj"], modules_to_save=["lm_head"])
    state = transport(tmp_path / "adapter", base=a, onto=b, method="naive", alpha=0.0).state_dict()
    assert torch.equal(
        state["base_model.model.lm_head.weight"], Model.open(b).checkpoint.read("lm_head.weight")
    )


# ── refusals ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def adapter(made, tmp_path) -> Path:
    train_adapter(made("llama"), tmp_path / "adapter", ["q_proj"])
    return tmp_path / "adapter"


def edit(adapter: Path, **settings: object) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return adapter


def rewrite(adapter: Path, change) -> Path:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return adapter


def move(adapter: Path, made, case: str = "llama"):
    moved = transport(adapter, base=made(case, 1), onto=made(case, 2), method="naive")
    return moved.state_dict()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("BOFT", "it acts on blocks of neighbouring units"),
        ("RANDLORA", "it scales random projections"),
        ("FOURIERFT", "coefficients of a transform over the order of the units"),
    ],
)
def test_kinds_that_cannot_be_moved_are_refused_with_the_reason(kind, reason, adapter, made):
    with pytest.raises(AdapterError, match=f"adapters of kind {kind} cannot be moved: .*{reason}") as refusal:
        move(edit(adapter, peft_type=kind), made)
    assert "merge the adapter into its base" in str(refusal.value)


def test_factors_in_another_type_are_refused(adapter, made):
    def as_integers(tensors):
        tensors.update({key: value.to(torch.int8) for key, value in tensors.items()})

    with pytest.raises(AdapterError, match="is stored in a type that cannot be moved"):
        move(rewrite(adapter, as_integers), made)


@pytest.mark.parametrize(
    ("config", "kind", "hint"),
    [
        ({"mh_adapter": False, "reduction_factor": 16}, "bottleneck", "train it again on B"),
        ({"architecture": "lora", "r": 8}, "lora", "call merge_adapter and save the model"),
    ],
)
def test_adapters_of_another_library_are_named(config, kind, hint, tmp_path, made):
    folder = tmp_path / "of-adapters"
    folder.mkdir()
    about = {"config": config, "hidden_size": 24, "model_type": "llama", "name": "mine", "version": "1.2"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    torch.save({"layers.0.adapters.mine.adapter_up.weight": torch.ones(2, 2)}, folder / "pytorch_adapter.bin")
    with pytest.raises(AdapterError, match=rf"of the library `adapters` \('{kind}'\)") as refusal:
        move(folder, made)
    assert hint in str(refusal.value)


def test_an_unknown_kind_is_refused_with_those_that_move(adapter, made):
    with pytest.raises(AdapterError, match="adapters of kind NEXT_YEAR are not known") as refusal:
        move(edit(adapter, peft_type="NEXT_YEAR"), made)
    assert "known kinds: LORA, ADALORA" in str(refusal.value)


def test_every_kind_of_peft_is_known_or_refused():
    import peft

    from transfusion.transport.adapters.kinds import KINDS, REFUSED

    assert not KINDS.keys() & REFUSED.keys()
    assert {kind.value for kind in peft.PeftType} <= KINDS.keys() | REFUSED.keys()


def test_dora_without_its_magnitudes_is_refused(adapter, made):
    with pytest.raises(AdapterError, match="lora_A, lora_B without lora_magnitude_vector"):
        move(edit(adapter, use_dora=True), made)


@pytest.mark.parametrize("settings", [{"r": 5}, {"rank_pattern": {"q_proj": 5}}])
def test_a_rank_that_the_configuration_does_not_promise_is_refused(settings, adapter, made):
    with pytest.raises(AdapterError, match="q_proj has rank 3, and the configuration says 5"):
        move(edit(adapter, **settings), made)


@pytest.mark.parametrize("settings", [{"r": 0}, {"r": "three"}, {"rank_pattern": {"(": 5}}])
def test_settings_without_sense_are_refused(settings, adapter, made):
    with pytest.raises(AdapterError, match=r"adapter_config\.json: (r|rank_pattern): "):
        move(edit(adapter, **settings), made)


def test_a_target_module_without_tensors_is_refused(adapter, made):
    with pytest.raises(AdapterError, match="missing target module: the configuration names v_proj, and"):
        move(edit(adapter, target_modules=["q_proj", "v_proj"]), made)


def test_target_modules_that_only_other_models_have_do_not_matter(adapter, made):
    assert move(edit(adapter, target_modules=["q_proj", "query_key_value"]), made)


def test_another_revision_of_the_base_is_noted_and_not_refused(adapter, made, monkeypatch):
    edit(adapter, base_model_name_or_path="org/name", revision="v1")
    a, b = made("llama", 1), made("llama", 2)
    pi = align(a, b, method="naive")
    assert transport(adapter, base=a, onto=b, via=pi).notes == []
    monkeypatch.setattr(Model, "label", "org/name@v2")
    moved = transport(adapter, base=a, onto=b, via=pi)
    assert moved.notes == [f"{adapter} was trained on revision v1 of org/name, and the base is v2"]
    assert moved.state_dict()


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_starts_that_change_the_base_are_refused(start, adapter, made):
    with pytest.raises(AdapterError, match=f"initialised by '{start}', which changes the base's weights"):
        move(edit(adapter, init_lora_weights=start), made)


def test_values_that_are_no_numbers_are_refused(adapter, made):
    def spoil(tensors):
        next(iter(tensors.values()))[0] = float("nan")

    with pytest.raises(CheckpointError, match="contains NaN or infinite values"):
        move(rewrite(adapter, spoil), made)


def test_an_adapter_is_not_written_as_a_file(adapter, made, tmp_path):
    moved = transport(adapter, base=made("llama", 1), onto=made("llama", 2), method="naive")
    with pytest.raises(OutputError, match="an adapter is a folder"):
        moved.save(tmp_path / "moved.safetensors")


def test_the_weights_of_an_adapter_are_no_model(adapter):
    with pytest.raises(CheckpointError, match="these are the weights of an adapter"):
        Model.open(adapter / "adapter_model.safetensors")


def test_an_unknown_setting_is_refused(adapter, made):
    with pytest.raises(AdapterError, match="use_next_years_trick=7"):
        move(edit(adapter, use_next_years_trick=7), made)


def test_an_adapter_of_another_size_is_refused(adapter, made):
    def widen(tensors):
        for key in tensors:
            if key.endswith("lora_A.weight"):
                tensors[key] = torch.zeros(3, 40)

    with pytest.raises(
        AdapterError, match=r"has shape \(3, 40\), and on this base '_ <- layer.0.x' is \(3, 36\)"
    ):
        move(rewrite(adapter, widen), made)


def test_an_adapter_of_another_family_is_refused(adapter, made):
    with pytest.raises(AdapterError, match=r"which the base does not have"):
        move(adapter, made, "bert")


def test_factors_of_different_ranks_are_refused(adapter, made):
    def cut(tensors):
        key = next(key for key in tensors if key.endswith("lora_A.weight"))
        tensors[key] = tensors[key][:2].clone()

    with pytest.raises(AdapterError, match="has rank 2 in lora_A and 3 in lora_B"):
        move(rewrite(adapter, cut), made)


def test_a_part_that_the_kind_does_not_have_is_refused(adapter, made):
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.bias"
    with pytest.raises(AdapterError, match=r"lora_A\.bias is no part of a LORA adapter"):
        move(rewrite(adapter, lambda tensors: tensors.update({key: torch.zeros(3)})), made)


def test_a_file_without_the_adapter_is_refused(adapter, made):
    with pytest.raises(AdapterError, match="the file has no tensor of a LORA adapter"):
        move(rewrite(adapter, dict.clear), made)


def test_a_lonely_factor_is_refused(adapter, made):
    def drop(tensors):
        tensors.pop(next(key for key in tensors if key.endswith("lora_A.weight")))

    with pytest.raises(AdapterError, match="has lora_B without lora_A"):
        move(rewrite(adapter, drop), made)


def test_an_adapter_on_a_norm_is_refused(adapter, made):
    def onto_norm(tensors):
        for key in list(tensors):
            tensors[key.replace("self_attn.q_proj", "input_layernorm")] = tensors.pop(key)

    with pytest.raises(AdapterError, match="is not a linear map"):
        move(rewrite(adapter, onto_norm), made)


def test_a_stray_tensor_is_refused(adapter, made):
    with pytest.raises(ArchitectureError, match="the table does not know: mystery.weight"):
        move(rewrite(adapter, lambda t: t.update({"base_model.model.mystery.weight": torch.zeros(2)})), made)


def test_an_adapter_without_weights_is_refused(adapter, made):
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="without adapter_model.safetensors"):
        move(adapter, made)


def test_an_adapter_given_as_a_base_is_refused(adapter, made):
    with pytest.raises(CheckpointError, match="this is an adapter, not a model"):
        Model.open(adapter)
    shutil.rmtree(adapter)


def test_an_adapter_on_a_part_of_a_fused_tensor_moves_with_that_part(made, tmp_path):
    """transformers 5 keeps DINOv2's gate and up apart in memory, and as one tensor in files."""
    a = made("dinov2-gated")
    shuffle = align(a, a, method="random", residual="tied", seed=3)
    b = apply(shuffle, a).save(tmp_path / "b")
    train_adapter(a, tmp_path / "adapter", ["gate_proj", "up_proj", "down_proj"])
    transport(tmp_path / "adapter", base=a, onto=b, via=align(a, b, residual="tied")).save(tmp_path / "moved")
    model = Model.open(a).under(shuffle.provenance.policy)
    wanted = LiveModel.of(model).expected(shuffle, outputs_with(tmp_path / "adapter", a))
    assert largest_difference(wanted, outputs_with(tmp_path / "moved", b)) < 1e-5
