"""Pairs of vision transformers: digits and clothes, small photographs, and a base with its successor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from experiments.pairs import data
from experiments.pairs.data import (
    CLOTHES,
    DIGITS,
    PHOTOGRAPHS,
    Examples,
)
from experiments.pairs.pair import OfAnother, Pair
from experiments.pairs.training import Recipe, fit


@dataclass(frozen=True)
class Shift:
    """What happens to images, in this order; noise and the hidden square differ from image to image."""

    grey: bool = False
    inverted: bool = False
    rotated: int = 0
    coarse: int = 1
    hidden: int = 0
    noise: float = 0.0

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Bytes to numbers around zero."""
        seen = images.float() / 255
        if self.grey:
            seen = seen.mean(1, keepdim=True).expand_as(seen)
        if self.inverted:
            seen = 1 - seen
        if self.rotated:
            seen = torch.rot90(seen, self.rotated // 90, (2, 3))
        if self.coarse > 1:
            small = nn.functional.avg_pool2d(seen, self.coarse)
            seen = nn.functional.interpolate(small, size=seen.shape[2:], mode="nearest")
        if self.hidden:
            corners = torch.randint(seen.shape[-1] - self.hidden + 1, (2, len(seen), 1), generator=generator)
            steps = torch.arange(seen.shape[-1])
            rows, columns = (steps >= corners) & (steps < corners + self.hidden)
            seen = seen.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.5)
        if self.noise:
            seen = seen + self.noise * torch.randn(seen.shape, generator=generator)
        return (seen - 0.5) / 0.25


@dataclass(frozen=True)
class ImageTask:
    """Images of some classes to be told from each other, shifted; the support is images as they are."""

    name: str
    about: str
    shift: Shift
    classes: tuple[int, int]
    support: tuple[int, int]
    tuning: Recipe


@dataclass(frozen=True, kw_only=True)
class ImagePair(Pair[ImageTask]):
    """Vision transformers that classify; fine-tuning leaves their heads alone, as in the paper."""

    per_package: int
    flips: bool = False

    @cached_property
    def parts(self) -> dict[str, Examples]:
        every = data.together(self.packages, self.per_package)
        half = (len(every) - self.tests) // 2
        return {
            "test": every[: self.tests],
            "a": every[self.tests : self.tests + half],
            "b": every[self.tests + half :],
        }

    def new_base(self, which: str, seed: int) -> Any:
        torch.manual_seed(own := self.seed_of(which, seed))
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**self.config))
        name = f"{self.name} {which}, seed {seed}"
        return self._taught(model, self.parts[which], Shift(), self.training, own, name)

    def new_tuned(self, base: Path, which: str, task: ImageTask, seed: int) -> Any:
        model = self.load(base)
        model.classifier.requires_grad_(False)
        known = self.among(self.parts[which], task.classes)
        name = f"{self.name} {which} {task.name}, seed {seed}"
        own = self.seed_of(which, seed) + 10
        return self._taught(model, known, task.shift, task.tuning, own, name, task.classes)

    def _taught(
        self,
        model: Any,
        known: Examples,
        shift: Shift,
        recipe: Recipe,
        seed: int,
        name: str,
        classes: tuple[int, int] | None = None,
    ) -> Any:
        first, last = classes or (0, self.config["num_labels"])

        def loss(generator: torch.Generator) -> Tensor:
            batch = known[torch.randint(len(known), (recipe.batch,), generator=generator)]
            seen = shift(batch.images, generator)
            if self.flips and torch.rand((), generator=generator) < 0.5:
                seen = seen.flip(-1)
            return nn.functional.cross_entropy(model(seen).logits[:, first:last], batch.labels - first)

        return fit(model, loss, recipe, seed=seed, name=name)

    def load(self, folder: Path) -> Any:
        return transformers.ViTForImageClassification.from_pretrained(folder).eval()

    def untouched(self, b: Any, tuned: Any) -> Any:
        return b

    def accuracy(self, model: Any, task: ImageTask) -> float:
        return self.right(model, task.classes, task.shift)

    def support(self, model: Any, b: Any, task: ImageTask) -> float:
        return self.right(model, task.support, Shift())

    def inputs(self, which: str, count: int) -> Mapping[str, Tensor]:
        return {"pixel_values": Shift()(self.parts[which].images[:count], torch.Generator())}

    def task_inputs(self, task: ImageTask, count: int) -> Mapping[str, Tensor]:
        known = self.among(self.parts["a"], task.classes)[:count]
        return {"pixel_values": task.shift(known.images, torch.Generator().manual_seed(8))}

    @torch.no_grad()
    def right(self, model: Any, classes: tuple[int, int], shift: Shift) -> float:
        """Percent of the tests of these classes, told from each other."""
        first, last = classes
        examples = self.among(self.parts["test"], classes)
        seen = shift(examples.images, torch.Generator().manual_seed(7))
        logits = torch.cat([model(batch).logits[:, first:last] for batch in torch.split(seen, 250)])
        return 100 * float((logits.argmax(-1) == examples.labels - first).float().mean())

    @staticmethod
    def among(examples: Examples, classes: tuple[int, int]) -> Examples:
        """Those of classes from the first to before the last."""
        first, last = classes
        return examples[(examples.labels >= first) & (examples.labels < last)]


