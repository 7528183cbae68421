"""Advice: related, shuffled and unrelated models are told apart."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import often, transformers_model
from transfusion.alignment.alignment import Alignment
from transfusion.files import tensor_files
from transfusion.matching.align import align
from transfusion.matching.gains import Gains, judge, similarity_in_place
from transfusion.matching.methods import preset
from transfusion.matching.search import Search
from transfusion.matching.weights import WeightPair
from transfusion.model.model import Model
from transfusion.runtime.engines import Threads, open_engine
from transfusion.transport.apply import apply

WIDE = {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 192, "num_hidden_layers": 4}
MODELS = {
    "vit": ("ViTModel", "ViTConfig", {**WIDE, "image_size": 32, "patch_size": 8}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 96, "n_layer": 4, "n_head": 4, "n_inner": 192, "vocab_size": 200, "n_positions": 40}
        | {"bos_token_id": 1, "eos_token_id": 1},
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**WIDE, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 200, "max_position_embeddings": 40},
    ),
}
every_family = pytest.mark.parametrize("family", MODELS)


def noisy(source, folder, keep, noise):
    """A model of which every tensor is a share of another's and noise in its standard deviations."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(5)
    state = load_file(folder / "model.safetensors")
    for name, value in state.items():
        drawn = torch.randn(value.shape, generator=generator)
        state[name] = keep * value + noise * value.std(unbiased=False) * drawn
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A, and a B of some kind: ``pairs("vit", "shuffled")``."""
    root = tmp_path_factory.mktemp("pairs")

    @cache
    def initial(family, seed):
        torch.manual_seed(seed)
        model, config, settings = MODELS[family]
        transformers_model(model, config, **settings).save_pretrained(root / f"{family}-{seed}")
        return root / f"{family}-{seed}"

    @cache
    def make(family, kind):
        a, b = initial(family, 0), root / f"{family}-{kind}"
        match kind:
            case "successor":
                return a, noisy(a, b, 1, 0.1)
            case "half":
                return a, noisy(a, b, 0.5, 0.5)
            case "shuffled":
                move = align(a, a, method="random", residual="tied", seed=2)
                return a, noisy(apply(move, a).save(root / f"{family}-moved"), b, 1, 0.1)
            case "independent":
                return a, initial(family, 1)

    return make


def stays(pi: Alignment) -> bool:
    return all(map_.is_identity() for map_ in pi.maps.values())


@pytest.mark.parametrize(
    ("family", "kind"),
    often(product(MODELS, ["successor", "half"]), [("llama", "successor"), ("vit", "half")]),
)
def test_a_descendant_is_recognised_and_left_where_it_is(family, kind, pairs):
    a, b = pairs(family, kind)
    guarded, auto = align(a, b, method="guarded"), align(a, b)
    for pi in (guarded, auto):
        assert pi.provenance.advice["verdict"] == "same lineage"
        assert stays(pi)
        assert pi.provenance.objective[-1] == pytest.approx(pi.provenance.objective[0])
    assert guarded.maps
    assert auto.maps == {}
    assert len(auto.provenance.objective) == 1


@pytest.mark.parametrize("method", often(["guarded", "auto"], ["guarded"]))  # auto: test_functional
@every_family
def test_a_shuffled_successor_is_alignable(family, method, pairs):
    pi = align(*pairs(family, "shuffled"), method=method)
    advice = pi.provenance.advice
    assert advice["verdict"] == "alignable"
    assert advice["share"] > 0.5
    assert not any(map_.is_identity() for map_ in pi.maps.values())
    assert advice["found"] == pi.provenance.objective[-1]
    assert advice["identity"] == pi.provenance.objective[0]


@pytest.mark.parametrize(
    ("family", "method"),
    often(product(MODELS, ["guarded", "transfusion"]), [("vit", "guarded"), ("gpt2", "transfusion")]),
)
def test_strangers_are_not_alignable(family, method, pairs):
    advice = align(*pairs(family, "independent"), method=method).provenance.advice
    assert advice["verdict"] == "not alignable by permutation"
    assert abs(advice["share"]) < 0.05
    compared = [margin for margin in advice["margins"].values() if margin["beyond"] is not None]
    assert compared
    assert all(abs(margin["beyond"]) < 6 for margin in compared)
    assert all(abs(margin["found"] - margin["null"]) < 0.05 for margin in compared)
    assert all(abs(margin["identity"]) < 5 for margin in advice["margins"].values())


@pytest.mark.parametrize("family", often(MODELS, ["llama"]))
def test_the_papers_method_may_leave_home_and_the_advice_says_so(family, pairs):
    """Between A and what is half A: heads go astray by their singular values, and guarded does not."""
    a, b = pairs(family, "half")
    paper = align(a, b, method="transfusion").provenance
    assert paper.objective[-1] < paper.objective[0]
    assert paper.advice["verdict"] == "same lineage"
    assert "this method moved some of them" in paper.advice["text"]
    assert paper.advice["instead"] == "leave out `method`, and the task vector is added as it is"
    guarded = align(a, b, method="guarded").provenance
    assert guarded.objective[-1] >= guarded.objective[0]
    assert (guarded.advice["text"].count(";"), guarded.advice["instead"]) == (0, "")


@every_family
def test_kinship_tells_relatives_from_strangers(family, pairs):
    """Units of few numbers (a pooler's have 96) stand out less: a few of them may not count as in place."""

    def homes(kind):
        weights = WeightPair(*map(Model.open, pairs(family, kind)))
        found, _ = similarity_in_place(weights, weights.axes, Threads(1))
        return {id: one.home for id, one in found.items()}

    related = homes("successor")
    assert all(home > 0.9 for home in related.values())
    assert all(home == 1 for id, home in related.items() if id.endswith((".x", ".y", ".head", ".group")))
    assert all(home == 0 for home in homes("shuffled").values())
    assert all(home == 0 for home in homes("independent").values())


@every_family
def test_the_scores_of_the_identity_come_with_the_similarity_in_place(family, pairs, monkeypatch):
    """From one reading of every tensor and a sample of its rows."""
    weights = WeightPair(*map(Model.open, pairs(family, "independent")))
    axes = weights.axes
    monkeypatch.setattr(tensor_files.row_blocks, "__defaults__", (200,))
    numbers: Counter[str] = Counter()
    read = WeightPair.read

    def counted(self, side, name, rows=None):
        value = read(self, side, name, rows)
        numbers[name] += value.numel()
        return value

    monkeypatch.setattr(WeightPair, "read", counted)
    _, scores = similarity_in_place(weights, axes, Threads(1))
    assert scores.keys() == set(weights.tensors_with(axes))
    for name in scores:
        assert numbers[name] <= 3 * torch.Size(weights.a.info(name).shape).numel(), (
            "A, B, and at most A's rows"
        )
    assert scores == pytest.approx({name: weights.score(name, {}) for name in scores}, rel=1e-5, abs=1e-5)


@every_family
def test_units_that_are_in_place_need_no_gain_and_the_maps_are_the_same(family, pairs, monkeypatch):
    method = preset("transfusion")
    weights = WeightPair(*(Model.open(path).under(method.policy) for path in pairs(family, "successor")))
    computed: Counter[str] = Counter()
    gain = Gains.of

    def counted(self, id, maps, sections):
        computed[id] += 1
        return gain(self, id, maps, sections)

    monkeypatch.setattr(Gains, "of", counted)
    found = Search(weights, method, seed=0, engine=Threads(1)).run()
    with_checks = computed.copy()
    computed.clear()
    monkeypatch.setattr(Gains, "in_place", lambda *given: False)
    wanted = Search(weights, method, seed=0, engine=Threads(1)).run()
    assert found.maps == wanted.maps
    assert sum(with_checks.values()) < sum(computed.values())


def test_the_null_scores_only_what_it_moves(pairs):
    weights = WeightPair(*map(Model.open, pairs("llama", "independent")))
    middle = [id for id in weights.sections if id.startswith("layer.1.")]
    with open_engine(jobs=1) as engine:
        search = Search(weights, preset("guarded"), seed=0, engine=engine, only=middle)
        assert middle
        assert set(search.tensors) == set(weights.tensors_with(middle)) < set(weights.tensors)
        assert search.identity == pytest.approx(sum(weights.score(name, {}) for name in search.tensors))


def test_the_advice_does_not_change_what_is_found(pairs):
    a, b = pairs("vit", "independent")
    with_advice, without = (align(a, b, method="guarded", advice=one) for one in (True, False))
    assert with_advice.digest == without.digest
    assert with_advice.provenance.objective == without.provenance.objective
    assert without.provenance.advice == {}


def test_the_advice_is_kept_with_the_maps(pairs, tmp_path):
    pi = align(*pairs("gpt2", "shuffled"))
    loaded = Alignment.load(pi.save(tmp_path / "pi.safetensors"))
    assert loaded.provenance.advice == json.loads(json.dumps(pi.provenance.advice))
    assert loaded.provenance.advice["verdict"] == "alignable"
    assert loaded.provenance.advice["margins"]["ffn"]["beyond"] > 3


def test_the_command_line_advises_unless_told_not_to(cli, pairs, tmp_path):
    a, b = pairs("llama", "successor")
    _, out, _ = cli("align", a, b, "-o", tmp_path / "one")
    assert "same lineage: the units of B are where A has them" in " ".join(out.split())
    _, out, _ = cli("align", a, b, "-o", tmp_path / "two", "--json")
    assert json.loads(out)["advice"]["verdict"] == "same lineage"
    _, out, _ = cli("align", a, b, "-o", tmp_path / "three", "--no-advice")
    assert "lineage" not in out
    assert Alignment.load(tmp_path / "three").provenance.advice == {}


def test_norm_weights_that_are_all_alike_make_no_relatives(pairs):
    """They give every order of units the same large objective."""
    strangers = pairs("vit", "independent")
    pi = align(*strangers, method=preset("guarded").changed(vectors=True))
    identity, *_, found = pi.provenance.objective
    assert identity > 0.8 * found
    assert pi.provenance.advice["verdict"] == "not alignable by permutation"


# ── similarity in place ──────────────────────────────────────────────────────────────────────


def test_a_few_large_heads_in_place_are_seen_in_spite_of_rounding():
    """Millions of weights in each: products in place are thousands of times larger than chance."""
    generator = torch.Generator().manual_seed(0)
    others = 1e3 * torch.randn(1, 4, 4, generator=generator)
    own = torch.full((1, 4), 3e6)
    others[0].diagonal().copy_(own[0] * (1 - 1e-6))  # summed in another order
    found = judge(own, others)
    assert found.home == 1
    assert found.margin > 1000


def test_a_single_unit_is_in_place():
    assert judge(torch.ones(1, 1), torch.ones(1, 1, 1)).home == 1


def test_units_that_are_all_alike_are_not_told_to_be_in_place():
    assert judge(torch.ones(1, 4), torch.ones(1, 4, 4)).home == 0
