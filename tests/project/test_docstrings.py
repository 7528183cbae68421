"""The examples in docstrings: every public name has one, and every one runs."""

from __future__ import annotations

import doctest
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import transfusion
from deepening import deepened
from small_models import CASES, finetuned
from tests.transport.test_adapter import train_adapter
from transfusion import families
from transfusion.transport.alpha import Alpha
from transfusion.verification.certify import certify
from transfusion.verification.drafting.propose import propose

PUBLIC = {name: getattr(transfusion, name) for name in transfusion.__all__ if name != "__version__"}
SHOWN = {**PUBLIC, "Alpha": Alpha, "certify": certify, "propose": propose}
METHODS = {"Alignment": ("load", "save", "inverse", "after"), "Model": ("open",), "Alpha": ("of",)}


def examples(name: str) -> list[doctest.DocTest]:
    """The docstrings with examples of a class and its methods, or of a function."""
    import transformers

    thing = SHOWN[name]
    home = sys.modules[thing.__module__]
    names = {**vars(home), "transfusion": transfusion, "transformers": transformers}
    found = doctest.DocTestFinder(exclude_empty=True).find(thing, name, home, names)
    return [test for test in found if test.examples]


@pytest.fixture(scope="module")
def prepared(made, tmp_path_factory) -> Path:
    """What the examples speak of: B is A with its units in another order."""
    import transformers

    place = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        shutil.copytree(made("vit-classifier"), "models/a")
        order = transfusion.align("models/a", "models/a", method="random", residual="tied", seed=3)
        transfusion.apply(order, "models/a").save("models/b")
        finetuned(CASES["vit-classifier"], Path("models/a"), Path("models/tuned"))
        finetuned(CASES["vit-classifier"], Path("models/a"), Path("models/tuned-again"), seed=8)
        _adapter("models/lora")
        shutil.copytree(made("llama"), "models/llama/a")
        train_adapter(made("llama"), Path("models/llama/lora"), ["q_proj"], task_type="CAUSAL_LM")
        load = transformers.ViTForImageClassification.from_pretrained
        deepened(load("models/a")).save_pretrained("models/deeper")
        Path("models/a/notes.txt").touch()
        shutil.copy(Path(__file__).parents[2] / "examples" / "tiny_talker.py", "mine.py")
        transfusion.align("models/a", "models/b", residual="tied").save("pi.safetensors")
        images = torch.randn(20, 3, 12, 12, generator=torch.Generator().manual_seed(0))
        save_file({"pixel_values": images, "labels": torch.arange(20) % 7}, "data.safetensors")
    return place


def _adapter(folder: str) -> None:
    import peft
    import transformers

    base = transformers.ViTForImageClassification.from_pretrained("models/a")
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    tuned.save_pretrained(folder)


@pytest.mark.parametrize("name", SHOWN)
def test_examples_show_what_happens(name, prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(families, "_registered", [])  # what an example registers is gone after it
    runner = doctest.DocTestRunner(verbose=False)
    shown: list[str] = []
    for test in examples(name):
        runner.run(test, out=shown.append)
    assert not runner.failures, "".join(shown)


@pytest.mark.parametrize("name", SHOWN)
def test_every_public_name_has_an_example(name):
    found = {test.name for test in examples(name)}
    assert name in found
    assert {f"{name}.{method}" for method in METHODS.get(name, ())} <= found
