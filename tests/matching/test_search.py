"""The search: what every order, start and rule of acceptance promises."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import cache
from itertools import pairwise, permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from small_models import often
from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import HeadPolicy, InnerPolicy, Residual
from transfusion.errors import SettingError
from transfusion.matching import search as search_module
from transfusion.matching.align import align
from transfusion.matching.gains import Gains
from transfusion.matching.methods import Acceptance, BlockOrder, HeadScore, SearchStart, preset
from transfusion.matching.search import BlockKind, Proposal, Search, propose, search_blocks
from transfusion.matching.weights import WeightPair
from transfusion.model.model import Model
from transfusion.runtime.engines import Threads
from transfusion.runtime.resources import Resources

TINY = ("vit", "bert", "bert-pretraining", "llama", "gpt2")
ONE = Threads(1)


@pytest.fixture(scope="session")
def opened(made):
    """A tiny model, opened once: ``opened("vit", 1)``."""
    return cache(lambda case, seed: Model.open(made(case, seed)))


@pytest.fixture
def searching(opened):
    """A search between two independent tiny models: ``searching(method)``."""

    def make(method, case="vit", **more) -> Search:
        a, b = (opened(case, seed).under(method.policy) for seed in (1, 2))
        return Search(WeightPair(a, b), method, **{"seed": 0, "engine": ONE, **more})

    return make


def rises(trace, slack=1e-5) -> bool:
    """Whether no number is below the one before, but for rounding."""
    return all(later >= earlier - slack * max(map(abs, trace)) for earlier, later in pairwise(trace))


# ── what rises ───────────────────────────────────────────────────────────────────────────────


@settings(max_examples=settings.default.max_examples // 4)
@given(
    case=st.sampled_from(TINY),
    order=st.sampled_from(BlockOrder),
    score=st.sampled_from(HeadScore),
    residual=st.sampled_from(Residual),
    inner=st.sampled_from(InnerPolicy),
    heads=st.sampled_from(HeadPolicy),
    outputs=st.booleans(),
    vectors=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_search_that_takes_only_what_rises_never_falls(case, seed, opened, **choices):
    method = preset("transfusion").changed(accept="rising", starts=["identity"], **choices)
    pi = align(opened(case, 1), opened(case, 2), method=method, seed=seed, advice=False)
    assert rises(pi.provenance.objective)
    assert len(pi.provenance.objective) > 1


def test_a_tensor_with_an_axis_twice_counts_when_a_proposal_is_weighed(made, tmp_path):
    """Its matching would be quadratic, so it says nothing in a gain; but it is part of the objective."""
    transform = "cls.predictions.transform.dense.weight"
    state = load_file(made("bert-pretraining", 2) / "model.safetensors")
    state[transform] = 10 * load_file(made("bert-pretraining", 1) / "model.safetensors")[transform]
    shutil.copytree(made("bert-pretraining", 2), tmp_path / "b")
    save_file(state, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    method = preset("guarded").changed(residual="tied", starts=["identity"])
    a, b = (Model.open(path).under(method.policy) for path in (made("bert-pretraining", 1), tmp_path / "b"))
    search = Search(WeightPair(a, b), method, seed=0, engine=ONE)
    assert search.weights.tensors[transform].dims_with("layer.stream") == (0, 1)
    assert rises(search.descend(search.begin("identity")).trace)


@pytest.mark.parametrize("seed", often([2, 3], [2]))
@pytest.mark.parametrize("case", TINY)
def test_guarded_never_ends_below_the_identity(case, seed, opened):
    trace = align(opened(case, 1), opened(case, seed), advice=False).provenance.objective
    assert trace[-1] >= trace[0]


def test_guarded_goes_home_if_all_its_starts_end_below_the_identity(searching, monkeypatch):
    search = searching(preset("guarded").changed(starts=["progressive"]))
    monkeypatch.setattr(search, "identity", 1e9)
    found = search.run()
    assert all(map_.is_identity() for map_ in found.maps.values())
    assert set(found.maps) == set(search.weights.axes)
    assert found.trace[-1] == 1e9


# ── what does not matter ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "case"),
    often(
        [("guarded", "vit"), ("guarded", "llama"), ("transfusion", "vit"), ("git-rebasin", "vit")],
        [("guarded", "vit")],  # other methods by two threads and by two processes: test_engines
    ),
)
def test_the_number_of_threads_changes_nothing(method, case, opened):
    a, b = opened(case, 1), opened(case, 2)
    advice = method == "guarded"
    found = [
        align(a, b, method=method, resources=Resources(jobs=jobs), seed=4, advice=advice)
        for jobs in (1, 2, 3, 1)
    ]
    assert len({pi.digest for pi in found}) == 1
    assert len({pi.provenance.objective for pi in found}) == 1
    assert all(pi.provenance.advice == found[0].provenance.advice for pi in found)
    assert bool(found[0].provenance.advice) == advice


def test_threads_are_given_back(opened):
    before = torch.get_num_threads()
    align(opened("vit", 1), opened("vit", 2), method="transfusion", resources=Resources(jobs=2))
    assert torch.get_num_threads() == before


# ── restarts ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", often(["transfusion", "git-rebasin", "guarded"], ["git-rebasin"]))
def test_the_best_of_all_restarts_is_kept(method, opened):
    a, b = opened("vit", 1), opened("vit", 2)
    alone = align(a, b, method=method, advice=False)
    ends: dict[str, float] = {}

    steps = []
    best = align(a, b, method=preset(method).changed(restarts=3), on_step=steps.append, advice=False)
    assert best.provenance.objective[-1] >= alone.provenance.objective[-1]
    names = list(dict.fromkeys(step.trial for step in steps))
    assert names[-3:] == ["restart 1", "restart 2", "restart 3"]
    for step in steps:
        ends[step.trial] = step.objective
    assert best.provenance.objective[-1] >= max(ends.values())


# ── visits ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def proposals(monkeypatch):
    """Every proposal that is asked for: the trial's maps at the time, by block."""
    made = []

    def noted(gains, task):
        made.append((task[0], dict(task[1])))
        return propose(gains, task)

    monkeypatch.setattr(search_module, "propose", noted)
    return made


