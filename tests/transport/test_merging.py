"""Merging: several fine-tunes by one π, combined at B as the recipes say."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned
from transfusion.errors import AdapterError, MismatchError, SettingError
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.transport.transport import merge, transport

CASE = "llama"


@pytest.fixture(scope="module")
def inputs(made, tmp_path_factory) -> dict[str, object]:
    root = tmp_path_factory.mktemp("inputs")
    a, b = made(CASE, 1), made(CASE, 2)
    tuned = [finetuned(CASES[CASE], a, root / f"tuned-{seed}", seed=seed) for seed in (7, 8, 9)]
    return {"a": a, "b": b, "tuned": tuned, "pi": align(a, b, method="random", seed=5)}


@pytest.fixture(scope="module")
def changes(inputs) -> list[dict[str, np.ndarray]]:
    """Every fine-tune's π(τ), from outputs of single transports in float64."""
    b = Model.open(inputs["b"])
    result = []
    for tuned in inputs["tuned"]:
        state = transport(tuned, base=inputs["a"], onto=inputs["b"], via=inputs["pi"], dtype="float64")
        found = state.state_dict()
        result.append({name: (one - b.checkpoint.read(name).double()).numpy() for name, one in found.items()})
    return result


def merged(inputs, **choices):
    """B's change under a way of merging."""
    output = merge(
        inputs["tuned"], base=inputs["a"], onto=inputs["b"], via=inputs["pi"], dtype="float64", **choices
    )
    b = Model.open(inputs["b"])
    state = output.state_dict()
    return {name: (one - b.checkpoint.read(name).double()).numpy() for name, one in state.items()}


def same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-12, err_msg=name)


def test_a_sum_is_the_sum(inputs, changes):
    same(merged(inputs), {name: sum(one[name] for one in changes) for name in changes[0]})


@pytest.mark.parametrize(("how", "total"), [("sum", 1.0), ("mean", 3.5)])
def test_weights_and_alpha_scale_each_and_all(how, total, inputs, changes):
    weights = (0.5, 1.0, 2.0)
    wanted = {
        name: 0.25 * sum(w / total * one[name] for w, one in zip(weights, changes, strict=True))
        for name in changes[0]
    }
    same(merged(inputs, how=how, weights=weights, alpha=0.25), wanted)


def test_ties_keeps_the_largest_of_each_and_lets_the_heavier_sign_win(inputs, changes):
    """Against the recipe as one would write it on whole vectors."""
    names = list(changes[0])
    vectors = [np.concatenate([one[name].ravel() for name in names]) for one in changes]
    kept = []
    for vector in vectors:
        least = np.sort(np.abs(vector).astype(np.float32))[-round(0.3 * len(vector))]
        kept.append(np.where(np.abs(vector).astype(np.float32) >= least, vector, 0))
    sign = np.sign(sum(kept))
    agreeing = np.stack([np.where(np.sign(one) == sign, one, 0) for one in kept])
    count = np.maximum((agreeing != 0).sum(0), 1)
    whole, wanted, start = agreeing.sum(0) / count, {}, 0
    for name in names:
        size = changes[0][name].size
        wanted[name] = whole[start : start + size].reshape(changes[0][name].shape)
        start += size
    same(merged(inputs, how="ties", density=0.3), wanted)


def test_dare_keeps_a_random_share_and_the_expectation(inputs, changes):
    found = merged(inputs, how="dare", density=0.5, seed=3, weights=(1, 0, 0))
    name = "model.embed_tokens.weight"
    kept = found[name] != 0
    assert 0.4 < kept.mean() < 0.6
    np.testing.assert_allclose(found[name][kept], 2 * changes[0][name][kept], atol=1e-12)
    same(merged(inputs, how="dare", density=0.5, seed=3, weights=(1, 0, 0)), found)
    other = merged(inputs, how="dare", density=0.5, seed=4, weights=(1, 0, 0))
    assert ((other[name] != 0) != kept).any()
    everything = merged(inputs, how="dare", density=1.0)
    same(everything, {name: sum(one[name] for one in changes) for name in changes[0]})


