"""How much of a fine-tune is found in B's outputs, α from that, and what turned maps predict."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned
from tests.transport.test_adapter import train_adapter
from transfusion import align, predict, transport
from transfusion.errors import AlignmentError, SettingError
from transfusion.model.model import Model
from transfusion.model.pair import Pair
from transfusion.running.streaming import RunningModel
from transfusion.runtime.resources import Resources
from transfusion.transport.alpha import Alpha, balanced_alpha
from transfusion.transport.alpha_on_probes import AlphaSearch, OutputShift
from transfusion.transport.finetunes import open_finetune
from transfusion.transport.plan import TransportPlan
from transfusion.transport.record import OutputRecord


@pytest.fixture(scope="module")
def tuned(made, tmp_path_factory):
    """A fine-tune of the tiny ViT that changes it a little."""
    return finetuned(CASES["vit-classifier"], made("vit-classifier"), tmp_path_factory.mktemp("t") / "tuned")


@pytest.fixture(scope="module")
def exact(shuffled):
    """The way from A to B, which is A with its units in another order."""
    a, b = shuffled("vit-classifier")
    return TransportPlan.between(Pair.open(a, b), align(a, b))


@pytest.fixture(scope="module")
def strange(made):
    """The way to a B that has nothing to do with A."""
    a, b = made("vit-classifier"), made("vit-classifier", 2)
    return TransportPlan.between(Pair.open(a, b), align(a, b, method="naive"))


def test_everything_arrives_where_nothing_is_lost(exact, tuned):
    found = exact.alpha_search([open_finetune(tuned)]).at(1.0)
    assert found.direction == pytest.approx(1, abs=1e-5)
    assert found.size == pytest.approx(1, abs=1e-4)
    assert found.reach > 0.01, "the fine-tune does something"


def test_nothing_of_it_arrives_on_a_stranger(strange, tuned):
    assert abs(strange.alpha_search([open_finetune(tuned)]).at(1.0).direction) < 0.5


def _inputs(plan: TransportPlan) -> dict[str, object]:
    return {"base": plan.a.checkpoint.root, "onto": plan.b.checkpoint.root, "via": plan.alignment}


def test_b_itself_is_at_alpha_zero(exact, tuned):
    found = exact.alpha_search([open_finetune(tuned)]).at(0.0)
    assert (found.size, found.reach) == (0.0, 0.0)


def test_what_was_rehearsed_is_what_is_written(exact, tuned):
    alpha_search = exact.alpha_search([open_finetune(tuned)])
    outputs = alpha_search._at(0.5)
    module = transport(tuned, **_inputs(exact), alpha=0.5).module().eval()
    assert torch.allclose(
        outputs["logits"],
        alpha_search._run(RunningModel(module, exact.b.family), alpha_search.batches)["logits"],
        atol=1e-5,
    )


def test_alpha_is_one_where_nothing_is_lost(exact, tuned):
    moved = transport(tuned, **_inputs(exact), alpha="auto")
    metadata = moved.metadata()
    assert metadata["alpha"] == 1.0
    assert metadata["output_shift"]["direction"] == pytest.approx(1, abs=1e-3)
    assert "overlapping shapes" in metadata["output_shift"]["probes"]


def _rehearsed(arrivals: dict[float, tuple[float, float]]) -> AlphaSearch:
    """A rehearsal that sees what it is told: by α, the direction and the size."""
    one = AlphaSearch.__new__(AlphaSearch)
    one.at = lambda alpha: OutputShift(alpha, *arrivals[alpha], reach=alpha)  # type: ignore[method-assign]
    return one


def test_more_than_one_only_where_that_turns_the_change_towards_that_of_a():
    steps = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    rising = {alpha: (0.3 + 0.1 * alpha, 0.3 * alpha) for alpha in steps}
    assert _rehearsed(rising).best().alpha == 2.0
    assert _rehearsed({alpha: (0.1 + 0.3 * alpha, 0.7 * alpha) for alpha in steps}).best().alpha == 1.25
    hardly = {alpha: (0.5 + 0.02 * alpha, 0.3 * alpha) for alpha in steps}
    assert _rehearsed(hardly).best().alpha == 1.0, "what is gained is not worth it"
    falling = {alpha: (0.5 - 0.1 * alpha, 0.3 * alpha) for alpha in steps}
    assert _rehearsed(falling).best().alpha == 1.0
    doubtful = {alpha: (0.1 * alpha, 0.3 * alpha) for alpha in steps}
    assert _rehearsed(doubtful).best().alpha == 1.0, "what arrives may be something else"
    too_much = {alpha: (0.5 - 0.1 * alpha, 2 * alpha) for alpha in steps}
    assert _rehearsed(too_much).best().alpha == 0.5, "B would move further than A was moved"
    far_too_much = {alpha: (0.5, 8 * alpha) for alpha in steps}
    assert _rehearsed(far_too_much).best().alpha == 0.25, "as little as there is"


def test_a_bound_on_how_far_outputs_move_is_kept(exact, tuned):
    alpha_search = exact.alpha_search([open_finetune(tuned)])
    whole = alpha_search.at(1.0).reach
    for share in (0.5, 0.1):
        found = alpha_search.within(share * whole, 1.0)
        assert found.reach <= share * whole
        assert found.reach > 0.9 * share * whole, "no less than the bound allows"
    assert alpha_search.within(2 * whole, 1.0).alpha == 1.0


def test_keep_support_reaches_the_output(exact, tuned):
    whole = exact.alpha_search([open_finetune(tuned)]).at(1.0).reach
    metadata = transport(tuned, **_inputs(exact), keep_support=0.3 * whole).metadata()
    assert 0.1 < metadata["alpha"] < 0.6
    assert metadata["output_shift"]["reach"] <= 0.3 * whole


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"keep_support": 0.0}, "it must be a number above 0"),
        ({"keep_support": -1.0}, "it must be a number above 0"),
        ({"keep_support": 0.1, "alpha": {"encoder.*": 0.5}}, "α was given for every layer"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(exact, tuned, asked, message):
    with pytest.raises(SettingError, match=message):
        transport(tuned, **_inputs(exact), **asked)


def test_an_adapter_is_tried_as_the_model_that_it_makes(shuffled, tmp_path):
    a, b = shuffled("vit-classifier")
    train_adapter(a, tmp_path / "lora", ["q_proj", "v_proj", "fc1"])
    plan = TransportPlan.between(Pair.open(a, b), align(a, b))
    found = plan.alpha_search([open_finetune(tmp_path / "lora")]).at(1.0)
    assert found.direction == pytest.approx(1, abs=1e-4)
    assert plan.choose_alpha("auto", [open_finetune(tmp_path / "lora")], OutputRecord())[0] == Alpha(1.0)


def test_a_head_that_a_does_not_have_counts_as_it_is(made, shuffled, tmp_path):
    a, b = shuffled("bert")
    tuned = finetuned(CASES["bert-classifier"], a, tmp_path / "tuned")
    alpha_search = TransportPlan.between(Pair.open(a, b), align(a, b)).alpha_search([open_finetune(tuned)])
    assert "logits" in alpha_search.new
    assert alpha_search.at(1.0).direction == pytest.approx(1, abs=1e-4)


def test_weights_alone_decide_where_models_cannot_be_run(made, tmp_path):
    files = {}
    for name, seed in (("a", 1), ("b", 2)):
        state = load_file(made("bert", seed) / "model.safetensors")
        save_file(state, files.setdefault(name, tmp_path / f"{name}.safetensors"), {"format": "pt"})
    config = json.loads((made("bert") / "config.json").read_text())
    config["architectures"] = ["UnheardModel"]
    a, b = (Model.open(files[name], config=config) for name in "ab")
    tuned = finetuned(CASES["bert"], made("bert"), tmp_path / "tuned")
    moved = transport(tuned, base=a, onto=b, via=align(a, b, method="naive"), alpha="auto")
    metadata = moved.metadata()
    assert "names a class UnheardModel" in metadata["output_shift"]["not_tried"]
    assert metadata["alpha"] == balanced_alpha(a, b).as_json()


# ── what maps predict ────────────────────────────────────────────────────────────────────────


def test_an_exact_move_predicts_everything(shuffled):
    a, b = shuffled("vit-classifier")
    found = predict(a, b, via=align(a, b))
    assert found.holds
    assert found.mean.found == pytest.approx(1, abs=1e-5)
    assert found.mean.identity < 0.9
    assert {"layer.0.head", "layer.0.ffn", "layer.0.x"} <= found.axes.keys()


def test_a_move_to_nowhere_predicts_nothing(made):
    a, b = made("vit-classifier"), made("vit-classifier", 2)
    found = predict(a, b, via=align(a, b, method="random"))
    assert found.mean.found < 0.2


def test_predictions_are_for_the_models_that_pi_was_made_for(made, shuffled):
    a, b = shuffled("vit-classifier")
    with pytest.raises(AlignmentError, match="made for"):
        predict(a, made("vit-classifier", 2), via=align(a, b))


def test_verify_tells_what_turned_maps_predict(cli, shuffled, tmp_path):
    a, b = shuffled("vit-classifier")
    pi = align(a, b, method="functional").save(tmp_path / "pi.safetensors")
    code, out, _ = cli("verify", a, "--via", pi)
    assert code == 0
    assert "100% of B's activations are predicted" in out
    assert "layer.0.head" in out
    code, out, _ = cli("verify", a, "--via", pi, "--onto", b, "--json")
    found = json.loads(out)
    assert (code, found["holds"]) == (0, True)
    assert found["axes"]["layer.1.ffn"]["found"] == pytest.approx(1, abs=1e-4)


def test_verify_fails_where_nothing_is_predicted(cli, made, tmp_path):
    a, b = made("vit-classifier"), made("vit-classifier", 2)
    pi = align(a, b, method="functional")
    for map_ in pi.maps.values():  # every unit turned to its opposite
        if map_.values.dtype.kind == "f":
            object.__setattr__(map_, "values", -map_.values)
    pi.save(tmp_path / "pi.safetensors")
    code, _, err = cli("verify", a, "--via", tmp_path / "pi.safetensors")
    assert code == 3
    assert "π does not predict B's activations" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["transport", "--method", "guarded", "--calibrate", "file.txt"],
        ["merge", "--method", "guarded", "--calibrate", "file.txt"],
    ],
)
def test_inputs_that_nothing_would_look_at_are_refused(cli, shuffled, tuned, tmp_path, arguments):
    a, b = shuffled("vit-classifier")
    verb, *flags = arguments
    code, _, err = cli(verb, tuned, "--base", a, "--onto", b, "-o", tmp_path / "out", *flags)
    assert code == 2
    assert "--calibrate: nothing would use these inputs" in err.replace("\n", " ")


def test_alpha_and_calibration_on_the_command_line(cli, shuffled, tuned, tmp_path):
    a, b = shuffled("vit-classifier")
    config = json.loads((a / "config.json").read_text())
    side, channels = config["image_size"], config.get("num_channels", 3)
    pixels = torch.randn(40, channels, side, side, generator=torch.Generator().manual_seed(1))
    save_file({"pixel_values": pixels}, tmp_path / "own.safetensors")
    code, out, _ = cli(
        *("transport", tuned, "--base", a, "--onto", b, "-o", tmp_path / "out"),
        *("--method", "functional", "--alpha", "auto", "--calibrate", tmp_path / "own.safetensors"),
    )
    assert code == 0
    assert "a cosine of 1.00 with the change of A's" in out
    metadata = json.loads((tmp_path / "out" / "transfusion.json").read_text())
    assert metadata["alignment"]["options"]["functional"]["calibrate"].endswith("own.safetensors")
    code, _, err = cli("transport", "--from", tmp_path / "out", "-o", tmp_path / "again")
    assert code == 0, err


def test_own_inputs_are_for_the_alignment_too(shuffled, tuned, tmp_path):
    a, b = shuffled("vit-classifier")
    config = json.loads((a / "config.json").read_text())
    side, channels = config["image_size"], config.get("num_channels", 3)
    pixels = torch.randn(40, channels, side, side, generator=torch.Generator().manual_seed(1))
    save_file({"pixel_values": pixels}, own := tmp_path / "own.safetensors")
    moved = transport(tuned, base=a, onto=b, method="functional", calibrate=own)
    assert moved.pi.provenance.options["functional"]["calibrate"] == str(own)
    assert "own.safetensors" in moved.pi.provenance.advice["probes"]
    assert "without training and without labels" in moved.texts(moved.metadata())["README.md"]
    held_out = predict(a, b, via=moved.pi, calibrate=own)
    advice = moved.pi.provenance.advice
    assert held_out.mean.found == pytest.approx(advice["found"], abs=1e-6), "the same inputs were held out"
    with pytest.raises(SettingError, match="nothing would use these inputs"):
        transport(tuned, base=a, onto=b, method="naive", calibrate=own)


@pytest.mark.parametrize("adapter", [False, True])
def test_alpha_is_the_same_in_the_memory_of_a_unit(adapter, exact, tuned, tmp_path):
    """Unit by unit, the moved fine-tune is written to a temporary folder, and read together with B."""
    finetune = tuned
    if adapter:
        finetune = tmp_path / "adapter"
        train_adapter(exact.a.checkpoint.root, finetune, ["q_proj", "v_proj"])
    limited = replace(exact, resources=Resources(memory=2 * 10**9))
    whole, by_layer = (plan.alpha_search([open_finetune(finetune)]) for plan in (exact, limited))
    assert by_layer.run_config.by_layer
    for alpha in (0.5, 1.0):
        assert by_layer.at(alpha) == whole.at(alpha)
    folder = by_layer._folder
    assert (folder / "moved").is_dir()
    del by_layer
    assert not folder.exists(), "it goes with the search"
