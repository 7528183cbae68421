"""Mixtures of experts: what files keep in pieces moves as one, from name to name."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned, often
from transfusion.errors import AdapterError, ArchitectureError
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
FIRST = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


def shuffled(a: Path, b: Path, seed: int = 3):
    """B made from A by a random exact move, and the move."""
    planted = align(a, a, method="random", residual="tied", seed=seed)
    return planted, apply(planted, a).save(b)


def in_shards(case: str, source: Path, folder: Path) -> Path:
    """The same model in files so small that the experts of one block lie in several."""
    import transformers

    model = getattr(transformers, type(CASES[case].make()).__name__).from_pretrained(source)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def placed(folder: Path) -> dict[str, str]:
    """The file of every tensor of a folder with shards."""
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def spread(folder: Path) -> int:
    """In how many files the largest stack of a folder lies."""
    model = Model.open(folder)
    return max(len({placed(folder)[n] for n in s.names}) for s in model.names.values())


@pytest.mark.parametrize(
    ("case", "residual"),
    often(product(MIXTURES, ["untied", "tied"]), [("mixtral", "untied"), ("qwen2_moe", "tied")]),
)
def test_experts_are_recovered_where_they_were_planted(case, residual, made, tmp_path):
    a = made(case)
    planted, b = shuffled(a, tmp_path / "b")
    found = align(a, b, residual=residual, advice=False)
    assert not planted.maps["layer.0.expert"].is_identity()
    assert planted.maps["layer.0.ffn"].blocks == 5
    for id, map_ in found.maps.items():
        on_stream = id.endswith((".x", ".y", ".stream"))
        assert map_ == planted.maps["layer.stream" if on_stream else id], id
    assert {"layer.2.expert", "layer.2.ffn"} <= found.maps.keys()


@pytest.mark.parametrize("residual", often(["untied", "tied"], ["untied"]))
def test_experts_are_recovered_under_noise(residual, tmp_path):
    """From the library's own initial weights, in a model with more experts than any other case."""
    from functools import partial

    from small_models import Case, transformers_model

    torch.manual_seed(0)
    settings = {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12}
    settings |= {"moe_intermediate_size": 50, "num_experts": 16, "num_experts_per_tok": 4}
    settings |= {"num_hidden_layers": 4, "vocab_size": 300}
    make = partial(transformers_model, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **settings)
    case = Case("qwen3_moe", make, "qwen3_moe")
    a = case.store(case.make(), tmp_path / "a")
    planted, b = shuffled(a, tmp_path / "b")
    state = load_file(b / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, value in state.items():
        noise = value.std(unbiased=False) * torch.randn(value.shape, generator=generator)
        state[name] = value + 0.3 * noise
    save_file(state, b / "model.safetensors", {"format": "pt"})
    for id, map_ in align(a, b, residual=residual, advice=False).maps.items():
        on_stream = id.endswith((".x", ".y", ".stream"))
        assert map_ == planted.maps["layer.stream" if on_stream else id], id


@pytest.mark.parametrize(
    ("case", "residual", "sharded"),
    often(
        product(MIXTURES, ["untied", "tied"], [False, True]),
        [("mixtral", "untied", False), ("qwen2_moe", "tied", True), ("qwen3_moe", "untied", True)],
    ),
)
def test_a_planted_truth_arrives_whole(case, residual, sharded, made, tmp_path):
    """B + π(τ) loads in its library and computes what the fine-tune computes."""
    import transformers

    a = in_shards(case, made(case), tmp_path / "a") if sharded else made(case)
    _, b = shuffled(a, tmp_path / "b")
    tuned = finetuned(CASES[case], a, tmp_path / "tuned")
    pi = align(a, b, residual=residual, advice=False)
    moved = transport(tuned, base=a, onto=b, via=pi).save(tmp_path / "moved")
    if sharded:
        assert spread(b) > 1, "no stack lies in several files"
        assert placed(moved) == placed(b) == placed(a)
    wanted, found = (LiveModel.of(Model.open(folder)).outputs()["logits"] for folder in (tuned, moved))
    assert float((wanted - found).abs().max()) < 1e-5
    own = LiveModel.of(Model.open(b)).outputs()["logits"]
    assert float((wanted - own).abs().max()) > 1e-2, "the fine-tune did nothing"

    kind = getattr(transformers, type(CASES[case].make()).__name__)
    loaded, info = kind.from_pretrained(moved, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        one, two = loaded(tokens).logits, kind.from_pretrained(tuned)(tokens).logits
    assert torch.allclose(one, two, atol=1e-4)


def test_an_expert_moves_to_another_name(made, tmp_path):
    """A permutation of experts alone moves whole tensors between names, and the router's rows alike."""
    a = made("mixtral")
    move = align(a, a, method="random", residual="fixed", seed=3)
    for id in list(move.maps):
        if not id.endswith(".expert"):
            del move.maps[id]
    was, now = Model.open(a).checkpoint, apply(move, a).state_dict()
    assert now.keys() == was.tensors.keys()
    for layer in range(3):
        block = f"model.layers.{layer}.block_sparse_moe"
        router = was.read(f"{block}.gate.weight")
        for to, source in enumerate(move.maps[f"layer.{layer}.expert"].index[0]):
            assert torch.equal(now[f"{block}.gate.weight"][to], router[source])
            for matrix in ("w1", "w2", "w3"):
                theirs = was.read(f"{block}.experts.{source}.{matrix}.weight")
                assert torch.equal(now[f"{block}.experts.{to}.{matrix}.weight"], theirs)


def test_there_and_back_returns_every_tensor_bit_for_bit(made):
    pi = align(made("qwen2_moe", 1), made("qwen2_moe", 2), method="random")
    model = Model.open(made("qwen2_moe", 1)).under(pi.provenance.policy)
    for name, layout in model.architecture.tensors.items():
        tensor = model.read(name)
        assert torch.equal(pi.inverse().move(pi.move(tensor, layout), layout), tensor), name


def test_stacks_in_files_are_the_same_model(made, tmp_path):
    """A state_dict saved as it is in memory has stacks; it is read like files that keep experts apart."""
    import transformers

    a, b = made("mixtral", 1), made("mixtral", 2)
    tuned = finetuned(CASES["mixtral"], a, tmp_path / "tuned")
    (tmp_path / "raw").mkdir()
    live = transformers.MixtralForCausalLM.from_pretrained(tuned)
    save_file(live.state_dict(), tmp_path / "raw" / "model.safetensors")
    (tmp_path / "raw" / "config.json").write_text((tuned / "config.json").read_text())
    assert Model.open(tmp_path / "raw").fingerprint == Model.open(tuned).fingerprint
    pi = align(a, b, method="random")
    one = transport(tuned, base=a, onto=b, via=pi).state_dict()
    two = transport(tmp_path / "raw", base=a, onto=b, via=pi).state_dict()
    assert one.keys() == two.keys() == Model.open(b).checkpoint.tensors.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_every_tensor_is_computed_once_whatever_its_pieces(made, tmp_path):
    a = in_shards("mixtral", made("mixtral", 1), tmp_path / "a")
    b = in_shards("mixtral", made("mixtral", 2), tmp_path / "b")
    tuned = finetuned(CASES["mixtral"], a, tmp_path / "tuned")
    moved, heard = transport(tuned, base=a, onto=b, method="naive"), []
    moved.save(tmp_path / "moved", on_tensor=heard.append)
    assert len(heard) == len(set(heard)) == moved.plan()["tensors"]
    assert moved.plan()["bytes_to_write"] == Model.open(b).checkpoint.nbytes


@pytest.mark.parametrize("dtype", often([torch.float16, torch.bfloat16], [torch.bfloat16]))
def test_pieces_keep_their_type(dtype, made, tmp_path):
    import transformers

    folders = {}
    for role, seed in (("a", 1), ("b", 2), ("tuned", 1)):
        model = transformers.MixtralForCausalLM.from_pretrained(made("mixtral", seed)).to(dtype)
        if role == "tuned":
            model.model.layers[0].mlp.experts.down_proj.data *= 1.5
        model.save_pretrained(tmp_path / role)
        folders[role] = tmp_path / role
    moved = transport(folders["tuned"], base=folders["a"], onto=folders["b"], method="random")
    moved.save(tmp_path / "moved")
    assert {info.dtype for info in Model.open(tmp_path / "moved").checkpoint.tensors.values()} == {dtype}


def test_the_losses_of_training_do_not_speak_against_a_move(made, tmp_path):
    """With the router's logits among the outputs, what is compared is still what the model computes."""
    a = made("mixtral-tied")
    _, b = shuffled(a, tmp_path / "b")
    one, two = LiveModel.of(Model.open(a)), LiveModel.of(Model.open(b))
    assert {"aux_loss", "router_logits.0"} <= one.outputs().keys()
    pi = align(a, b, residual="tied", force_unrelated=True)
    assert largest_difference(one.expected(pi, one.outputs()), two.outputs()) < 1e-9


def test_a_module_is_certified_as_it_is_in_memory():
    import transformers

    from cases.moe import MIXTRAL
    from transfusion.families import all_families
    from transfusion.verification.certify import certify_class

    family = next(family for family in all_families() if family.name == "mixtral")
    assert certify_class(transformers.MixtralForCausalLM, MIXTRAL, family).passed


def test_running_a_model_leaves_its_choice_of_kernels_alone(made):
    live = LiveModel.of(Model.open(made("mixtral")))
    before = live.module.config._experts_implementation
    live.outputs()
    assert live.module.config._experts_implementation == before != "eager"


# ── refusals ─────────────────────────────────────────────────────────────────────────────────


def changed(source: Path, folder: Path, change) -> Path:
    """A copy of a model whose tensors went through ``change``."""
    folder.mkdir()
    state = load_file(source / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_a_missing_expert_is_refused(made, tmp_path):
    folder = changed(made("mixtral"), tmp_path / "a", lambda state: state.pop(FIRST))
    with pytest.raises(ArchitectureError, match=r"1 of them are missing: .*gate_up_proj#0\[0\]"):
        Model.open(folder)


def test_a_model_with_too_few_experts_is_refused(made, tmp_path):
    def drop(state):
        for name in [name for name in state if ".experts.4." in name]:
            del state[name]

    with pytest.raises(Exception, match=r"gate_up_proj of shape \(4, 40, 36\) does not fit"):
        Model.open(changed(made("mixtral"), tmp_path / "a", drop))


@pytest.mark.parametrize("part", ["w1", "w3"])
def test_a_model_without_all_of_one_matrix_is_refused(part, made, tmp_path):
    def drop(state):
        for name in [name for name in state if f".{part}." in name]:
            del state[name]

    with pytest.raises(Exception, match=r"gate_up_proj"):
        Model.open(changed(made("mixtral"), tmp_path / "a", drop))


@pytest.mark.parametrize("other", [torch.zeros(20, 37), torch.zeros(20, 36, dtype=torch.float16)])
def test_pieces_that_differ_are_refused(other, made, tmp_path):
    folder = changed(made("mixtral"), tmp_path / "a", lambda state: state.update({FIRST: other}))
    with pytest.raises(ArchitectureError, match="the pieces of .* differ in shape or type"):
        Model.open(folder)


def test_a_tensor_that_is_there_whole_and_in_pieces_is_refused(made, tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    folder = changed(made("mixtral"), tmp_path / "a", lambda s: s.update({name: torch.zeros(5, 40, 36)}))
    with pytest.raises(ArchitectureError, match="is stored both whole and in pieces"):
        Model.open(folder)


@pytest.mark.parametrize("setting", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_blocks_without_experts_among_others_are_refused(setting, made, tmp_path):
    folder = changed(made("qwen3_moe"), tmp_path / "a", lambda state: None)
    config = json.loads((folder / "config.json").read_text()) | setting
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArchitectureError, match=f"does not know: {next(iter(setting))}="):
        Model.open(folder)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            "block_sparse_moe.experts.1.w1",
            r"changes some of the experts in .*\.experts\.gate_up_proj, and not number 0, 2, 3, 4",
        ),
        ("mlp.experts", "which the base does not have"),
    ],
)
def test_adapters_on_some_experts_are_refused(module, reason, made, tmp_path):
    """The configuration names the modules, so nothing can go where nothing was."""
    key = f"base_model.model.model.layers.0.{module}.lora_"
    factors = {f"{key}A.weight": torch.ones(2, 36), f"{key}B.weight": torch.ones(20, 2)}
    with pytest.raises(AdapterError, match=reason):
        transport(
            lora(tmp_path / "lora", factors), base=made("mixtral", 1), onto=made("mixtral", 2)
        ).state_dict()


def lora(folder: Path, factors: dict[str, torch.Tensor], **settings: object) -> Path:
    """An adapter as older releases of PEFT and transformers made them, with experts apart."""
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["w1", "w2", "w3"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def on_experts(experts: int) -> dict[str, torch.Tensor]:
    """Factors for every expert of the second block."""
    generator = torch.Generator().manual_seed(3)
    sides = {"w1": (36, 20), "w2": (20, 36), "w3": (36, 20)}
    return {
        f"base_model.model.model.layers.1.block_sparse_moe.experts.{expert}.{name}.lora_{side}.weight": (
            torch.randn((2, wide) if side == "A" else (high, 2), generator=generator)
        )
        for expert in range(experts)
        for name, (wide, high) in sides.items()
        for side in "AB"
    }


def test_adapters_on_all_experts_go_where_the_experts_go(made, tmp_path):
    a = made("mixtral")
    _, b = shuffled(a, tmp_path / "b")
    pi = align(a, b, residual="tied", force_unrelated=True)
    factors = on_experts(Model.open(a).info("layers.1.mlp.experts.down_proj").shape[0])
    adapter = lora(tmp_path / "lora", factors)
    same = transport(adapter, base=a, onto=a, via=align(a, a, method="naive"))
    moved = transport(adapter, base=a, onto=b, via=pi)
    names = [f"layers.1.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")]
    assert sorted(moved.moved_adapter.changed) == sorted(same.moved_adapter.changed) == names
    architecture = Model.open(a).under(pi.provenance.policy).architecture
    for name in names:
        wanted = pi.move(same.moved_adapter.delta(name), architecture.tensors[name])
        assert torch.allclose(moved.moved_adapter.delta(name), wanted, atol=1e-5)
        assert not torch.allclose(moved.moved_adapter.delta(name), same.moved_adapter.delta(name), atol=1e-2)
    first = "base_model.model.model.layers.1.block_sparse_moe.experts.{}.{}.lora_{}.weight".format
    product = 1.5 * factors[first(2, "w3", "B")] @ factors[first(2, "w3", "A")]
    assert torch.allclose(same.moved_adapter.delta(names[1])[2, 20:], product, atol=1e-5)
    state = moved.state_dict()
    assert {key: value.shape for key, value in state.items()} == {k: v.shape for k, v in factors.items()}


@pytest.mark.filterwarnings("ignore")  # PEFT stacks the experts of an older adapter, and says so
def test_adapters_on_experts_do_in_peft_what_they_did(made, tmp_path):
    peft = pytest.importorskip("peft")
    import transformers

    a = made("mixtral")
    _, b = shuffled(a, tmp_path / "b")
    one = on_experts(Model.open(a).info("layers.1.mlp.experts.down_proj").shape[0])
    factors = {k.replace("layers.1", f"layers.{i}"): 0.3 * v for i in range(3) for k, v in one.items()}
    adapter = lora(tmp_path / "lora", factors)
    moved = transport(adapter, base=a, onto=b, residual="tied", force_unrelated=True).save(tmp_path / "moved")

    def logits(base: Path, adapter: Path) -> torch.Tensor:
        model = transformers.MixtralForCausalLM.from_pretrained(base)
        with torch.no_grad():
            return peft.PeftModel.from_pretrained(model, adapter).eval()(torch.arange(2, 14)[None]).logits

    wanted = logits(a, adapter)
    assert torch.allclose(logits(b, moved), wanted, atol=1e-3)
    assert (logits(b, adapter) - wanted).abs().max() > 1, "it need not have been moved"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"alpha_pattern": {r"experts.0.w1": 7}}, "alpha_pattern gives experts such as .* different scales"),
        ({"rank_pattern": {r"experts.0.w1": 1}}, "have tensors of several shapes"),
    ],
)
def test_adapters_whose_experts_differ_are_refused(settings, reason, made, tmp_path):
    a = made("mixtral")
    factors = on_experts(Model.open(a).info("layers.1.mlp.experts.down_proj").shape[0])
    if "rank_pattern" in settings:
        for key in [key for key in factors if "experts.0.w1" in key]:
            factors[key] = factors[key][:1] if "lora_A" in key else factors[key][:, :1].clone()
    adapter = lora(tmp_path / "lora", factors, **settings)
    with pytest.raises(AdapterError, match=reason):
        transport(adapter, base=a, onto=made("mixtral", 2), method="naive").state_dict()


def test_adapters_on_attention_move(made, tmp_path):
    peft = pytest.importorskip("peft")
    import transformers

    a = made("mixtral")
    _, b = shuffled(a, tmp_path / "b")
    model = peft.get_peft_model(
        transformers.MixtralForCausalLM.from_pretrained(a),
        peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "lora")
    moved = transport(tmp_path / "lora", base=a, onto=b, residual="tied", force_unrelated=True).save(
        tmp_path / "moved"
    )
    other = peft.PeftModel.from_pretrained(transformers.MixtralForCausalLM.from_pretrained(b), moved)
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        assert torch.allclose(model.eval()(tokens).logits, other.eval()(tokens).logits, atol=1e-4)