@pytest.mark.parametrize(("how", "density"), [("sum", None), ("ties", 0.4)])
def test_how_much_is_made_at_a_time_does_not_matter(how, density, inputs, monkeypatch):
    whole = merged(inputs, how=how, density=density)
    monkeypatch.setattr(import_module("transfusion.transport.output"), "BLOCK", 100)
    same(merged(inputs, how=how, density=density), whole)


def test_one_fine_tune_alone_is_a_transport(inputs, tmp_path):
    one = {"base": inputs["a"], "onto": inputs["b"], "via": inputs["pi"]}
    alone = merge(inputs["tuned"][:1], **one).state_dict()
    plain = transport(inputs["tuned"][0], **one).state_dict()
    assert all(torch.equal(alone[name], plain[name]) for name in plain)


def test_settings_that_make_no_sense_are_refused(inputs):
    one = {"base": inputs["a"], "onto": inputs["b"], "via": inputs["pi"]}
    with pytest.raises(SettingError, match=r"2 weight\(s\) for 3 fine-tune"):
        merge(inputs["tuned"], **one, weights=(1, 2))
    with pytest.raises(SettingError, match="density = 0"):
        merge(inputs["tuned"], **one, density=0, how="ties")
    with pytest.raises(SettingError, match="density = 0.5: sum drops nothing"):
        merge(inputs["tuned"], **one, density=0.5)
    with pytest.raises(SettingError, match="`full`: the fine-tunes are whole models already"):
        merge(inputs["tuned"], **one, full=True)
    with pytest.raises(SettingError, match="and not a list"):
        merge(str(inputs["tuned"][0]), **one)
    with pytest.raises(SettingError, match="merge has no parameter 'alhpa'"):
        merge(inputs["tuned"], **one, alhpa=0.5)
    with pytest.raises(SettingError, match="how = median is not a choice"):
        merge(inputs["tuned"], **one, how="median")
    for weights in ((1, -2, 1), (1, 1, -3), (1, -1.0000001, 0), (0, 0, 0), (1e308, 1e308, 1e308)):
        with pytest.raises(SettingError, match="those of a mean must not be negative, nor all 0"):
            merge(inputs["tuned"], **one, how="mean", weights=weights)
    with pytest.raises(SettingError, match="`finetuned` is missing"):
        merge([], **one)
    with pytest.raises(SettingError, match="head = 3: there are 3"):
        merge(inputs["tuned"], **one, head=3)
    with pytest.raises(SettingError, match="`rank`: the result is a model"):
        merge(inputs["tuned"], **one, rank=4)


def test_heads_of_several_fine_tunes_are_not_mixed(made, tmp_path):
    a, b = made("bert", 1), made("bert", 2)
    tuned = [
        finetuned(CASES["bert-classifier"], a, tmp_path / "one", seed=7),
        finetuned(CASES["bert-classifier"], a, tmp_path / "two", seed=8),
    ]
    with pytest.raises(MismatchError, match="2 of the fine-tunes have task heads of their own") as caught:
        merge(tuned, base=a, onto=b, method="naive").state_dict()
    assert "`head`, which counts from 1 on the command line" in str(caught.value.hint)
    chosen = merge(tuned, base=a, onto=b, method="naive", head=1).state_dict()
    theirs = load_file(tuned[1] / "model.safetensors")["classifier.weight"]
    assert torch.equal(chosen["classifier.weight"], theirs)
    bare = finetuned(CASES["bert"], a, tmp_path / "bare", seed=9)
    together = merge([bare, tuned[0]], base=a, onto=b, method="naive").state_dict()
    theirs = load_file(tuned[0] / "model.safetensors")["classifier.weight"]
    assert torch.equal(together["classifier.weight"], theirs), "there was only one head to keep"


# ── adapters ─────────────────────────────────────────────────────────────────────────────────


