"""The small scale: everything is taught here, in minutes, from data that the registries hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from experiments.pairs import images, passages
from experiments.pairs.clips import SmallClips, tokens
from experiments.pairs.data import Examples as ImageExamples
from experiments.pairs.images import GROUPS, NAMES, TEMPLATES, Seen
from experiments.pairs.vits import Shift
from experiments.settings import ImageTask, Lmc, Scale, Schedule, TextTask
from transfusion.data.dataset import Dataset
from transfusion.data.examples import Examples, ImageFile
from transfusion.evaluation.classes import Classes
from transfusion.evaluation.task import EvaluationData

TRAINED, TESTED = 6000, 2000
Show = Callable[[Tensor, torch.Generator], Tensor]
"""From bytes to numbers around zero."""
TEXTS = 8000
TUNING = Schedule(steps=250, rate=4e-4, batch=64)
READING = Schedule(steps=200, rate=4e-4, batch=64)


def shown(
    label: str, examples: ImageExamples, names: tuple[str, ...], seen: Show, seed: int
) -> EvaluationData:
    """Images as a task shows them, as pictures, and captions for their classes."""
    pixels = seen(examples.images, torch.Generator().manual_seed(seed))
    whole = (255 * (0.25 * pixels + 0.5)).round().clamp(0, 255).byte().permute(0, 2, 3, 1)
    pictures = [ImageFile(f"{label}, {number}", _png(image.numpy())) for number, image in enumerate(whole)]
    found = Examples(label, images=pictures, labels=examples.labels.tolist(), names=names)
    return EvaluationData(found, classes=Classes(label, names, TEMPLATES))


def _png(image: Any) -> bytes:
    written = BytesIO()
    Image.fromarray(image).save(written, "png", compress_level=1)
    return written.getvalue()


def _task(
    paper: str, name: str, about: str, group: str, seen: Seen, *, trained: int = TRAINED, steps: int = 250
) -> ImageTask:
    @cache
    def part(which: str, count: int, seed: int) -> EvaluationData:
        return shown(f"{name} ({which})", images.part(group, which)[:count], GROUPS[group], seen, seed)

    return ImageTask(
        paper,
        name,
        about,
        Schedule(steps=steps, rate=TUNING.rate, batch=TUNING.batch),
        partial(part, "a", trained, 11),
        partial(part, "test", TESTED, 7),
    )


def _text(paper: str, name: str, about: str, kind: str, *, trained: int = TEXTS) -> TextTask:
    @cache
    def part(which: str, count: int, seed: int) -> Dataset:
        texts, labels = passages.asked(kind, which, count, seed)
        return Dataset.of(f"{name} ({which})", {"input_ids": tokens(texts)}, torch.tensor(labels))

    return TextTask(
        paper, name, about, READING, 2, partial(part, "a", trained, 11), partial(part, "test", TESTED, 7)
    )


@cache
def support() -> EvaluationData:
    """Held-out images of all groups, as they are."""
    return shown("plain images", images.every("test")[:TESTED], NAMES, Seen(), 7)


SMALL = Scale(
    name="small",
    bases=SmallClips(),
    images=(
        _task(
            "EuroSAT",
            "turned photographs",
            "CIFAR-10 turned by 90° (from above, there is no up)",
            "photographs",
            Seen(Shift(rotated=90)),
        ),
        _task(
            "DTD",
            "noisy clothes",
            "Fashion-MNIST in noise, as few to learn from as in DTD (40 a class)",
            "clothes",
            Seen(Shift(noise=0.4)),
            trained=400,
            steps=120,
        ),
        _task(
            "GTSRB",
            "hidden clothes",
            "Fashion-MNIST with a grey square of 14 pixels in front",
            "clothes",
            Seen(Shift(hidden=14)),
        ),
        _task(
            "SVHN", "digits outdoors", "MNIST in front of CIFAR-10's photographs", "digits", Seen(over=0.6)
        ),
    ),
    support=support,
    support_about="held-out MNIST, Fashion-MNIST and CIFAR-10, 30 classes",
    texts=(
        _text("QQP", "same words", "a passage and itself with words left out, or another one", "copy"),
        _text("SST2", "verdict", "does a review praise the film, by its last words", "verdict"),
        _text(
            "RTE", "ending", "the end of a review or its beginning, 2 500 examples", "ending", trained=2500
        ),
        _text("CoLA", "little words", "a passage as it is, or without most of its little words", "grammar"),
    ),
    alphas=(0.01, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0),
    glance=1000,
    lmc=Lmc(
        about="two ViTs (4 layers × 128, patches of 8) taught CIFAR-10 for 5 epochs",
        vit={
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "image_size": 32,
            "patch_size": 8,
            "num_labels": 10,
        },
        epochs=5,
        rate=2e-3,
        batch=128,
        side=32,
        images=2000,
    ),
)