@pytest.mark.parametrize("method", ["transfusion", "brute-force", "git-rebasin"])
@pytest.mark.parametrize("case", often(["vit", "llama"], ["llama"]))
def test_what_has_not_moved_around_a_block_is_not_looked_at_again(method, case, searching, proposals):
    search = searching(preset(method), case)
    found = search.run()
    seen: dict[object, dict] = {}
    visits = Counter(block for block, _ in proposals)
    for block, maps in proposals:
        around = {other for id in block.ids for other in search.weights.neighbours[id]} - set(block.ids)
        now = {id: maps[id] for id in around if id in maps}
        if block in seen:
            assert any(now[id] is not seen[block].get(id) for id in now), block
        seen[block] = now
    assert set(visits) == set(search_blocks(search.weights, search.method))
    assert sum(visits.values()) < len(visits) * found.sweeps, "the last sweep had nothing to do"


def test_singular_values_are_asked_once(searching, proposals):
    search = searching(preset("transfusion"))
    found = search.run()
    assert found.sweeps > 2
    spectral = Counter(block.ids[0] for block, _ in proposals if block.kind is BlockKind.SPECTRAL)
    assert spectral == {f"layer.{i}.head": 1 for i in range(3)}


def test_what_was_solved_by_half_of_its_evidence_is_solved_again_by_all_of_it(searching, proposals):
    """After a progressive first sweep; even if what did not count then has stayed where it was."""
    search = searching(preset("guarded"))
    trial = search.sweep(search.begin("progressive"), SearchStart.PROGRESSIVE)
    halved = {
        block
        for block, maps in proposals
        for id in block.ids
        if len(search.gains.sections(id, maps, block.ids)) < len(search.gains.sections(id, None))
    }
    assert halved
    proposals.clear()
    search.sweep(trial)
    assert halved <= {block for block, _ in proposals}