def lora(base: Path, folder: Path, seed: int, **settings: object) -> Path:
    """A LoRA adapter with random factors, made by PEFT."""
    import peft
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(inputs, tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        lora(inputs["a"], root / "one", 1, r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"]),
        lora(
            inputs["a"],
            root / "two",
            2,
            r=2,
            lora_alpha=8,
            use_rslora=True,
            target_modules=["q_proj", "v_proj"],
            rank_pattern={"layers.1.self_attn.q_proj": 4},
        ),
    ]


def weights_with(adapter: Path, base: Path) -> dict[str, torch.Tensor]:
    """What PEFT makes of a base and an adapter, in float64."""
    import peft
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(base).double()
    return peft.PeftModel.from_pretrained(model, adapter).double().merge_and_unload().state_dict()


def sum_of(
    adapters: list[Path], inputs, weights: tuple[float, ...], tmp_path: Path
) -> dict[str, torch.Tensor]:
    """B's weights with what the single moved adapters add, each merged by PEFT itself."""
    import transformers

    own = transformers.LlamaForCausalLM.from_pretrained(inputs["b"]).double().state_dict()
    total = dict(own)
    for number, adapter in enumerate(adapters):
        moved = transport(adapter, base=inputs["a"], onto=inputs["b"], via=inputs["pi"])
        with_one = weights_with(moved.save(tmp_path / f"single-{number}"), inputs["b"])
        total = {name: total[name] + weights[number] * (with_one[name] - own[name]) for name in own}
    return total


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], within: float = 1e-5) -> None:
    for name, one in wanted.items():
        assert torch.allclose(found[name].double(), one, atol=within), name


@pytest.mark.parametrize(("how", "weights"), [("sum", ()), ("sum", (0.5, 2.0)), ("mean", ())])
def test_adapters_together_are_an_adapter_of_all_their_ranks(how, weights, adapters, inputs, tmp_path):
    joined = merge(
        adapters, base=inputs["a"], onto=inputs["b"], via=inputs["pi"], how=how, weights=weights
    ).save(tmp_path / "joined")
    shares = weights or ((0.5, 0.5) if how == "mean" else (1.0, 1.0))
    close(weights_with(joined, inputs["b"]), sum_of(adapters, inputs, shares, tmp_path))
    ranks = {name: one.shape[0] for name, one in load_file(joined / "adapter_model.safetensors").items()}
    of = "base_model.model.model.layers.{}.{}.lora_A.weight"
    assert ranks[of.format(0, "self_attn.q_proj")] == 5
    assert ranks[of.format(1, "self_attn.q_proj")] == 7
    assert ranks[of.format(0, "self_attn.v_proj")] == 2
    assert ranks[of.format(0, "mlp.down_proj")] == 3
    metadata = json.loads((joined / "transfusion.json").read_text())
    assert (metadata["kind"], metadata["how"], metadata["rank"], metadata["kept"]) == (
        "adapter",
        how,
        7,
        None,
    )


def test_adapters_are_factored_to_a_smaller_rank_as_well_as_can_be(adapters, inputs, tmp_path):
    whole = sum_of(adapters, inputs, (1.0, 1.0), tmp_path)
    output = merge(adapters, base=inputs["a"], onto=inputs["b"], via=inputs["pi"], rank=2)
    found = weights_with(output.save(tmp_path / "joined"), inputs["b"])
    b = Model.open(inputs["b"]).checkpoint
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        wanted = whole[name] - b.read(name).double()
        u, s, v = torch.linalg.svd(wanted)
        best = u[:, :2] * s[:2] @ v[:2]
        assert torch.allclose(found[name] - b.read(name).double(), best, atol=1e-5)


@pytest.mark.parametrize("how", ["ties", "dare"])
def test_what_is_no_product_any_more_is_factored(how, adapters, inputs, tmp_path):
    """At a rank that is large enough, the adapter is what the model with both in its weights is."""
    one = {"base": inputs["a"], "onto": inputs["b"], "via": inputs["pi"], "how": how, "density": 0.5}
    output = merge(adapters, **one, rank=64)
    found = weights_with(output.save(tmp_path / "joined"), inputs["b"])
    assert output.metadata()["kept"] > 1 - 1e-9
    if how == "ties":  # draws of dare belong to tensors and matrices of other shapes
        full = merge(adapters, **one, full=True, dtype="float64").state_dict()
        for name in full:
            assert torch.allclose(found[name], full[name], atol=1e-5), name
    fewer = merge(adapters, **one, rank=3)
    fewer.save(tmp_path / "fewer")
    metadata = json.loads((tmp_path / "fewer" / "transfusion.json").read_text())
    assert 0.1 < metadata["kept"] < 0.999
    assert metadata["rank"] == 3


