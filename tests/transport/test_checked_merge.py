"""Merging by a functional π: the combined change is tried on probes, and does no harm in silence."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from small_models import CASES, finetuned
from tests.transport.test_adapter import train_adapter
from transfusion import align, merge
from transfusion.errors import UselessResultError
from transfusion.model.pair import Pair
from transfusion.running.probes.probed_model import Probes
from transfusion.running.streaming import RunningModel
from transfusion.transport.alpha_on_probes import FARTHEST, SAME, AlphaSearch, OutputShift
from transfusion.transport.finetunes import open_finetune
from transfusion.transport.merge_rules import MergeRule
from transfusion.transport.plan import TransportPlan

VIT = "vit-classifier"


@pytest.fixture(scope="module")
def both(made, tmp_path_factory):
    """Two fine-tunes of the tiny ViT."""
    root = tmp_path_factory.mktemp("both")
    return [finetuned(CASES[VIT], made(VIT), root / f"tuned-{seed}", seed=seed) for seed in (7, 8)]


@pytest.fixture(scope="module")
def exact(shuffled):
    """The plan from A to B, which is A with its units in another order."""
    a, b = shuffled(VIT)
    return TransportPlan.between(Pair.open(a, b), align(a, b))


@pytest.fixture(scope="module")
def strange(made):
    """The parameters of a merge onto a stranger by a functional π."""
    a, b = made(VIT), made(VIT, 2)
    return {"base": a, "onto": b, "via": align(a, b, method="functional")}


def _seen(direction: float, reach: float) -> AlphaSearch:
    """A search that measures these numbers at α = 1."""
    one = AlphaSearch.__new__(AlphaSearch)
    one.at = lambda alpha: OutputShift(alpha, direction, alpha, reach * alpha)  # type: ignore[method-assign]
    one.probes = Probes([], "some inputs")
    return one


@pytest.fixture
def seen(monkeypatch):
    """Let every search measure these numbers: ``seen(direction, reach)``."""

    def let(direction: float, reach: float) -> None:
        found = _seen(direction, reach)
        monkeypatch.setattr(TransportPlan, "alpha_search", lambda *args, **more: found)

    return let


@pytest.mark.parametrize(
    "rule", [MergeRule.asked("sum", (1.0, 0.5)), MergeRule.asked("ties", density=0.5)], ids=["sum", "ties"]
)
def test_the_combined_change_of_all_is_measured(exact, both, rule):
    search = exact.alpha_search([open_finetune(one) for one in both], rule)
    found = search.at(1.0)
    assert found.direction == pytest.approx(1, abs=1e-4)
    assert found.size == pytest.approx(1, abs=1e-3)
    for one in both:
        alone = exact.alpha_search([open_finetune(one)]).wanted["logits"]
        assert torch.dist(search.wanted["logits"], alone) > 0.2 * alone.norm(), "and not that of one of them"


def test_what_is_measured_at_an_alpha_is_what_is_written(strange, both):
    plan = TransportPlan.between(Pair.open(strange["base"], strange["onto"]), strange["via"])
    rule = MergeRule.asked("ties", density=0.5)
    search = plan.alpha_search([open_finetune(one) for one in both], rule)
    module = merge(both, how="ties", density=0.5, alpha=0.5, **strange).module().eval()
    written = search._run(RunningModel(module, plan.b.family), search.batches)
    assert torch.allclose(search._at(0.5)["logits"], written["logits"], atol=1e-5)


def test_adapters_are_tried_as_the_model_that_they_make(shuffled, exact, tmp_path):
    a, _ = shuffled(VIT)
    for name, targets in (("one", ["q_proj"]), ("other", ["fc1"])):
        train_adapter(a, tmp_path / name, targets)
    found = exact.alpha_search(
        [open_finetune(tmp_path / "one"), open_finetune(str(tmp_path / "other"))], MergeRule()
    ).at(1.0)
    assert found.direction == pytest.approx(1, abs=1e-4)


def test_alpha_is_lowered_where_b_would_move_far_in_another_direction(strange, both):
    """On a real stranger: the sum of two large changes moves B's outputs by more than the bound."""
    far = {"weights": (3.0, 3.0), "force_unrelated": True, **strange}
    plan = TransportPlan.between(Pair.open(strange["base"], strange["onto"]), strange["via"])
    whole = plan.alpha_search([open_finetune(one) for one in both], MergeRule.asked("sum", (3.0, 3.0))).at(
        1.0
    )
    assert whole.direction < SAME
    assert whole.reach > FARTHEST
    metadata = merge(both, **far).metadata()
    assert 0 < metadata["alpha"] < 1
    assert metadata["output_shift"]["reach"] <= FARTHEST
    assert metadata["output_shift"]["lowered"]["reach"] == pytest.approx(whole.reach, abs=1e-3)
    assert merge(both, alpha=1.0, **far).metadata()["alpha"] == 1.0


