"""The presets: each does what it says, and what it finds can be used."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import product

import numpy as np
import pytest

from small_models import CASES, finetuned, often
from tests.transport.test_adapter import train_adapter
from transfusion.alignment.alignment import Alignment
from transfusion.architecture.architecture import HeadPolicy, InnerPolicy, Residual
from transfusion.errors import SettingError
from transfusion.matching.align import align
from transfusion.matching.methods import (
    DEFAULT,
    METHODS,
    Acceptance,
    BlockOrder,
    HeadScore,
    SearchStart,
    StreamJoin,
    preset,
)
from transfusion.model.model import Model
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport
from transfusion.verification.verify import verify

FOUR = ("vit-classifier", "bert-pretraining", "clip", "llama")
EXACT = ("guarded", "transfusion", "tied", "brute-force", "no-attention")
every_case = pytest.mark.parametrize("case", FOUR)
two_cases = pytest.mark.parametrize("case", often(FOUR, ["vit-classifier", "llama"]))


def by_cases(methods: Iterable[str]) -> list[object]:
    """All methods on all cases; every run has each of them on one, and the default on all."""
    asked = list(product(methods, FOUR))
    return often(asked, [one for one in asked if one[1] == "llama" or one[0] == DEFAULT])


@pytest.fixture(scope="session")
def found(made):
    """What a preset finds between two independent models, once: ``found("tied", "clip")``."""
    return cache(lambda method, case: align(made(case, 1), made(case, 2), method=method, advice=False))


@pytest.fixture(scope="session")
def tuned(made, tmp_path_factory):
    """A fine-tune of A, made once."""
    return cache(lambda case: finetuned(CASES[case], made(case), tmp_path_factory.mktemp("tuned") / case))


@pytest.fixture(scope="session")
def adapter(made, tmp_path_factory):
    """A LoRA on the tiny Llama."""
    folder = tmp_path_factory.mktemp("lora") / "adapter"
    train_adapter(made("llama"), folder, ["q_proj", "v_proj", "o_proj", "down_proj"])
    return folder


@pytest.mark.parametrize(("method", "case"), by_cases(METHODS))
def test_every_preset_finds_something_that_can_be_kept_and_used(method, case, found, made, tuned, tmp_path):
    pi = Alignment.load(found(method, case).save(tmp_path / "pi.safetensors"))
    assert pi.digest == found(method, case).digest
    assert pi.provenance.method == method
    if not pi.folds:  # units that are turned may leave their heads
        assert pi.provenance.policy == preset(method).policy
    given = {"base": made(case, 1), "onto": made(case, 2), "via": pi, "alpha": 1.0}
    moved = transport(tuned(case), **given).save(tmp_path / "moved")
    result, target, base = (Model.open(path) for path in (moved, made(case, 2), made(case, 1)))
    fine = Model.open(tuned(case))
    architecture = base.under(pi.provenance.policy).architecture
    for name, layout in architecture.backbone.items():
        if (
            name in pi.folds
            or name.rpartition(".")[0] in pi.norms
            or (pi.rotates and name in architecture.scales)
        ):
            continue  # moved together with a norm: test_functional
        task = fine.read(name) - base.read(name)
        assert np.allclose(result.read(name), target.read(name) + pi.move(task, layout), atol=1e-6), name


@pytest.mark.parametrize("method", METHODS)
def test_every_preset_moves_an_adapter(method, found, made, adapter, tmp_path):
    a, b = made("llama", 1), made("llama", 2)
    via = found(method, "llama")
    moved = transport(adapter, base=a, onto=b, via=via, alpha=1.0).save(tmp_path / "moved")
    assert (moved / "adapter_config.json").exists()


@pytest.mark.parametrize(("method", "case"), by_cases(EXACT))
def test_what_is_a_symmetry_computes_the_same(method, case, found, made):
    pi = found(method, case)
    assert not all(map_.is_identity() for map_ in pi.maps.values())
    result = verify(made(case), via=pi)
    assert result.equal
    assert result.tolerance == 1e-9


@pytest.mark.parametrize("case", often(["vit-classifier", "bert-pretraining", "clip"], ["vit-classifier"]))
def test_mixing_heads_computes_something_else(case, found, made):
    result = verify(made(case), via=found("git-rebasin", case))
    assert not result.equal
    assert result.difference > 1e-3


def test_the_grouped_heads_of_a_llama_have_boundaries_that_cannot_be_lost(found, made):
    pi = found("git-rebasin", "llama")
    assert not any(id.endswith((".group", ".qk")) for id in pi.maps)
    assert all(map_.blocks == 2 for id, map_ in pi.maps.items() if id.endswith(".vo"))
    assert verify(made("llama"), via=pi).equal


@two_cases
def test_plain_shortcuts_need_one_map_for_the_stream(case, found, made):
    pi = found("no-residual", case)
    assert pi.provenance.options["plain_shortcuts"] is True
    assert pi.digest == found("transfusion", case).digest, "only the shortcuts differ"
    assert pi.broken_shortcuts(Model.open(made(case)).under(pi.provenance.policy).architecture.shortcuts)
    assert verify(made(case), via=pi).difference > 1e-3


def test_plain_shortcuts_do_no_harm_where_the_maps_of_the_stream_agree(shuffled):
    a, b = shuffled("llama")
    pi = align(a, b, method="no-residual", advice=False)
    assert not pi.broken_shortcuts(Model.open(a).under(pi.provenance.policy).architecture.shortcuts)
    assert not all(map_.is_identity() for map_ in pi.maps.values())
    assert verify(a, via=pi).equal


@every_case
def test_naive_moves_nothing_and_random_everything(case, found):
    assert found("naive", case).maps == {}
    assert not any(map_.is_identity() for map_ in found("random", case).maps.values() if map_.size > 1)


def leaving(index: np.ndarray, size: int) -> int:
    """How many units come from another head than the one of their place."""
    return int((index // size != np.arange(len(index)) // size).sum())


@pytest.mark.parametrize("case", often(["vit-classifier", "bert-pretraining", "clip"], ["vit-classifier"]))
def test_without_attention_heads_stay_and_their_units_move(case, found):
    maps = found("no-attention", case).maps
    assert not any(id.endswith(".head") for id in maps)
    inner = {id: map_ for id, map_ in maps.items() if id.endswith(".qk")}
    assert inner
    for id, map_ in inner.items():
        assert map_.blocks > 1, id
        assert not map_.is_identity()


@pytest.mark.parametrize("method", ["no-attention", "git-rebasin"])
def test_query_heads_stay_in_their_groups_and_groups_in_their_order(method, found):
    maps = found(method, "llama").maps
    assert not any(id.endswith((".group", ".rep")) for id in maps)
    assert any(id.endswith(".vo") and not map_.is_identity() for id, map_ in maps.items())


@pytest.mark.parametrize("case", often(["vit-classifier", "bert-pretraining"], ["vit-classifier"]))
def test_git_rebasin_mixes_heads(case, found):
    """4 heads of 6 units."""
    maps = {id: map_ for id, map_ in found("git-rebasin", case).maps.items() if id.endswith(".qk")}
    assert len(maps) == 3
    for map_ in maps.values():
        assert map_.index.shape == (1, 24)
        assert leaving(map_.index[0], 6) > 0


@pytest.mark.parametrize("case", often(["vit-classifier", "bert-pretraining", "llama"], ["bert-pretraining"]))
def test_heads_by_singular_values_are_those_by_their_best_units_where_there_is_a_truth(case, made, tmp_path):
    a = made(case)
    planted = align(a, a, method="random", residual="tied", inner="tied", seed=3)
    b = apply(planted, a).save(tmp_path / "b")
    heads = [id for id in planted.maps if id.endswith((".head", ".group"))]
    assert heads
    for method in ("transfusion", "brute-force"):
        pi = align(a, b, method=method, residual="tied", advice=False)
        for id in heads:
            assert pi.maps[id] == planted.maps[id], (method, id)


@pytest.mark.parametrize("method", ["transfusion", "tied", "no-residual", "brute-force", "no-attention"])
def test_the_papers_presets_have_one_map_inside_a_head_and_guarded_two(method, found):
    tied, free = found(method, "vit-classifier").maps, found("guarded", "vit-classifier").maps
    for layer in range(3):
        assert f"layer.{layer}.vo" not in tied
        assert f"layer.{layer}.qk" in tied
        assert free[f"layer.{layer}.vo"] != free[f"layer.{layer}.qk"]


# ── changing a preset ────────────────────────────────────────────────────────────────────────


def test_choices_may_be_words():
    method = preset("transfusion").changed(
        residual="tied",
        inner="free",
        heads="natural",
        score="exact",
        starts=["spectral", "identity"],
        order="parallel",
        accept="rising",
        restarts=2,
        outputs=None,
    )
    assert (method.policy.residual, method.policy.inner) == (Residual.TIED, InnerPolicy.FREE)
    assert method.policy.heads is HeadPolicy.NATURAL
    assert method.score is HeadScore.EXACT
    assert method.starts == (SearchStart.SPECTRAL, SearchStart.IDENTITY)
    assert method.order is BlockOrder.PARALLEL
    assert method.accept is Acceptance.RISING
    assert method.restarts == 2
    assert method.outputs is False, "None changes nothing"
    assert preset("transfusion").order is BlockOrder.FORWARD, "the preset itself is as it was"
    assert preset("ot").changed(join="matrix").fusion.join is StreamJoin.MATRIX


@pytest.mark.parametrize("start", SearchStart)
def test_a_single_start_may_be_one_word(start):
    assert preset("transfusion").changed(starts=str(start)).starts == (start,)
    assert preset("transfusion").changed(starts=start).starts == (start,)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("residual", Residual),
        ("inner", InnerPolicy),
        ("heads", HeadPolicy),
        ("score", HeadScore),
        ("starts", SearchStart),
        ("order", BlockOrder),
        ("accept", Acceptance),
        ("join", StreamJoin),
    ],
)
def test_a_word_that_is_no_choice_is_refused_with_those_that_are(name, choices):
    with pytest.raises(SettingError, match=f"{name} = 'sideways' is not a choice") as caught:
        preset("ot").changed(**{name: ["sideways"] if name == "starts" else "sideways"})
    for choice in choices:
        assert choice in caught.value.hint


@pytest.mark.parametrize(
    "option", [{"soft": True}, {"join": "matrix"}, {"evidence": "activations"}, {"draws": 2}]
)
def test_options_of_fusion_are_refused_where_nothing_is_fused(option):
    with pytest.raises(SettingError, match=f"{next(iter(option))}: only for optimal transport"):
        preset("guarded").changed(**option)
    assert preset("ot").changed(**option) != preset("ot")
