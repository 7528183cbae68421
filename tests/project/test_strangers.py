"""Checkpoints as others write them: what real files of the zoo had, and ours never did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepening import deepened
from small_models import CASES, finetuned
from transfusion import align, predict, transport, verify
from transfusion.errors import ArchitectureError, MismatchError
from transfusion.matching import align as aligning
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.runtime.progress import Progress


def edited(model: Path, folder: Path, drop: str = "", **settings: object) -> Path:
    """Return a copy of a model without some tensors, and with other settings."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not drop or drop not in name}
    assert len(kept) < len(tensors) or not drop
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


class Noted(Progress):
    """Remembers the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_outputs_of_a_pooler_that_the_file_lacks_are_not_compared(made, tmp_path):
    a = edited(made("bert"), tmp_path / "a", drop="pooler")
    found = verify(a, via=align(a, a, method="random", residual="tied"))
    assert found.equal
    assert found.outputs == ("last_hidden_state",)


def test_a_file_without_the_head_that_makes_all_outputs_is_told_so(made, tmp_path):
    a = edited(made("bert-classifier"), tmp_path / "a", drop="classifier")
    with pytest.raises(
        ArchitectureError, match=r"every output depends on classifier\.weight, classifier\.bias"
    ):
        verify(a, via=align(a, a, method="random", residual="tied"))


@pytest.mark.parametrize("case", ["bert", "gpt2", "t5"])
def test_a_configuration_that_asks_for_all_layers_changes_no_proof(case, made, tmp_path):
    a = edited(made(case), tmp_path / "a", output_hidden_states=True, output_attentions=True)
    found = verify(a, via=align(a, a, method="random", residual="tied"))
    assert found.equal
    assert not [name for name in found.outputs if "states." in name or "attentions" in name]


def test_a_pooler_that_the_class_does_not_run_stays(made, tmp_path):
    a, b = (
        edited(
            made("albert-pretraining", seed),
            tmp_path / str(seed),
            "sop_",
            architectures=["AlbertForMaskedLM"],
        )
        for seed in (1, 2)
    )
    pi = align(a, b, method="functional")
    assert "pool" not in pi.maps
    assert "layer.0.x" in pi.maps
    assert predict(a, b, via=pi).axes


def test_a_family_that_repeats_its_block_is_refused_beside_others_before_anything_runs(made, monkeypatch):
    monkeypatch.setattr(aligning, "align_shapes", lambda *_: pytest.fail("it ran"))
    with pytest.raises(MismatchError, match="a albert, runs one block several times"):
        align(made("bert"), made("albert"), method="functional")


@pytest.mark.parametrize(
    ("case", "poor"), [("bert", "random tokens, which say little"), ("gpt2", "texts that it writes itself")]
)
def test_inputs_without_a_tokenizer_are_said_to_be_poor(case, poor, made):
    seen = Noted()
    align(made(case, 1), made(case, 2), method="functional", progress=seen)
    (found,) = {one for one in seen.warnings if "its inputs are" in one}
    assert poor in found
    assert "give your own with `calibrate`" in found


def test_auto_warns_where_models_cannot_be_run_and_keeps_its_verdict(made, tmp_path):
    a, b = (
        edited(made("bert", seed), tmp_path / str(seed), architectures=["UnheardModel"]) for seed in (1, 2)
    )
    seen = Noted()
    advice = align(a, b, goes_on=True, progress=seen).provenance.advice
    assert "UnheardModel" not in advice["text"]
    (found,) = {one for one in seen.warnings if one.startswith("only weights were compared")}
    assert "names a class UnheardModel" in found
    assert "correct 'architectures' in config.json" in found


def test_a_pooler_that_b_lacks_comes_with_the_head_of_the_fine_tune(made, tmp_path):
    """A B that was exported without its pooler, of another depth."""
    case = CASES["bert-classifier"]
    deeper = tmp_path / "deeper"
    CASES["bert"].store(deepened(CASES["bert"].build(2)), deeper)
    b = edited(deeper, tmp_path / "b", drop="pooler")
    tuned = finetuned(case, made("bert"), tmp_path / "tuned")
    moved = transport(tuned, base=made("bert"), onto=b, method="functional", force_unrelated=True)
    state = moved.state_dict()
    wanted = load_file(tuned / "model.safetensors")["classifier.weight"]
    assert torch.allclose(state["classifier.weight"], wanted), "it reads the pooler that came along"
    assert "bert.pooler.dense.weight" in state
    assert type(moved.module()).__name__ == "BertForSequenceClassification"


@pytest.mark.parametrize(("case", "name"), [("timm-vit", "logits"), ("timm-vit-bare", "output")])
def test_a_classifier_of_timm_has_logits_which_a_refinement_compares_as_answers(case, name, made):
    live = LiveModel.of(Model.open(made(case)))
    assert live.outputs().keys() == {name}
