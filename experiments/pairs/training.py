"""Training, and keeping what was trained under a name that changes with everything that made it."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.pairs.data import CACHE, say

MODELS = CACHE / "transfer"
FORMAT = 1
"""Part of every key: to be raised when the code changes what it makes from the same settings."""

Loss = Callable[[torch.Generator], Tensor]


SILENCE = 10.0
"""The most seconds without a word from a training."""


class Told:
    """Tells how far a training is: at its first step, then every few seconds, and at its last."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.since = time.monotonic()
        self.last: float | None = None
        self.recent: list[float] = []

    def step(self, step: int, loss: float) -> None:
        """Take the loss of a step, counted from 1; the mean of those since the last line is told."""
        now = time.monotonic()
        self.recent.append(loss)
        if self.last is None or now - self.last >= SILENCE or step == self.steps:
            mean = sum(self.recent) / len(self.recent)
            say(f"{self.name}: step {step} of {self.steps}, loss {mean:.3f}, {now - self.since:.0f} s")
            self.last = now
            self.recent.clear()


@dataclass(frozen=True)
class Recipe:
    """How long, how fast, and how many examples at a time."""

    steps: int
    rate: float
    batch: int = 128
    decay: float = 0.05


def fit(model: Any, loss: Loss, recipe: Recipe, *, seed: int, name: str) -> Any:
    """Follow a loss that draws its own examples; parameters that are frozen stay."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.rate, weight_decay=recipe.decay)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, recipe.steps, pct_start=0.15)
    model.train()
    told = Told(name, recipe.steps)
    for step in range(1, recipe.steps + 1):
        value = loss(generator)
        optimizer.zero_grad()
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rates.step()
        told.step(step, float(value.detach()))
    return model.eval()


def key(name: str, made_by: Mapping[str, Any]) -> str:
    """A readable name with a digest of all that decided the result."""
    digest = hashlib.sha256(json.dumps([FORMAT, dict(made_by)], sort_keys=True).encode()).hexdigest()
    return f"{name}-{digest[:10]}"


def kept(key: str, make: Callable[[], Any], folder: Path = MODELS) -> Path:
    """The folder of a model: from the cache, or after it is made."""
    place = folder / key
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as staged:
            make().save_pretrained(staged)
            shutil.copytree(staged, unfinished := Path(f"{place}.unfinished"), dirs_exist_ok=True)
            unfinished.rename(place)
    return place
