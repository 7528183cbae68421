"""How tiny random models are made, by their own libraries.

Head size, width, MLP size, group counts and vocabulary all differ, so that no coincidence of sizes can
hide a mistake; biases and norm weights are far from their defaults.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transfusion.verification.certify import randomise


def written_by_us(folder: Path, files: dict[str, str]) -> Path:
    """A folder that looks like an older output of the program."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    listed = {"transfusion": "0", "contents": [*files, "transfusion.json"]}
    (folder / "transfusion.json").write_text(json.dumps(listed))
    return folder


@dataclass(frozen=True)
class Case:
    """One class of model: how to make it, and what it is called."""

    name: str
    make: Callable[[], Any]
    family: str
    keep: Callable[[Any, Path], None] = lambda model, folder: model.save_pretrained(folder)
    """Saves a live model as its own library does."""

    def build(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return randomise(self.make(), seed).eval()

    def save(self, folder: Path, seed: int) -> Path:
        return self.store(self.build(seed), folder)

    def store(self, model: Any, folder: Path) -> Path:
        self.keep(model, folder)
        return folder


def finetuned(case: Case, base: Path, folder: Path, seed: int = 7) -> Path:
    """A model of this class that continues from a base: every shared tensor a little changed."""
    from transfusion.architecture.naming import Naming
    from transfusion.model.model import Model

    origin = Model.open(base)
    naming = Naming(origin.family)
    model = case.build(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if (ours := naming.canonical(name)) in origin.names:
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(origin.read(ours) + noise)
    return case.store(model, folder)


def transformers_model(model_class: str, config_class: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))


def case(name: str, family: str, model: str, config: str, settings: dict[str, Any], **more: Any) -> Case:
    """A class of transformers with a configuration."""
    return Case(name, partial(transformers_model, model, config, **{**settings, **more}), family)