def test_a_chosen_alpha_scales_the_output(strange, both, seen):
    seen(0.3, 1.2)
    merged = merge(both, **strange)
    assert merged.metadata()["alpha"] == pytest.approx(0.5, abs=0.02)
    wanted = merge(both, alpha=merged.metadata()["alpha"], **strange).state_dict()
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def test_merged_adapters_are_checked_too(strange, seen, tmp_path):
    for name, targets in (("one", ["q_proj"]), ("other", ["fc1"])):
        train_adapter(strange["base"], tmp_path / name, targets)
    adapters = [tmp_path / "one", tmp_path / "other"]
    seen(0.3, 1.2)
    found, whole = merge(adapters, **strange), merge(adapters, alpha=1.0, **strange)
    assert found.metadata()["output_shift"]["lowered"]["alpha"] == 1.0
    for name, tensor in whole.state_dict().items():
        factor = found.metadata()["alpha"] if "lora_B" in name else 1.0
        assert torch.allclose(found.state_dict()[name], factor * tensor, atol=1e-6), name


def test_a_change_without_relation_is_refused_unless_asked_for(strange, both, seen):
    seen(0.01, 0.5)
    with pytest.raises(UselessResultError, match="would change in another direction than A's did") as refused:
        merge(both, **strange)
    assert "refine" not in refused.value.hint, "a merge has none"
    assert merge(both, force_unrelated=True, **strange).metadata()["alpha"] == 1.0
    assert "output_shift" not in merge(both, alpha=1.0, **strange).metadata()


def test_other_maps_are_not_checked(made, both, seen):
    a, b = made(VIT), made(VIT, 2)
    seen(0.01, 0.5)
    merged = merge(both, base=a, onto=b, via=align(a, b, method="naive"))
    assert merged.metadata()["alpha"] == 1.0
    assert "output_shift" not in merged.metadata()


def test_auto_goes_by_the_outputs_on_own_inputs_if_there_are_any(shuffled, exact, both, tmp_path):
    a, b = shuffled(VIT)
    asked = {"base": a, "onto": b, "via": exact.alignment, "alpha": "auto"}
    metadata = merge(both, **asked).metadata()
    assert metadata["alpha"] == 1.0
    assert metadata["output_shift"]["direction"] == pytest.approx(1, abs=1e-3)
    config = json.loads((a / "config.json").read_text())
    side, channels = config["image_size"], config.get("num_channels", 3)
    pixels = torch.randn(40, channels, side, side, generator=torch.Generator().manual_seed(1))
    save_file({"pixel_values": pixels}, tmp_path / "own.safetensors")
    own = merge(both, calibrate=tmp_path / "own.safetensors", **asked).metadata()
    assert "own.safetensors" in own["output_shift"]["probes"]


def test_on_the_command_line(cli, strange, both, seen, tmp_path):
    seen(0.3, 1.2)
    pi = strange["via"].save(tmp_path / "pi.safetensors")
    models = ("--base", strange["base"], "--onto", strange["onto"], "--via", pi)
    code, out, _ = cli("merge", *both, *models, "-o", tmp_path / "out")
    assert code == 0
    assert "α was lowered from 1" in out
    assert "--refine" not in out
    metadata = json.loads((tmp_path / "out" / "transfusion.json").read_text())
    assert metadata["alpha"] == pytest.approx(0.5, abs=0.02)
    code, _, err = cli("merge", "--from", tmp_path / "out", "-o", tmp_path / "again")
    assert code == 0, err
