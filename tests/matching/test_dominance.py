"""Dominance: what is proven from a part of the products is true of all of them."""

from __future__ import annotations

import shutil
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from small_models import VIT, Case, transformers_model
from transfusion.alignment.alignment import random_maps
from transfusion.alignment.maps import Permutation
from transfusion.matching.blocks import AxisBlock, BlockState, SearchContext
from transfusion.matching.methods import preset
from transfusion.matching.weights import dominance
from transfusion.matching.weights.gain_products import GainProducts
from transfusion.matching.weights.gains import Gains
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.runtime.threads import Threads

ONE = Threads(1)
AXES = ("layer.0.ffn", "layer.1.y", "layer.2.x")
METHOD = preset("transfusion")


@pytest.fixture(autouse=True, params=["float32", "bfloat16"])
def small(request, monkeypatch):
    """Small axes are tried, too; with products in both types, whatever this machine is faster in."""
    monkeypatch.setattr(dominance, "SMALLEST", 8)
    monkeypatch.setattr(dominance, "multiplies_faster_in_bfloat16", lambda: request.param == "bfloat16")


@pytest.fixture(scope="session")
def drawn(tmp_path_factory):
    """A ViT of 96 units, drawn from a seed: ``drawn(1)``."""
    settings = {**VIT, "hidden_size": 96, "intermediate_size": 192}
    case = Case("wide", partial(transformers_model, "ViTModel", "ViTConfig", **settings), "vit")
    root = tmp_path_factory.mktemp("wide")
    return cache(lambda seed: case.save(root / str(seed), seed))


@pytest.fixture(scope="session")
def related(drawn, tmp_path_factory):
    """A ViT, and the same with so much noise: ``related(0.1)``."""
    a = drawn(1)

    @cache
    def make(noise: float, seed: int = 0) -> WeightPair:
        b = tmp_path_factory.mktemp("noisy")
        shutil.copytree(a, b, dirs_exist_ok=True)
        generator = torch.Generator().manual_seed(seed)
        state = {
            name: tensor + noise * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(a / "model.safetensors").items()
        }
        save_file(state, b / "model.safetensors", {"format": "pt"})
        return WeightPair(*(Model.open(path).under(METHOD.policy) for path in (a, b)))

    return make


def whole_gain(weights: WeightPair, id: str, maps) -> torch.Tensor:
    gains = Gains(weights, ONE, 0)
    return gains.of(id, gains.history(id, maps, weights.sections[id]))[0]


def proven(weights: WeightPair, id: str, maps, known: Permutation) -> bool:
    return dominance.is_dominant(weights, ONE, weights.sections[id], maps, known)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    noise=st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.8, 1.2]),
    id=st.sampled_from(AXES),
    swapped=st.booleans(),
    seed=st.integers(0, 3),
)
def test_what_is_proven_is_true(noise, id, swapped, seed, related):
    weights = related(noise, seed)
    size = weights.architecture.sizes[id]
    index = np.arange(size)
    if swapped:
        index[[1, 3]] = index[[3, 1]]
    known = Permutation(index)
    if proven(weights, id, {}, known):
        gain = whole_gain(weights, id, {})
        assert gain.argmax(1).tolist() == index.tolist()
        assert not swapped


@pytest.mark.parametrize("id", AXES)
def test_small_changes_are_proven_and_neither_swaps_nor_strangers(id, related, drawn):
    weights = related(0.05)
    size = weights.architecture.sizes[id]
    assert proven(weights, id, {}, Permutation.identity(size))
    assert not proven(weights, id, {}, Permutation(np.roll(np.arange(size), 1)))
    strangers = WeightPair(*(Model.open(drawn(seed)).under(METHOD.policy) for seed in (1, 2)))
    assert not proven(strangers, id, {}, Permutation.identity(size))


@pytest.mark.parametrize("id", AXES)
def test_other_axes_count_as_their_maps_move_them(id, related):
    """A against itself, with everything around moved away: units are no longer in place."""
    weights = related(0.0)
    maps = random_maps(weights.architecture, 3)
    assert not proven(weights, id, maps, Permutation.identity(weights.architecture.sizes[id]))


def test_a_block_that_is_proven_gives_the_map_in_use_and_computes_no_gain(related, monkeypatch):
    weights = related(0.05)
    context = SearchContext(weights, Gains(weights, ONE), METHOD)
    monkeypatch.setattr(Gains, "of", None)
    found = AxisBlock("layer.0.ffn").propose(context, BlockState({}))
    assert found.maps["layer.0.ffn"].is_identity()
    assert not found.history
    assert found.gap == 0


def test_a_part_of_the_columns_is_enough_for_near_relatives(related, monkeypatch):
    used = []
    needed = dominance._Units.parts_needed
    monkeypatch.setattr(
        dominance._Units, "parts_needed", lambda *given: used.append(needed(*given)) or used[-1]
    )
    for noise in (0.01, 0.15):
        assert proven(related(noise), "layer.0.ffn", {}, Permutation.identity(192)), noise
    assert used[0] < used[1] <= dominance.MOST


@pytest.mark.parametrize("id", AXES)
def test_weights_in_memory_stay_as_they_are(id, drawn):
    """What is read of a model in memory is the model itself."""
    modules = [build(Model.open(drawn(1)), torch.float32) for _ in range(2)]
    before = [parameter.clone() for module in modules for parameter in module.parameters()]
    weights = WeightPair(*(Model.open(module).under(METHOD.policy) for module in modules))
    assert proven(weights, id, {}, Permutation.identity(weights.architecture.sizes[id]))
    after = [parameter for module in modules for parameter in module.parameters()]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("id", AXES)
def test_products_are_rounded_by_no_more_than_is_allowed_for(id, related, small):
    weights = related(0.5)
    rounded = dominance._rounded(weights)
    exact, found = (
        torch.zeros(1, weights.architecture.sizes[id], weights.architecture.sizes[id]) for _ in range(2)
    )
    norms = torch.zeros(2, exact.shape[1])
    for section in weights.sections[id]:
        columns = section.columns({})
        for pair, total in ((weights, exact), (rounded, found)):
            GainProducts(pair, ONE, range(total.shape[1])).add(total, section, None, columns)
        for side, name in enumerate("ba"):
            norms[side] += weights.matrix(name, section)[0].square().sum(1)
    allowed = dominance.ROUNDING[rounded.place["dtype"]] * norms.sqrt()
    share = (found - exact)[0].abs() / (allowed[0][:, None] * norms[1].sqrt())
    assert share.max() < 1
    if rounded is not weights:
        assert share.max() > 0.01, "they are rounded"
