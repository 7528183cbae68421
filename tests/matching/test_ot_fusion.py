"""Fusion by optimal transport: planted truths, soft and hard plans, joins, and what plans can be used for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from small_models import CASES, FIRST, OFTEN, Case, finetuned, often, transformers_model
from tests.matching.test_planted import DEEP
from tests.transport.test_adapter import TARGETS, outputs_with, train_adapter
from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map, move_tensor
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import HeadPolicy, InnerPolicy, Policy, Residual
from transfusion.errors import AlignmentError, SettingError
from transfusion.matching.align import align
from transfusion.matching.methods import METHODS, EvidenceKind, FusionOptions, StreamJoin
from transfusion.matching.ot_fusion import RawActivations, distances, fuse, hard_plan, join, soft_plan
from transfusion.model.model import Model
from transfusion.report.inspect import inspect
from transfusion.running.live_model import LiveModel
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport
from transfusion.verification.verify import verify

FLAT = Policy(Residual.UNTIED, InnerPolicy.FREE, HeadPolicy.FLAT)
SOFT = FusionOptions(soft=True, regularisation=0.3)
HARD = FusionOptions(soft=False)


def fused(a: Path, b: Path, options: FusionOptions = SOFT) -> Alignment:
    one, two = (Model.open(folder).under(FLAT) for folder in (a, b))
    metadata = Provenance(
        family=one.family.name,
        architecture=one.architecture.digest(),
        policy=FLAT,
        method="ot",
        options={},
        seed=0,
        source=one.label,
        source_fingerprint=one.fingerprint,
        target=two.label,
        target_fingerprint=two.fingerprint,
    )
    return Alignment.of(fuse(one, two, options), one.architecture, metadata)


def unlike(pi: Alignment, a: Path, b: Path) -> list[str]:
    """The tensors that π(A) and B do not share."""
    model, target = Model.open(a).under(FLAT), Model.open(b)
    return [
        name
        for name, layout in model.architecture.tensors.items()
        if not torch.allclose(pi.move(model.read(name), layout), target.read(name), atol=1e-5)
    ]


HEADS_IN_ORDER = replace(
    METHODS["random"], policy=Policy(Residual.TIED, InnerPolicy.FREE, HeadPolicy.NATURAL)
)
"""A random exact move of everything but the heads: grouped ones are beyond what flat heads can follow."""


# ── planted truths ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("evidence", EvidenceKind)
@pytest.mark.parametrize("how", StreamJoin)
@pytest.mark.parametrize(
    "case", often(["vit-classifier", "bert-pretraining", "gpt2", "open_clip"], ["bert-pretraining", "gpt2"])
)
def test_a_shuffled_model_is_recovered_in_one_pass(case, how, evidence, shuffled):
    a, b = shuffled(case)
    pi = fused(a, b, replace(HARD, evidence=evidence, join=how))
    assert unlike(pi, a, b) == []
    assert all(map_.permutes for map_ in pi.maps.values())


@pytest.mark.parametrize("family", often(sorted(FIRST), OFTEN))
def test_every_family_is_recovered_where_its_heads_stay(family, made, tmp_path):
    a = made(FIRST[family])
    b = apply(align(a, a, method=HEADS_IN_ORDER, seed=3), a).save(tmp_path / "b")
    assert unlike(fused(a, b, HARD), a, b) == []


@pytest.mark.parametrize("case", ["llama", "mistral-tied", "swin", "t5", "whisper"])
def test_activations_recover_grouped_heads_tied_embeddings_windows_and_two_stacks(case, made, tmp_path):
    a = made(FIRST.get(case, case))
    b = apply(align(a, a, method=HEADS_IN_ORDER, seed=3), a).save(tmp_path / "b")
    assert unlike(fused(a, b, replace(HARD, evidence=EvidenceKind.ACTIVATIONS)), a, b) == []


@pytest.mark.parametrize("family", often(DEEP, ["bert"]))
def test_deep_models_are_recovered_by_weights_under_noise(family, tmp_path):
    """Twelve layers and more in one pass, with noise of 30 % of each tensor's standard deviation."""
    model, config, settings = DEEP[family]
    torch.manual_seed(0)
    case = Case(family, partial(transformers_model, model, config, **settings), family)
    a = case.store(case.make(), tmp_path / "a")
    planted = align(a, a, method=HEADS_IN_ORDER, seed=2)
    b = apply(planted, a).save(tmp_path / "b")
    state = load_file(b / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, value in state.items():
        noise = 0.3 * value.std(unbiased=False) * torch.randn(value.shape, generator=generator)
        state[name] = value + noise
    save_file(state, b / "model.safetensors", {"format": "pt"})
    pi = fused(a, b, HARD)
    moved, wanted = Model.open(a).under(FLAT), Model.open(a).under(planted.provenance.policy)
    for name, layout in moved.architecture.tensors.items():
        tensor = moved.read(name)
        truth = planted.move(tensor, wanted.architecture.tensors[name])
        assert torch.equal(pi.move(tensor, layout), truth), name


def test_one_plan_may_serve_queries_keys_and_values(made, tmp_path):
    """The original's single plan for a head's units, where both models were moved alike."""
    a = made("vit")
    together = align(a, a, method="random", residual="tied", inner="tied", seed=3)
    b = apply(together, a).save(tmp_path / "b")
    one, two = (Model.open(folder).under(replace(FLAT, inner=InnerPolicy.TIED)) for folder in (a, b))
    maps = fuse(one, two, HARD)
    assert sum(id.endswith(("qk", "vo")) for id in maps) == 3
    for name, layout in one.architecture.tensors.items():
        found = move_tensor(one.read(name), layout, maps, one.architecture.sizes, one.architecture.parents)
        assert torch.equal(found, two.read(name)), name


def test_a_tied_stream_has_one_plan_and_no_joins(shuffled):
    a, b = (Model.open(folder).under(replace(FLAT, residual=Residual.TIED)) for folder in shuffled("vit"))
    maps = fuse(a, b, HARD)
    assert "layer.stream" in maps
    for name, layout in a.architecture.tensors.items():
        found = move_tensor(a.read(name), layout, maps, a.architecture.sizes, a.architecture.parents)
        assert torch.equal(found, b.read(name)), name


def test_shuffled_groups_are_beyond_flat_heads(shuffled):
    """Grouped queries have boundaries that cannot be lost, so their order is taken as it is."""
    a, b = shuffled("llama")
    found = unlike(fused(a, b, replace(HARD, join=StreamJoin.SHORTCUT)), a, b)
    assert "layers.0.self_attn.k_proj.weight" in found
    assert "embed_tokens.weight" not in found


def test_soft_plans_approach_the_hard_one_as_the_regularisation_falls(shuffled):
    a, b = shuffled("vit-classifier")
    hard = fused(a, b, HARD).maps
    far = []
    for regularisation in (1.0, 0.3, 0.03):
        soft = fused(a, b, FusionOptions(soft=True, regularisation=regularisation)).maps
        far.append(max(np.abs(soft[id].matrix - hard[id].matrix).max() for id in hard))
    assert far[0] > far[1] > far[2]
    assert far[2] < 1e-6


def test_activations_and_weights_agree_on_the_neurons_of_a_shuffled_model(shuffled):
    a, b = shuffled("vit-classifier")
    by_weights = fused(a, b, HARD).maps
    by_activations = fused(a, b, replace(HARD, evidence=EvidenceKind.ACTIVATIONS)).maps
    neurons = [id for id in by_weights if id.endswith("ffn")]
    assert len(neurons) == 3
    assert all(by_weights[id] == by_activations[id] for id in neurons)


def test_activations_cut_fused_projections_apart_and_pool_all_samples(made):
    model = Model.open(made("gpt2")).under(FLAT)
    seen = RawActivations(model, model, dtype=torch.float32, device="cpu", draws=2, batch=3)
    ours, theirs = seen.features("layer.0.qk", {})
    samples = LiveModel.of(model).inputs["input_ids"].shape[1] * 3 * 2
    assert ours.shape == (1, model.architecture.sizes["layer.0.qk"], 2 * samples), "queries, then keys"
    assert torch.equal(ours, theirs)
    assert seen.features("vocab", {}) is None, "no output of a module of its own shows tokens"


@pytest.mark.parametrize("evidence", EvidenceKind)
def test_experts_stay_whole_where_everything_else_is_soft(evidence, made):
    pi = fused(made("mixtral", 1), made("mixtral", 2), replace(SOFT, evidence=evidence))
    assert {map_.kind for id, map_ in pi.maps.items() if id.endswith("expert")} == {"permutation"}
    assert {map_.kind for id, map_ in pi.maps.items() if not id.endswith("expert")} == {"plan"}


def test_every_axis_is_told_of_once_in_order(made):
    model = Model.open(made("vit")).under(FLAT)
    info: list[str] = []
    fuse(model, model, HARD, on_axis=lambda axis, total: info.append(axis))
    assert info == [space.id for space in model.architecture.free()]


# ── plans ────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 2**32 - 1), st.floats(0.02, 3), st.integers(2, 12))
def test_soft_plans_spend_every_unit_once(seed: int, regularisation: float, size: int):
    cost = torch.from_numpy(np.random.default_rng(seed).random((2, size, size)))
    plan = soft_plan(cost, regularisation).matrix
    assert np.allclose(plan.sum(axis=2), 1, atol=1e-5)
    assert np.allclose(plan.sum(axis=1), 1, atol=0.1), "columns as far as the rounds allow"
    assert np.allclose(plan, soft_plan(5 * cost + 3, regularisation).matrix, atol=1e-4), "one number fits all"


def test_a_hard_plan_is_the_cheapest_permutation():
    cost = torch.tensor([[[1.0, 0.0], [5.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
    assert hard_plan(cost).index.tolist() == [[0, 1], [0, 1]]


def test_units_that_are_all_alike_are_mixed_evenly():
    assert soft_plan(torch.ones(1, 4, 4), 0.1).matrix.tolist() == np.full((1, 4, 4), 0.25).tolist()


@pytest.mark.parametrize("regularisation", [0.0, -1.0, 0.001, 1000.0, float("nan")])
def test_a_regularisation_out_of_range_is_refused(regularisation):
    with pytest.raises(SettingError, match="regularisation = .*: not between"):
        soft_plan(torch.rand(1, 3, 3), regularisation)


def test_no_draws_are_refused():
    with pytest.raises(SettingError, match="draws = 0: at least one is needed"):
        FusionOptions(draws=0)


def test_distances_do_not_depend_on_the_length_of_units():
    ours, theirs = torch.randn(2, 1, 5, 7)
    assert torch.allclose(distances(ours, 3 * theirs), distances(ours, theirs))
    assert torch.allclose(distances(ours, ours)[0].diagonal(), torch.zeros(5, dtype=torch.float64), atol=1e-6)


# ── joins ────────────────────────────────────────────────────────────────────────────────────

BRANCH, STREAM = Map.permutation(np.array([0, 1, 2])), Map.permutation(np.array([1, 2, 0]))
SMALL, LARGE = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([3.0, 2.0, 0.0])


@pytest.mark.parametrize("how", StreamJoin)
def test_two_equal_maps_join_to_the_same(how):
    assert join(BRANCH, BRANCH, how, SMALL, LARGE) is BRANCH
    soft = soft_plan(torch.rand(1, 3, 3), 0.5)
    assert join(soft, Map.plan(soft.matrix.copy()), how, SMALL, LARGE) == soft


@pytest.mark.parametrize(
    ("how", "shares"),
    [
        (StreamJoin.AVERAGE, [0.5, 0.5, 0.5]),
        (StreamJoin.WEIGHTED, [3 / (3 + 13**0.5)] * 3),
        (StreamJoin.MATRIX, [0.25, 0.5, 1.0]),
        (StreamJoin.BRANCH, [1.0, 1.0, 1.0]),
        (StreamJoin.SHORTCUT, [0.0, 0.0, 0.0]),
    ],
)
def test_joins_give_the_branch_its_share(how, shares):
    joined = join(BRANCH, STREAM, how, SMALL, LARGE).matrix[0]
    assert joined.diagonal().tolist() == pytest.approx(shares)
    assert joined.sum(axis=1).tolist() == pytest.approx([1, 1, 1])


def test_a_branch_and_a_stream_of_nothing_share_alike():
    nothing = torch.zeros(3)
    assert join(BRANCH, STREAM, StreamJoin.MATRIX, nothing, nothing) == join(
        BRANCH, STREAM, StreamJoin.AVERAGE, SMALL, LARGE
    )


def test_every_join_gives_other_maps_between_unrelated_models(made):
    for evidence in EvidenceKind:
        options = FusionOptions(evidence, soft=True)
        digests = {
            fused(made("vit", 1), made("vit", 2), replace(options, join=how)).digest for how in StreamJoin
        }
        assert len(digests) == len(StreamJoin)


# ── what plans can be used for ───────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("case", ["vit-classifier", "llama"])
def test_a_fine_tune_and_an_adapter_move_by_plans(case, made, tmp_path):
    a, b = made(case, 1), made(case, 2)
    pi = fused(a, b)
    assert {map_.kind for map_ in pi.maps.values()} == {"plan"}
    saved = pi.save(tmp_path / "pi.safetensors")
    tuned = finetuned(CASES[case], a, tmp_path / "tuned")
    moved = transport(tuned, base=a, onto=b, via=saved).save(tmp_path / "moved")
    assert all(bool(value.isfinite().all()) for value in LiveModel.of(Model.open(moved)).outputs().values())
    train_adapter(a, tmp_path / "adapter", TARGETS[case])
    transport(tmp_path / "adapter", base=a, onto=b, via=saved).save(tmp_path / "moved-adapter")
    assert all(bool(value.isfinite().all()) for value in outputs_with(tmp_path / "moved-adapter", b).values())


def test_a_moved_adapter_is_the_moved_change(made, tmp_path):
    """Plans act on the two factors of a LoRA as they act on their product."""
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    pi = fused(a, b)
    train_adapter(a, tmp_path / "adapter", ["q_proj"])
    prepared = transport(tmp_path / "adapter", base=a, onto=b, via=pi).moved_adapter
    factors = {factor.layout.items: factor for factor in prepared.factors if ".0." in factor.key}
    down, up = sorted(factors.values(), key=lambda factor: factor.part.name)
    change = prepared.adapter.read(up) @ prepared.adapter.read(down)
    layout = Model.open(a).under(FLAT).architecture.tensors[up.tensor]
    product = prepared.on_b(up) @ prepared.on_b(down)
    assert torch.allclose(product, pi.move(change, layout), atol=1e-5)


def test_a_file_of_plans_comes_back_as_it_was_and_can_be_inspected(made, tmp_path, cli):
    pi = fused(made("llama", 1), made("llama", 2))
    saved = pi.save(tmp_path / "pi.safetensors")
    again = Alignment.load(saved)
    assert again.digest == pi.digest
    assert again.maps == pi.maps
    assert inspect(saved)["axes"]["layer.0.ffn"] == {
        "kind": "plan",
        "size": pi.sizes["layer.0.ffn"],
        "maps": 1,
        "within": None,
        "stays": None,
    }
    code, out, _ = cli("inspect", saved)
    assert code == 0
    assert "plan" in out


@pytest.mark.parametrize("case", ["vit-classifier", "llama"])
def test_verification_sees_that_a_soft_plan_is_another_function(case, made, tmp_path, cli):
    a = made(case, 1)
    pi = fused(a, made(case, 2))
    found = verify(a, via=pi)
    assert not found.equal
    assert found.difference > 1e-3
    assert found.shortcuts == 6
    code, _, err = cli("verify", a, "--via", pi.save(tmp_path / "pi.safetensors"))
    assert code == 3
    assert "does not compute what A computes" in err


def test_a_plan_that_is_a_permutation_is_exact_through_live_shortcuts(made):
    a = made("vit-classifier")
    exact = align(a, a, method="random", residual="untied", seed=5)
    parents = set(exact.parents.values())
    plans: dict[str, Map] = {
        id: map_ if id in parents else Map.plan(map_.matrix) for id, map_ in exact.maps.items()
    }
    assert verify(a, via=replace(exact, maps=plans)).equal
    chained = replace(exact, maps=plans).after(exact.inverse())
    assert all(map_.is_identity() for map_ in chained.maps.values())


def test_a_soft_plan_cannot_be_applied(made):
    a = made("vit")
    with pytest.raises(
        AlignmentError, match=r"not the same function as A: this π mixes the units of"
    ) as caught:
        apply(fused(a, made("vit", 2)), a)
    assert "transport takes this π as it is" in str(caught.value.hint)


def test_flat_heads_leave_grouped_layouts_that_can_be_moved(made):
    model = Model.open(made("llama")).under(FLAT)
    architecture = model.architecture
    rng = np.random.default_rng(0)
    maps = {
        space.id: Map.random(space.size, architecture.rows(space.id), rng) for space in architecture.free()
    }
    for name, layout in architecture.tensors.items():
        move_tensor(model.read(name), layout, maps, architecture.sizes, architecture.parents)
