"""The LoRA nearest to a change of weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from small_models import CASES, finetuned
from transfusion import transport
from transfusion.running.building import build
from transfusion.transport.adapters import factoring
from transfusion.transport.adapters.factoring import _factors
from transfusion.transport.output import Output


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8), st.integers(0, 9))
def test_the_product_is_the_nearest_of_its_rank(out, into, rank, seed):
    change = drawn(out, into, seed=seed)
    second, first, share = _factors(change, rank)
    values = torch.linalg.svdvals(change)
    assert (second.shape, first.shape) == ((out, rank), (rank, into))
    left = (change - second @ first).square().sum()
    assert left.item() == pytest.approx(values[rank:].square().sum().item(), abs=1e-3)
    assert share == pytest.approx((values[:rank].square().sum() / values.square().sum()).item(), abs=1e-4)


@pytest.mark.parametrize("shape", [(300, 200), (200, 300)])
def test_a_large_change_of_few_directions_loses_nothing(shape):
    change = drawn(shape[0], 12) @ drawn(12, shape[1], seed=1)
    second, first, share = _factors(change, 12)
    assert torch.allclose(second @ first, change, atol=1e-3)
    assert share == pytest.approx(1, abs=1e-5)
    few, fewer, share = _factors(change, 4)
    best = torch.linalg.svdvals(change).square()
    assert share == pytest.approx((best[:4].sum() / best.sum()).item(), abs=1e-4)
    assert (few @ fewer).norm().square().item() == pytest.approx(best[:4].sum().item(), rel=1e-3)


def test_a_large_change_of_many_directions_loses_little():
    change = drawn(400, 300)
    second, first, _ = _factors(change, 8)
    best = torch.linalg.svdvals(change)[8:].square().sum()
    assert (change - second @ first).square().sum() < 1.01 * best


@pytest.mark.parametrize("change", [torch.zeros(20, 30), drawn(20, 2) @ drawn(2, 30)])
def test_directions_that_the_change_does_not_need_can_learn(change):
    """The gradient of one factor is a product with the other: where both are zero, neither ever moves."""
    second, first, share = _factors(change, 4)
    assert torch.allclose(second @ first, change, atol=1e-4)
    assert share == pytest.approx(1)
    assert (first.norm(dim=1) > 0.1).all()


def test_no_whole_model_is_made_for_a_lora(made, tmp_path, monkeypatch):
    """Layers are factored one at a time, and a head that is tied to the embedding gets no LoRA."""
    case = CASES["gpt2"]
    a, b = made("gpt2"), made("gpt2", seed=2)
    tuned = finetuned(case, a, tmp_path / "tuned")
    dense, unmoved = (
        transport(tuned, base=a, onto=b, method="naive", alpha=alpha, force_unrelated=True)
        for alpha in (1.0, 0.0)
    )
    expected, before = (build(one.model(), torch.float32).state_dict() for one in (dense, unmoved))
    for name in ("module", "model", "state_dict"):
        monkeypatch.setattr(Output, name, lambda self: pytest.fail("a whole model is in memory"))
    tensors, settings, share = factoring._nearest_lora(dense, unmoved, 64, None, [])
    assert share > 0.999, "the rank is that of the layers"
    assert settings["fan_in_fan_out"], "GPT-2 stores its matrices the other way around"
    layers = {key.removesuffix(".lora_A.weight") for key in tensors if key.endswith("lora_A.weight")}
    assert len(tensors) == 2 * len(layers)
    assert not any("lm_head" in one for one in layers)
    for layer in layers:
        name = f"{layer.removeprefix(factoring.PREFIX)}.weight"
        product = tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
        assert torch.allclose(product.T, expected[name] - before[name], atol=1e-5)