# ── orders ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("start", [None, *SearchStart])
@pytest.mark.parametrize("order", BlockOrder)
def test_a_first_sweep_visits_every_block_exactly_once(order, start, searching, proposals):
    search = searching(preset("guarded").changed(order=order))
    search.sweep(search.begin("x"), start)
    method = search.method.changed(score="spectral") if start is SearchStart.SPECTRAL else search.method
    wanted = search_blocks(search.weights, method)
    visited = [block for block, _ in proposals]
    assert sorted(visited, key=str) == sorted(wanted, key=str)
    if order is BlockOrder.FORWARD:
        assert visited == wanted


def test_orders_are_what_they_are_called(searching):
    def orders(order, seed=0, restart=0):
        search = searching(preset("transfusion").changed(order=order), seed=seed)
        return [[block.ids[0] for block in search.order(sweep, None, restart)] for sweep in range(3)]

    forward = orders("forward")
    assert forward[0] == forward[1] == forward[2]
    backward = orders("backward")
    assert backward[0] == backward[1] == forward[0][::-1]
    assert orders("alternating") == [forward[0], forward[0][::-1], forward[0]]
    random = orders("random")
    assert len({tuple(order) for order in random}) == 3
    assert {tuple(sorted(order)) for order in random} == {tuple(sorted(forward[0]))}
    assert orders("random") == random
    assert orders("random", seed=1) != random
    assert orders("forward", restart=1) != random
    assert orders("random", restart=1) != orders("random", restart=2)
    assert sorted(orders("parallel")[0]) == sorted(forward[0])


@pytest.mark.parametrize("order", BlockOrder)
@pytest.mark.parametrize("case", often(TINY, ["vit", "llama"]))
@pytest.mark.parametrize("accept", Acceptance)
def test_colours_lead_to_the_maps_of_one_block_after_the_other(case, order, accept, searching, monkeypatch):
    method = preset("guarded").changed(order=order, accept=accept, starts=["progressive"], screen=False)
    coloured, alone = searching(method, case), searching(method, case)
    colours = alone.colours

    def one_by_one(order, *, first=False):
        return colours(order, first=True) if first else [[block] for block in order]

    monkeypatch.setattr(alone, "colours", one_by_one)
    for colour in coloured.colours(coloured.order(1, None)):
        tensors = [name for block in colour for name in alone.weights.tensors_with(block.ids)]
        assert len(tensors) == len(set(tensors)), "blocks of a colour share no tensor"
    found, wanted = coloured.run(), alone.run()
    assert found.maps == wanted.maps
    assert found.trace == pytest.approx(wanted.trace)


# ── households ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session", params=often([2, 3], [2]))
def small_heads(request, tmp_path_factory):
    """Two ViTs with three heads of two units, or of three, for which there are a hundred times as many orders."""
    from functools import partial

    from small_models import VIT, Case, transformers_model

    settings = {**VIT, "hidden_size": 3 * request.param, "num_attention_heads": 3, "num_hidden_layers": 1}
    case = Case("v", partial(transformers_model, "ViTModel", "ViTConfig", **settings), "vit")
    root = tmp_path_factory.mktemp("small")
    return [Model.open(case.save(root / str(seed), seed)) for seed in (1, 2)]


