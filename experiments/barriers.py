"""The barrier: two vision transformers learn CIFAR-10 from different seeds and in different orders.

Between them the loss of (1 − α)·π(A) + α·B is measured for every method, as in Section 4.2 of the paper.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.pairs import data
from experiments.pairs.data import CACHE, say
from experiments.pairs.training import Told
from experiments.settings import Lmc
from transfusion import align
from transfusion.data.dataset import Dataset
from transfusion.evaluation.barrier import Barriers, barrier
from transfusion.files.publishing import publish_file
from transfusion.model.model import Model

MODELS = CACHE / "connectivity"
Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Lesson:
    """Images to learn, and the model and the time that they deserve."""

    name: str
    training: Callable[[], Examples]
    test: Callable[[], Examples]
    vit: Mapping[str, Any]
    epochs: int
    rate: float = 2e-3
    flips: bool = False
    batch: int = 128
    side: int | None = None
    """How large images are made, in pixels; none for as they are."""

    def key(self, seed: int) -> str:
        """A name for a trained model that changes with everything that made it."""
        made_by = [dict(self.vit), self.epochs, self.rate, self.flips]
        if self.batch != 128 or self.side is not None:
            made_by += [self.batch, self.side]
        return f"{self.name}-{hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:8]}-seed-{seed}"

    def sized(self, images: Tensor) -> Tensor:
        """Images as the model takes them."""
        if self.side is None or self.side == images.shape[-1]:
            return images
        return nn.functional.interpolate(images, size=self.side, mode="bicubic", antialias=True)


def cifar10(lmc: Lmc) -> Lesson:
    """CIFAR-10, in the order and with the division that its authors gave it."""
    size = None if lmc.side == 32 else lmc.side
    return Lesson(
        "cifar10",
        cache(partial(_cifar10, test=False)),
        cache(partial(_cifar10, test=True)),
        lmc.vit,
        lmc.epochs,
        lmc.rate,
        flips=True,
        batch=lmc.batch,
        side=size,
    )


def _cifar10(*, test: bool) -> Examples:
    images, labels = data.ordered_photographs()
    part = slice(50_000, None) if test else slice(50_000)
    return (images[part].float() / 255 - 0.5) / 0.25, labels[part]


def digits() -> Lesson:
    """Scikit-learn's digits, of which every third is for the test."""

    def read(*, test: bool) -> Examples:
        from sklearn.datasets import load_digits

        bundle = load_digits()
        images = torch.tensor(bundle.images, dtype=torch.float32)[:, None] / 8 - 1
        part = (torch.arange(len(images)) % 3 == 0) == test
        return images[part], torch.tensor(bundle.target)[part]

    return Lesson(
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


def trained(lesson: Lesson, seed: int, device: str = "cpu") -> Path:
    """The folder of a model trained from this seed: from the cache, or after some minutes."""
    place = MODELS / lesson.key(seed)
    if not (place / "config.json").exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS) as staged:
            train(lesson, seed, device).save_pretrained(staged)
            shutil.copytree(staged, place, dirs_exist_ok=True)
    return place


def train(lesson: Lesson, seed: int, device: str) -> Any:
    """Plain supervised training; the seed decides the weights and the order."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**lesson.vit)).to(device)
    images, labels = lesson.training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.rate, weight_decay=0.05)
    steps = lesson.epochs * -(-len(images) // lesson.batch)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, lesson.rate, steps)
    model.train()
    told, step = Told(f"{lesson.name}, seed {seed}", steps), 0
    for _ in range(lesson.epochs):
        for batch in torch.split(torch.randperm(len(images), generator=generator), lesson.batch):
            seen = lesson.sized(images[batch].to(device))
            if lesson.flips and torch.rand((), generator=generator) < 0.5:
                seen = seen.flip(-1)
            loss = nn.functional.cross_entropy(model(seen).logits, labels[batch].to(device))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            rates.step()
            step += 1
            told.step(step, float(loss.detach()))
    return model.eval().cpu()


# ── the experiment ───────────────────────────────────────────────────────────────────────────


def test_file(lesson: Lesson, count: int) -> Path:
    """The first test images as a file of examples, such as `transfusion barrier --data` reads."""
    size = "" if lesson.side is None else f"-{lesson.side}"
    place = CACHE / "data" / f"{lesson.name}-test-{count}{size}.safetensors"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        images, labels = lesson.test()
        seen = lesson.sized(images[:count])
        tensors = {"pixel_values": seen.contiguous(), "labels": labels[:count].contiguous()}
        publish_file(place, lambda staged: save_file(tensors, staged), force=True)
    return place


def measured(paths: Sequence[str], a: Model, b: Model, examples: Dataset, points: int) -> Barriers:
    """The straight path, and one per method.

    ``transfusion:tied`` asks for one map on the whole stream, ``transfusion::rounded`` for rounded shortcuts.
    """
    found = barrier(a, b, data=examples, points=points)
    curves = dict(found.curves)
    for path in paths:
        name, residual, shortcuts = (*path.split(":"), "", "")[:3]
        say(f"aligning by {name}, and measuring …")
        pi = align(a, b, method=name, residual=residual or None)
        label = ", ".join(part for part in (name, residual, shortcuts) if part)
        way = barrier(a, b, via=pi, vanilla=False, data=examples, points=points, shortcuts=shortcuts or None)
        (curves[label],) = way.curves.values()
    return replace(found, curves=curves)


def barriers(lesson: Lesson, lmc: Lmc, paths: Sequence[str], seeds: tuple[int, int], device: str) -> Barriers:
    """Train or fetch both models, and measure all paths between them."""
    transformers.utils.logging.disable_progress_bar()
    a, b = (Model.open(trained(lesson, seed, device)) for seed in seeds)
    examples = replace(Dataset.load(test_file(lesson, lmc.images)), label=f"{lesson.name} (test)")
    return measured(paths, a, b, examples, lmc.points)
