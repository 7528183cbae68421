"""Training, and keeping what was trained under a name that changes with everything that made it."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.pairs.data import CACHE

MODELS = CACHE / "transfer"
FORMAT = 1
"""Part of every key: to be raised when the code changes what it makes from the same settings."""

say = partial(print, file=sys.stderr, flush=True)
Loss = Callable[[torch.Generator], Tensor]


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
    since, recent = time.monotonic(), []
    for step in range(1, recipe.steps + 1):
        value = loss(generator)
        optimizer.zero_grad()
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rates.step()
        recent.append(float(value.detach()))
        if step % 200 == 0 or step == recipe.steps:
            mean = sum(recent) / len(recent)
            say(f"{name}: step {step} of {recipe.steps}, loss {mean:.3f}, {time.monotonic() - since:.0f} s")
            recent.clear()
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
