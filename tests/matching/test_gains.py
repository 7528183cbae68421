"""Gains: what they are by definition, and that corrections keep them what they are."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import PRINCIPAL
from transfusion.alignment.alignment import random_maps
from transfusion.alignment.maps import Map, move_tensor
from transfusion.architecture.architecture import HeadPolicy, InnerPolicy, Policy, Residual
from transfusion.architecture.layouts import explode
from transfusion.matching.gains import Gains
from transfusion.matching.methods import preset
from transfusion.matching.weights import WeightPair
from transfusion.model.model import Model
from transfusion.runtime.engines import Threads

POLICIES = {
    "untied": Policy(),
    "tied": Policy(Residual.TIED, InnerPolicy.TIED),
    "flat": Policy(Residual.TIED, InnerPolicy.TIED, HeadPolicy.FLAT),
}
ONE = Threads(1)
EVERYTHING = preset("guarded")


@pytest.fixture(scope="session")
def pair(made):
    """The weights of two models under a policy, opened once: ``pair("vit", "tied")``."""

    @cache
    def opened(case, policy):
        a, b = (Model.open(made(case, seed)).under(POLICIES[policy]) for seed in (1, 2))
        return WeightPair(a, b, vectors=case in ("llama", "gpt2"))

    return opened


def movable(weights: WeightPair) -> list[str]:
    """The axes that gains are asked for: free, spoken of, and with nothing free within them."""
    architecture = weights.architecture
    return [
        space.id
        for space in architecture.free()
        if space.id in weights.sections and space.id not in architecture.children
    ]


def fresh_gain(weights: WeightPair, id: str, maps, sections):
    """A gain that is computed from nothing, by these sections."""
    return Gains(weights, EVERYTHING, ONE, 0).of(id, maps, sections)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [*PRINCIPAL, "mixtral"])
def test_a_gain_is_what_the_scores_of_all_tensors_become(case, policy, pair):
    weights = pair(case, policy)
    architecture = weights.architecture
    maps = random_maps(architecture, 5)
    rng = np.random.default_rng(6)
    axes = movable(weights)
    assert axes
    for id in axes:
        sections = weights.sections[id]
        gain = fresh_gain(weights, id, maps, sections)
        chosen = Map.random(architecture.sizes[id], architecture.rows(id), rng)
        collected = gain.gather(2, torch.from_numpy(chosen.index).unsqueeze(2)).sum(dtype=torch.float64)
        parts = [
            weights.score(name, {**maps, id: chosen})
            for name in dict.fromkeys(section.tensor for section in sections)
        ]
        rest = sum(_without(weights, name, id, {**maps, id: chosen}) for name in weights.tensors_of[id])
        assert float(collected) == pytest.approx(sum(parts) - rest, abs=1e-4 * sum(map(abs, parts))), id


def _without(weights: WeightPair, name: str, id: str, maps) -> float:
    """What the parts of a concatenation in which an axis does not occur add to the score of a tensor."""
    architecture, layout = weights.architecture, weights.tensors[name]
    here = {other: maps[other] for other in layout.names() if other in maps}
    moved = move_tensor(weights.read("a", name), layout, here, architecture.sizes, architecture.parents)
    product = moved * weights.read("b", name)
    return sum(
        float(piece.sum(dtype=torch.float64))
        for piece, factors in explode(product, layout, architecture.sizes)
        if id not in {factor.name for factor in factors}
    )


CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.booleans(), st.integers(0, 10**6)), max_size=6)


def changed(weights: WeightPair, maps, but: str, which: int, small: bool, seed: int):
    """Maps of which one, of another axis than one, has two units swapped or is drawn anew."""
    others = [space.id for space in weights.architecture.free() if space.id != but]
    id = others[which % len(others)]
    rng = np.random.default_rng(seed)
    size, rows = weights.architecture.sizes[id], weights.architecture.rows(id)
    index = maps[id].index.copy()
    if small:
        row, (one, other) = rng.integers(rows), rng.choice(size, 2, replace=False)
        index[row, [one, other]] = index[row, [other, one]]
    else:
        index = Map.random(size, rows, rng).index
    return {**maps, id: Map.permutation(index)}


@settings(max_examples=40)
@given(
    case=st.sampled_from(["vit-classifier", "gpt2", "llama", "mixtral"]),
    policy=st.sampled_from(list(POLICIES)),
    axis=st.integers(0, 10**6),
    changes=CHANGES,
    partly=st.booleans(),
)
def test_a_gain_that_is_kept_is_as_one_computed_afresh(case, policy, axis, changes, partly, pair):
    """Nearly, because sums are rounded."""
    weights = pair(case, policy)
    axes = movable(weights)
    id = axes[axis % len(axes)]
    sections = weights.sections[id]
    kept = Gains(weights, EVERYTHING, ONE, 10**9)
    maps = random_maps(weights.architecture, 1)
    kept.of(id, maps, sections)
    for number, (which, small, seed) in enumerate(changes):
        maps = changed(weights, maps, id, which, small, seed)
        asked = sections[number % len(sections) :] if partly else sections
        found, fresh = kept.of(id, maps, asked), fresh_gain(weights, id, maps, asked)
        assert torch.allclose(found, fresh, rtol=1e-4, atol=1e-5 * float(fresh.abs().max()))


def test_a_small_change_is_a_correction_and_not_a_computation(pair, monkeypatch):
    """Only the columns that moved are multiplied, unless most have; with nothing moved, none are."""
    weights = pair("vit-classifier", "untied")
    id = "layer.1.ffn"
    widths = []
    addmm = torch.addmm
    monkeypatch.setattr(
        torch,
        "addmm",
        lambda into, left, right, **more: [widths.append(left.shape[1]), addmm(into, left, right, **more)],
    )
    gains = Gains(weights, EVERYTHING, ONE, 10**9)

    def multiplied(maps) -> int:
        widths.clear()
        gains.of(id, maps, weights.sections[id])
        return sum(widths)

    maps = random_maps(weights.architecture, 1)
    whole = multiplied(maps)
    assert whole == sum(section.extents[1] for section in weights.sections[id])
    assert multiplied(maps) == 0
    for times in range(1, 4):  # in all, no more than half of the columns are corrected
        index = maps["layer.1.y"].index.copy()
        index[0, [2, 5]] = index[0, [5, 2]]
        maps = {**maps, "layer.1.y": Map.permutation(index)}
        assert multiplied(maps) == 2
        assert gains._kept[id].corrected == 2 * times
    assert multiplied(random_maps(weights.architecture, 2)) == whole
    assert gains._kept[id].corrected == 0


def test_corrections_that_add_up_to_half_of_the_columns_end_in_a_computation(pair):
    weights = pair("vit-classifier", "untied")
    id, sections = "layer.1.ffn", weights.sections["layer.1.ffn"]
    gains = Gains(weights, EVERYTHING, ONE, 10**9)
    maps = random_maps(weights.architecture, 1)
    gains.of(id, maps, sections)
    width = sum(section.extents[1] for section in sections)
    corrected = 0
    while True:
        index = maps["layer.1.y"].index.copy()
        index[0, :6] = np.roll(index[0, :6], 1)
        maps = {**maps, "layer.1.y": Map.permutation(index)}
        gains.of(id, maps, sections)
        if not gains._kept[id].corrected:
            break
        corrected += 6
        assert gains._kept[id].corrected == corrected <= width / 2
    assert corrected + 6 > width / 2


@pytest.mark.parametrize("case", ["vit-classifier", "gpt2", "llama", "mixtral"])
def test_a_gain_does_not_depend_on_what_is_read_at_a_time(case, pair, monkeypatch):
    weights = pair(case, "untied")
    maps = random_maps(weights.architecture, 1)
    for id in movable(weights):
        whole = fresh_gain(weights, id, maps, weights.sections[id])
        with monkeypatch.context() as small:
            small.setattr("transfusion.matching.gains.BLOCK", 8)
            small.setattr("transfusion.matching.gains.NUMBERS", 64)
            by_rows = fresh_gain(weights, id, maps, weights.sections[id])
        assert torch.allclose(by_rows, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize(
    ("case", "parent", "child"), [("vit-classifier", "head", "qk"), ("llama", "rep", "vo")]
)
def test_two_heads_that_change_places_correct_only_their_own_rows(case, parent, child, pair):
    weights = pair(case, "untied")
    parent, child = f"layer.1.{parent}", f"layer.1.{child}"
    kept, maps = Gains(weights, EVERYTHING, ONE, 10**9), random_maps(weights.architecture, 1)
    before = kept.of(child, maps, weights.sections[child]).clone()
    index = maps[parent].index.copy()
    index[0, [0, 1]] = index[0, [1, 0]]
    maps = {**maps, parent: Map.permutation(index)}
    found = kept.of(child, maps, weights.sections[child])
    fresh = fresh_gain(weights, child, maps, weights.sections[child])
    assert torch.allclose(found, fresh, rtol=1e-4, atol=1e-5 * float(fresh.abs().max()))
    assert not torch.equal(found, before)
    assert torch.equal(found[-1], before[-1])


def test_only_what_fits_is_kept(pair):
    weights = pair("vit-classifier", "untied")
    maps = random_maps(weights.architecture, 1)
    first = next(space.id for space in weights.architecture.free())
    size = weights.architecture.sizes[first]
    worth_it = {id for id in movable(weights) if not id.endswith((".qk", ".vo"))}  # a head has few units
    for limit, kept in ((0, set()), (4 * size**2, {first}), (10**9, worth_it)):
        gains = Gains(weights, EVERYTHING, ONE, limit)
        for id in movable(weights):
            gains.of(id, maps, weights.sections[id])
        assert gains._kept.keys() == kept


@pytest.mark.parametrize("case", ["vit-classifier", "gpt2", "llama", "open_clip"])
def test_every_row_against_every_row_is_what_loops_find(case, pair):
    weights = pair(case, "untied")
    architecture = weights.architecture
    checked = 0
    for parent, children in architecture.children.items():
        if parent in architecture.parents:
            continue
        ids = {parent, *children}
        maps = {id: map_ for id, map_ in random_maps(architecture, 3).items() if id not in ids}
        for child in children:
            for section in weights.sections[child]:
                if ids & set(section.others) - {parent, child}:
                    continue
                of_b = section.matrix(weights.read("b", section.tensor))
                layout = weights.tensors[section.tensor]
                here = {id: maps[id] for id in layout.names() if id in maps}
                of_a = section.matrix(
                    move_tensor(
                        weights.read("a", section.tensor),
                        layout,
                        here,
                        architecture.sizes,
                        architecture.parents,
                    )
                )
                found = Gains(weights, EVERYTHING, ONE).between(section, maps)
                for one in range(section.extents[0]):
                    for other in range(section.extents[0]):
                        assert torch.allclose(
                            found[one, other], of_b[one] @ of_a[other].T, rtol=1e-4, atol=1e-4
                        )
                checked += 1
    assert checked >= 6


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", PRINCIPAL)
def test_columns_say_what_moving_the_whole_tensor_does(case, policy, pair):
    weights = pair(case, policy)
    architecture = weights.architecture
    maps = random_maps(architecture, 8)
    for id, sections in weights.sections.items():
        others = {name: map_ for name, map_ in maps.items() if name != id}
        for section in sections:
            of_a = weights.read("a", section.tensor)
            here = {name: others[name] for name in section.layout.names() if name in others}
            if id in {architecture.parents.get(name) for name in here}:
                continue
            moved = move_tensor(of_a, section.layout, here, architecture.sizes, architecture.parents)
            plain = section.matrix(of_a).transpose(0, 1).reshape(architecture.sizes[id], -1)
            columns = section.columns(maps)
            assert columns.shape == section.extents
            picked = (
                plain[:, columns.reshape(-1)]
                .reshape(-1, section.extents[0], section.extents[1])
                .transpose(0, 1)
            )
            assert torch.equal(picked, section.matrix(moved)), (id, section.tensor)