def test_a_household_is_the_best_of_all_there_are(small_heads):
    method = preset("guarded")
    weights = WeightPair(*(model.under(method.policy) for model in small_heads))
    (nested,) = (block for block in search_blocks(weights, method) if block.kind is BlockKind.NESTED)
    rng = np.random.default_rng(0)
    around = {
        space.id: Map.random(space.size, weights.architecture.rows(space.id), rng)
        for space in weights.architecture.free()
        if space.id not in nested.ids
    }
    found = propose(Gains(weights, method, ONE), (nested, around, None)).maps
    assert found.keys() == set(nested.ids)
    orders = [list(order) for order in permutations(range(3))]
    within = [list(order) for order in permutations(range(weights.architecture.sizes["layer.0.vo"]))]
    best = -np.inf
    for heads in orders:
        total = 0.0
        for child in nested.ids[1:]:
            names = [name for name in weights.tensors if child in weights.tensors[name].names()]
            total += max(
                sum(
                    weights.score(
                        n, {**around, "layer.0.head": Map.permutation(heads), child: Map.permutation(units)}
                    )
                    for n in names
                )
                for units in product(within, repeat=3)
            )
        best = max(best, total)
    names = {n for id in nested.ids for n in weights.tensors if id in weights.tensors[n].names()}
    assert sum(weights.score(n, {**around, **found}) for n in names) == pytest.approx(best, rel=1e-5)


# ── ends ─────────────────────────────────────────────────────────────────────────────────────


def test_a_search_ends_after_the_sweeps_that_it_was_given(opened):
    a, b = opened("vit", 1), opened("vit", 2)
    assert len(align(a, b, method="transfusion", advice=False).provenance.objective) > 4
    for sweeps in (1, 2, 3):
        method = preset("transfusion").changed(max_sweeps=sweeps)
        assert len(align(a, b, method=method, advice=False).provenance.objective) == sweeps + 1


def test_a_search_that_goes_in_circles_ends(searching, monkeypatch):
    """Three states that follow each other for ever: the search stops where it has been before."""
    search = searching(preset("transfusion"))
    states = [Map.permutation(np.roll(np.arange(24), shift)) for shift in range(3)]
    turn = {"now": 0}

    def propose(evidence, task):
        if task[0].ids != ("layer.0.y",):
            return Proposal({})
        turn["now"] += 1
        return Proposal({"layer.0.y": states[turn["now"] % 3]})

    monkeypatch.setattr(search_module, "propose", propose)
    monkeypatch.setattr(search, "neighbours", lambda block: {"layer.0.y"})
    found = search.run()
    assert found.still
    assert found.sweeps == 4
    assert found.maps["layer.0.y"] == states[1]


@pytest.mark.parametrize("method", ["transfusion", "guarded"])
def test_a_search_with_nothing_to_solve_ends_at_once(method, searching):
    found = searching(preset(method), only=[]).run()
    assert found.still
    assert not found.maps
    assert len(set(found.trace)) == 1


def test_a_search_that_changes_nothing_ends_at_once(opened):
    a = opened("vit", 1)
    pi = align(a, a, method="brute-force", advice=False)
    assert len(pi.provenance.objective) == 2
    assert all(map_.is_identity() for map_ in pi.maps.values())


# ── within a memory ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "named"), [({"memory": 10**9}, r"memory of 1\.00 GB"), ({"engine": "ray"}, "engine = 'ray'")]
)
def test_what_holds_whole_models_cannot_be_limited_nor_sent(asked, named, opened):
    with pytest.raises(SettingError, match=f"{named}: the method ot holds whole models"):
        align(opened("llama", 1), opened("llama", 2), method="ot", resources=Resources(**asked))


def test_a_limit_changes_no_map_and_too_little_is_refused(cli, made, tmp_path):
    a, b, pi = made("llama", 1), made("llama", 2), tmp_path / "pi.safetensors"
    code, _, err = cli("align", a, b, "-o", pi, "--memory", "1MB")
    assert code == 2
    least = err.split("give at least ")[1].split("\n")[0].replace(" ", "")
    assert cli("align", a, b, "-o", pi, "--memory", "1MB", "--dry-run")[0] == 2
    assert cli("align", a, b, "-o", pi, "--memory", least, "--no-advice")[0] == 0
    assert Alignment.load(pi).maps == align(a, b, advice=False).maps
