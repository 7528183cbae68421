"""How far B moved from A, what B changed where an adapter acts, and the α that keeps an adapter's strength."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.transport.test_adapter import train_adapter
from transfusion.alignment.alignment import Alignment
from transfusion.matching.advice import OUTSIDE, describe_drift
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.transport.adapters.drift import describe_adapter_drift
from transfusion.transport.transport import transport

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


@pytest.fixture
def adapter(made, tmp_path) -> tuple[Path, Path]:
    """A small Llama and a LoRA of it."""
    base = made("llama")
    train_adapter(base, tmp_path / "lora", TARGETS)
    return base, tmp_path / "lora"


def changed(base: Path, folder: Path, change) -> Path:
    """Copy a model, with every tensor changed by a function of its name and value."""
    shutil.copytree(base, folder)
    file = folder / "model.safetensors"
    tensors = {name: change(name, value).contiguous() for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def unmoved(a: Path, b: Path) -> Alignment:
    return align(a, b, method="naive")


def drift_of(lora: Path, a: Path, b: Path, via: Alignment | None = None) -> dict:
    return transport(lora, base=a, onto=b, via=via or unmoved(a, b)).metadata()["drift"]


def test_a_shuffled_base_has_not_moved_under_its_own_alignment(adapter, shuffled, aligned):
    _, lora = adapter
    a, b = shuffled("llama")
    found = drift_of(lora, a, b, aligned(a, b))
    assert found["moved"] == pytest.approx(0, abs=1e-6)
    assert found["overwritten"] == 0
    assert found["alpha"] == pytest.approx(1, abs=1e-5)
    without = drift_of(lora, a, b)
    assert without["moved"] > 0.5, "by the identity, a shuffled base is far away"


def test_a_base_that_has_the_adapter_already_contains_it(adapter, tmp_path):
    base, lora = adapter
    merged = transport(lora, base=base, onto=base, via=unmoved(base, base), alpha=2.0, full=True)
    merged.save(tmp_path / "twice")
    found = drift_of(lora, base, tmp_path / "twice")
    assert found["contained"] == pytest.approx(2, rel=1e-4)
    assert found["overwritten"] == pytest.approx(1, rel=1e-4), "B went twice as far in every direction"
    assert found["moved"] == pytest.approx(2 * found["strength"], rel=1e-4)
    assert found["blocks"].keys() == {"layers.0", "layers.1", "layers.2"}


def test_bases_in_double_precision_are_compared_too(adapter, tmp_path):
    base, lora = adapter
    wide = changed(base, tmp_path / "wide", lambda name, value: value.double())
    found = drift_of(lora, wide, wide)
    assert (found["moved"], found["overwritten"], found["alpha"]) == (0, 0, 1)


def test_the_size_of_a_small_change_is_told_block_by_block(adapter, tmp_path):
    base, lora = adapter
    b = changed(base, tmp_path / "b", lambda name, value: value * (1.01 if ".layers.1." in name else 1))
    found = drift_of(lora, base, b)
    assert {name: block["moved"] for name, block in found["blocks"].items()} == {
        "layers.0": 0,
        "layers.1": pytest.approx(0.01, rel=1e-3),
        "layers.2": 0,
    }
    assert found["overwritten"] == 0, "the adapter's own change is larger everywhere"


def test_auto_keeps_the_relative_strength_of_an_adapter_whose_models_are_too_large_to_run(
    adapter, tmp_path, monkeypatch
):
    """B's block 1 is one and a half times as large as A's."""
    base, lora = adapter
    larger = changed(base, tmp_path / "b", lambda name, value: value * (1.5 if ".layers.1." in name else 1))
    monkeypatch.setattr("transfusion.running.streaming.device_memory", lambda device: 1000)
    moved = transport(lora, base=base, onto=larger, method="naive", alpha="auto", output=tmp_path / "moved")
    assert "in float32, and there are 1.0 kB" in moved.metadata()["output_shift"]["not_tried"]
    assert moved.moved_adapter.alpha.at("layers.1.mlp.down_proj.weight") == pytest.approx(1.5, rel=1e-5)
    assert moved.moved_adapter.alpha.at("layers.0.mlp.down_proj.weight") == pytest.approx(1, rel=1e-5)
    was, is_now = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("lora", "moved"))
    ups = [key for key in was if "layers.1." in key and "lora_B" in key]
    assert ups
    for key in ups:
        assert (is_now[key] - 1.5 * was[key]).abs().max() < 1e-6


def test_align_tells_how_far_a_descendant_moved(made, tmp_path, cli):
    base = made("llama")
    b = changed(base, tmp_path / "b", lambda name, value: value * (1.02 if ".layers.0." in name else 1))
    _, out, _ = cli("align", base, b, "-o", tmp_path / "pi.safetensors", "--json")
    drift = json.loads(out)["advice"]["drift"]
    assert drift["layers.0"] == pytest.approx(0.02, rel=1e-3)
    assert drift["layers.1"] == drift[OUTSIDE] == 0
    assert "most in layers.0" in describe_drift(drift)
    _, out, _ = cli("align", base, b, "-o", tmp_path / "again.safetensors")
    assert "B's weights differ from A's by" in out


def test_an_adapter_whose_tensors_stay_as_they_are_fits_b_as_it_is(adapter, shuffled, tmp_path, cli):
    base, lora = adapter
    near = changed(base, tmp_path / "b", lambda name, value: value * 1.02)
    _, out, _ = cli("transport", lora, "--base", base, "--onto", near, "-o", tmp_path / "moved")
    was, is_now = (load_file(folder / "adapter_model.safetensors") for folder in (lora, tmp_path / "moved"))
    assert all(bool((was[key] == is_now[key]).all()) for key in was)
    first = out.splitlines()[0]
    assert (
        first
        == f"the fine-tune fits {near} as it is: all of its {len(was)} tensors are unchanged, with α = 1"
    )
    assert "B's weights differ from A's by 2.0% in every block; the adapter changes A's by" in out
    _, far = shuffled("llama")
    for b, more in ((far, ()), (near, ("--alpha", 0.5)), (near, ("--dtype", "float16"))):
        _, out, _ = cli(
            "transport", lora, "--base", base, "--onto", b, "-o", tmp_path / "x", "--force", *more
        )
        assert out.startswith(f"{len(was)} tensors moved onto {b} with α = "), more


def test_what_b_changed_is_told_in_plain_sentences():
    block = {"moved": 0.1, "strength": 0.02, "overwritten": 0.0, "contained": 0.0, "alpha": 1.0}
    drift = {**block, "blocks": {"layers.0": {**block, "moved": 0.09999}, "layers.1": block}}
    assert describe_adapter_drift(drift) == [
        "where the adapter acts, B's weights differ from A's by 10.0% in every block; the adapter changes A's"
        " by 2.0%",
        "in every direction of the adapter, B changed less than the adapter does",
    ]
    drift |= {"overwritten": 0.12, "contained": -0.3}
    assert describe_adapter_drift(drift)[1:] == [
        "in the directions of 12% of the adapter, B changed more than the adapter does",
        "B's own change goes the other way, and undoes 30% of the adapter",
    ]
    assert describe_drift({"layers.0": 0.1}) == "B's weights differ from A's by 10.0%"
    assert describe_drift({"layers.0": 0.1, "layers.1": 0.2}) == (
        "B's weights differ from A's by 10.0% to 20.0%, most in layers.1"
    )


def test_kinds_without_directions_of_low_rank_go_by_the_size_of_weights(made, tmp_path):
    import peft

    from transfusion.running.live_model import LiveModel

    base = made("llama")
    module = LiveModel.of(Model.open(base)).module.float()
    tuned = peft.get_peft_model(module, peft.LoHaConfig(r=2, alpha=2, target_modules=["down_proj"]))
    for name, parameter in tuned.named_parameters():
        if "hada" in name:
            parameter.data.normal_()
    tuned.save_pretrained(tmp_path / "loha")
    b = changed(base, tmp_path / "b", lambda name, value: value * 1.25)
    found = drift_of(tmp_path / "loha", base, b)
    assert found["overwritten"] is None
    assert found["alpha"] == pytest.approx(1.25, rel=1e-5)