def test_adapters_and_models_come_together_in_a_model(adapters, inputs, tmp_path):
    one = {"base": inputs["a"], "onto": inputs["b"], "via": inputs["pi"], "dtype": "float64"}
    both = merge([inputs["tuned"][0], adapters[0]], **one).state_dict()
    model = transport(inputs["tuned"][0], **one).state_dict()
    adapter = transport(adapters[0], **one, full=True).state_dict()
    own = Model.open(inputs["b"]).checkpoint
    for name, found in both.items():
        wanted = model[name] + adapter[name] - own.read(name).double()
        assert torch.allclose(found, wanted, atol=1e-6), name


def test_adapters_of_other_kinds_are_combined_in_the_weights_only(inputs, adapters, tmp_path):
    dora = lora(inputs["a"], tmp_path / "dora", 3, r=2, use_dora=True, target_modules=["q_proj"])
    one = {"base": inputs["a"], "onto": inputs["b"], "via": inputs["pi"]}
    with pytest.raises(AdapterError, match="of kind DORA cannot be merged") as caught:
        merge([dora, adapters[0]], **one)
    assert "`full=True`" in str(caught.value.hint)
    merge([dora, adapters[0]], **one, full=True).state_dict()


def test_tensors_that_several_adapters_have_whole_are_chosen_not_mixed(inputs, tmp_path):
    settings = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    both = [lora(inputs["a"], tmp_path / f"adapter-{seed}", seed, **settings) for seed in (1, 2)]
    for seed, folder in enumerate(both):
        state = load_file(folder / "adapter_model.safetensors")
        state["base_model.model.lm_head.weight"] += seed + 1.0
        save_file(state, folder / "adapter_model.safetensors", {"format": "pt"})
    one = {"base": inputs["a"], "onto": inputs["b"], "via": inputs["pi"]}
    with pytest.raises(AdapterError, match="have their own lm_head.weight, which cannot be merged") as caught:
        merge(both, **one).state_dict()
    assert "`head`, which counts from 1 on the command line" in str(caught.value.hint)
    key = "base_model.model.lm_head.weight"
    for number, folder in enumerate(both):
        alone = transport(folder, **one).state_dict()[key]
        assert torch.equal(merge(both, **one, head=number).state_dict()[key], alone)


def test_an_adapter_is_no_module(inputs, adapters):
    with pytest.raises(AdapterError, match="an adapter is not a module") as caught:
        transport(adapters[0], base=inputs["a"], onto=inputs["b"], via=inputs["pi"]).module()
    assert "full=True" in str(caught.value.hint)


def test_on_the_command_line(cli, inputs, adapters, tmp_path):
    pi = inputs["pi"].save(tmp_path / "pi.safetensors")
    common = ["--base", inputs["a"], "--onto", inputs["b"], "--via", pi]
    code, out, _ = cli(
        "merge", *inputs["tuned"], *common, "--how", "ties", "--weights", "1,1,0.5", "-o", tmp_path / "model"
    )
    assert code == 0
    assert "3 fine-tunes combined by ties" in out
    metadata = json.loads((tmp_path / "model" / "transfusion.json").read_text())
    assert (metadata["verb"], metadata["how"], metadata["weights"]) == ("merge", "ties", [1, 1, 0.5])
    assert "\n- merge\n" in (tmp_path / "model" / "README.md").read_text()
    code, out, _ = cli("merge", *adapters, *common, "--rank", "2", "-o", tmp_path / "adapter")
    assert code == 0
    assert "% of the change" in out
    code, _, err = cli("merge", *inputs["tuned"], *common, "--weights", "a,b", "-o", tmp_path / "no")
    assert code == 2
    assert "is not a list of numbers" in err
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| combined by | ties |" in card
    assert "| share of each that is kept | 0.2 |" in card
    assert "| rank | 2 |" in (tmp_path / "adapter" / "README.md").read_text()
    code, out, _ = cli("merge", *inputs["tuned"], *common, "-o", tmp_path / "no", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["bytes_to_read"] > 0
    assert not (tmp_path / "no").exists()
