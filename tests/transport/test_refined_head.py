"""The head that a fine-tune brought, fitted in closed form before the first step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from transfusion.transport.refinement.head import features_of, fitted, head_of

INPUTS, FEATURES, CLASSES = 400, 24, 5


def made(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    one, other = (values.log_softmax(-1) for values in (wanted, found))
    return float(functional.kl_div(other, one, log_target=True, reduction="batchmean"))


def head_with(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    head = nn.Linear(FEATURES, CLASSES)
    head.weight.data, head.bias.data = weight.clone(), bias.clone()
    return head.requires_grad_(False)


def test_a_head_whose_logits_are_fifty_times_too_small_is_scaled_back():
    features, weight, bias = made(0, INPUTS, FEATURES), made(1, CLASSES, FEATURES), made(2, CLASSES)
    wanted = features @ weight.T + bias
    head = head_with(weight / 50, torch.zeros(CLASSES))
    assert distance(head(features), wanted) > 1
    found, shift = fitted(head, features, wanted, distance)
    assert distance(features @ found.T + shift, wanted) < 1e-4


def test_features_in_another_basis_are_read_as_the_fine_tune_reads_them():
    features, weight = made(0, INPUTS, FEATURES), made(1, CLASSES, FEATURES)
    wanted, turned = features @ weight.T, features @ torch.linalg.qr(made(3, FEATURES, FEATURES))[0]
    head = head_with(weight, torch.zeros(CLASSES))
    found, shift = fitted(head, turned, wanted, distance)
    assert distance(turned @ found.T + shift, wanted) < 0.05 * distance(head(turned), wanted)


def test_a_head_that_answers_right_stays_to_the_bit():
    features, weight, bias = made(0, INPUTS, FEATURES), made(1, CLASSES, FEATURES), made(2, CLASSES)
    head = head_with(weight, bias)
    found, shift = fitted(head, features, head(features), distance)
    assert torch.equal(found, weight)
    assert torch.equal(shift, bias)


def test_noise_in_few_inputs_is_not_learned():
    """With fewer inputs than features a regression without a ridge would fit anything."""
    features, weight = made(0, 20, FEATURES), made(1, CLASSES, FEATURES)
    wanted = features @ weight.T + 3 * made(4, 20, CLASSES)
    head = head_with(weight, torch.zeros(CLASSES))
    found, shift = fitted(head, features, wanted, distance)
    fresh = made(5, INPUTS, FEATURES)
    assert distance(fresh @ found.T + shift, fresh @ weight.T) < 1.0


class Names:
    """Names are the same in files and in memory."""

    @staticmethod
    def canonical(name: str) -> str:
        return name


def test_only_a_carried_layer_that_makes_the_logits_is_a_head():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES)).eval()
    given = made(0, 7, 6)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(given)

    names: object = Names()
    assert head_of(model, run, names, {"2.weight", "2.bias"}) is model[2]
    assert head_of(model, run, names, {"0.weight"}) is None, "it makes no logits"
    assert head_of(model, run, names, set()) is None, "B's own heads stay as they are"
    assert features_of(model[2], run).shape == (7, FEATURES)