MNIST = ImagePair(
    name="mnist",
    about="MNIST and Fashion-MNIST as 20 classes; ViT of 4 layers, width 96",
    packages=(DIGITS, CLOTHES),
    per_package=22_000,
    config={
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "intermediate_size": 192,
        "image_size": 28,
        "patch_size": 7,
        "num_channels": 1,
        "num_labels": 20,
        "initializer_range": 0.05,
    },
    training=Recipe(steps=1200, rate=2e-3),
    tests=4000,
    tasks=(
        ImageTask(
            "noisy-clothes",
            "clothes in noise; support: digits",
            Shift(noise=0.5),
            (10, 20),
            (0, 10),
            Recipe(200, 1e-3),
        ),
        ImageTask(
            "noisy-digits",
            "digits in noise; support: clothes",
            Shift(noise=0.6),
            (0, 10),
            (10, 20),
            Recipe(200, 1e-3),
        ),
        ImageTask(
            "hidden-digits",
            "digits with a grey square; support: clothes",
            Shift(hidden=14),
            (0, 10),
            (10, 20),
            Recipe(200, 1e-3),
        ),
    ),
)


CIFAR = ImagePair(
    name="cifar",
    about="CIFAR-10; ViT of 4 layers, width 128",
    packages=(PHOTOGRAPHS,),
    per_package=60_000,
    config={
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "image_size": 32,
        "patch_size": 8,
        "num_channels": 3,
        "num_labels": 10,
        "initializer_range": 0.05,
    },
    training=Recipe(steps=1200, rate=2e-3),
    tests=4000,
    flips=True,
    tasks=(
        ImageTask(
            "grey-noisy",
            "without colour, in noise; support: as they are",
            Shift(grey=True, noise=0.2),
            (0, 10),
            (0, 10),
            Recipe(200, 1e-3),
        ),
        ImageTask(
            "coarse",
            "8 × 8 pixels made one; support: as they are",
            Shift(coarse=8),
            (0, 10),
            (0, 10),
            Recipe(200, 1e-3),
        ),
        ImageTask(
            "inverted",
            "negatives; support: as they are",
            Shift(inverted=True),
            (0, 10),
            (0, 10),
            Recipe(200, 1e-3),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class OtherBase(OfAnother[ImageTask], ImagePair):
    """A of another pair, and a B of another shape."""


LARGER = OtherBase(
    name="larger",
    about="as mnist, but B is a ViT of 6 layers, width 128, with patches of 4 instead of 7",
    origin=MNIST,
    packages=MNIST.packages,
    per_package=MNIST.per_package,
    config=MNIST.config
    | {
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "patch_size": 4,
    },
    training=MNIST.training,
    tests=MNIST.tests,
    tasks=MNIST.tasks,
)


@dataclass(frozen=True, kw_only=True)
class Successors(OfAnother[ImageTask], ImagePair):
    """A of another pair, and a B that has gone on from it with images of its own."""

    going_on: Recipe

    def new_base(self, which: str, seed: int) -> Any:
        own, name = self.seed_of(which, seed), f"{self.name} {which}, seed {seed}"
        model = self.load(self.origin.base("a", seed))
        return self._taught(model, self.parts[which], Shift(), self.going_on, own, name)


SUCCESSORS = Successors(
    name="successors",
    about="as mnist, but B has gone on from A, on other images",
    origin=MNIST,
    going_on=Recipe(steps=300, rate=5e-4),
    packages=MNIST.packages,
    per_package=MNIST.per_package,
    config=MNIST.config,
    training=MNIST.training,
    tests=MNIST.tests,
    tasks=MNIST.tasks,
)
