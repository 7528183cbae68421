"""The small scale: everything is taught here, in minutes, from data that the registries hold."""

from __future__ import annotations

from functools import cache, partial

import torch

from experiments.pairs import images, passages
from experiments.pairs.clips import SmallClips, tokens
from experiments.pairs.data import Examples
from experiments.pairs.images import GROUPS, NAMES, TEMPLATES, Seen
from experiments.pairs.tasks import Shift
from experiments.questions import Shown
from experiments.settings import ImageTask, Lmc, Scale, TextTask
from experiments.tuning import Schedule
from transfusion.dataset import Dataset

TRAINED, TESTED = 6000, 2000
TEXTS = 8000
TUNING = Schedule(steps=250, rate=4e-4, batch=64)
READING = Schedule(steps=200, rate=4e-4, batch=64)


def shown(label: str, examples: Examples, names: tuple[str, ...], seen: Seen, seed: int) -> Shown:
    """Images as a task shows them, prepared for the model."""
    pixels = seen(examples.images, torch.Generator().manual_seed(seed))
    data = Dataset.of(label, {"pixel_values": pixels}, examples.labels)
    return Shown(data, names=names, templates=TEMPLATES)


def _task(
    paper: str, name: str, about: str, group: str, seen: Seen, *, trained: int = TRAINED, steps: int = 250
) -> ImageTask:
    @cache
    def part(which: str, count: int, seed: int) -> Shown:
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
def support() -> Shown:
    """Held-out images of all groups, as they are."""
    return shown("plain images", images.every("test")[:TESTED], NAMES, Seen(), 7)


SMALL = Scale(
    name="small",
    bases=SmallClips(),
    images=(
        _task(
            "EuroSAT",
            "turned photographs",
            "CIFAR-10 turned by 90°, as there is no up from above",
            "photographs",
            Seen(Shift(turned=90)),
        ),
        _task(
            "DTD",
            "noisy clothes",
            "Fashion-MNIST in noise, 40 images a class as in DTD",
            "clothes",
            Seen(Shift(noise=0.4)),
            trained=400,
            steps=120,
        ),
        _task(
            "GTSRB",
            "hidden clothes",
            "Fashion-MNIST behind a grey square of 14 pixels",
            "clothes",
            Seen(Shift(hidden=14)),
        ),
        _task("SVHN", "digits outdoors", "MNIST over CIFAR-10's photographs", "digits", Seen(over=0.6)),
    ),
    support=support,
    support_about="held-out MNIST, Fashion-MNIST and CIFAR-10, 30 classes",
    texts=(
        _text("QQP", "same words", "a passage and itself with words left out, or another one", "copy"),
        _text("SST2", "verdict", "does a review praise the film, by its last words", "verdict"),
        _text(
            "RTE", "ending", "the end of a review or its beginning, 2 500 examples", "ending", trained=2500
        ),
        _text("CoLA", "word order", "words in their order, or shuffled", "order"),
    ),
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
