"""Pairs of vision transformers: digits and clothes, small photographs, and a base with its successor."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn

from experiments.pairs import data
from experiments.pairs.berts import quiet
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
class Pencil(Shift):
    """Images drawn with a pencil: dark lines on white paper, where the brightness changes."""

    pressed: float = 0.5

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """By Sobel's filters, which look across and down."""
        across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
        grey = nn.functional.pad(images.float().mean(1, keepdim=True) / 255, (1,) * 4, mode="replicate")
        slopes = nn.functional.conv2d(grey, torch.stack([across, across.T])[:, None])
        paper = 1 - (self.pressed * slopes.norm(dim=1, keepdim=True)).clamp(max=1)
        return super().__call__((255 * paper).expand(images.shape), generator)


@dataclass(frozen=True)
class ImageTask:
    """Images of some classes to be told from each other, shifted; the support is images as they are."""

    group: ClassVar[str] = "corruption"
    name: str
    about: str
    shift: Shift
    classes: tuple[int, int]
    support: tuple[int, int]
    tuning: Recipe


@dataclass(frozen=True)
class StyleTask(ImageTask):
    """Images in a style of their own."""

    group: ClassVar[str] = "other"


@dataclass(frozen=True)
class HeadTask(ImageTask):
    """Images of a package in kinds of the task's own, each of some classes; the classes are those kinds.

    A fine-tune brings a head for them, which is carried over. The support is how well the features that the
    head reads tell classes of the pair from each other: is what is nearest to an image of its class?
    """

    group: ClassVar[str] = "other"
    package: str
    kinds: tuple[tuple[int, ...], ...]


@cache
def divided(packages: tuple[str, ...], count: int, tests: int) -> dict[str, Examples]:
    """So many images of each package, for tests and for either base."""
    every = data.together(packages, count)
    half = (len(every) - tests) // 2
    return {"test": every[:tests], "a": every[tests : tests + half], "b": every[tests + half :]}


@dataclass(frozen=True, kw_only=True)
class ImagePair(Pair[ImageTask]):
    """Vision transformers that classify; fine-tuning leaves their heads alone, as in the paper.

    Only a task that has kinds of its own brings a head for them.
    """

    per_package: int
    flips: bool = False

    @property
    def parts(self) -> dict[str, Examples]:
        return divided(self.packages, self.per_package, self.tests)

    def part(self, which: str, task: ImageTask) -> Examples:
        """What a task is about, of one part."""
        if not isinstance(task, HeadTask):
            return self.among(self.parts[which], task.classes)
        examples = divided((task.package,), self.per_package, self.tests)[which]
        kinds = torch.full((10,), -1)
        for number, classes in enumerate(task.kinds):
            kinds[list(classes)] = number
        room = (self.config["image_size"] - examples.images.shape[-1]) // 2
        shape = (-1, self.config["num_channels"], -1, -1)
        known = self.among(Examples(examples.images, kinds[examples.labels]), task.classes)
        return Examples(nn.functional.pad(known.images, (room,) * 4).expand(shape), known.labels)

    def new_base(self, which: str, seed: int) -> Any:
        torch.manual_seed(own := self.seed_of(which, seed))
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**self.config))
        name = f"{self.name} {which}, seed {seed}"
        return self._taught(model, self.parts[which], Shift(), self.training, own, name)

    def new_tuned(self, base: Path, which: str, task: ImageTask, seed: int) -> Any:
        torch.manual_seed(own := self.seed_of(which, seed) + 10)
        if isinstance(task, HeadTask):
            with quiet():
                model = transformers.ViTForImageClassification.from_pretrained(
                    base, num_labels=len(task.kinds), ignore_mismatched_sizes=True
                )
        else:
            model = self.load(base)
            model.classifier.requires_grad_(False)
        known = self.part(which, task)
        name = f"{self.name} {which} {task.name}, seed {seed}"
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
        """B, under the head that A's fine-tune brings if it has kinds of its own."""
        if tuned.config.num_labels == b.config.num_labels:
            return b
        model = deepcopy(tuned)
        model.vit.load_state_dict(b.vit.state_dict())
        return model

    def accuracy(self, model: Any, task: ImageTask) -> float:
        return self.right(model, self.part("test", task), task.classes, task.shift)

    def support(self, model: Any, b: Any, task: ImageTask) -> float:
        examples = self.among(self.parts["test"], task.support)
        if isinstance(task, HeadTask):
            return self.neighbours(model, examples)
        return self.right(model, examples, task.support, Shift())

    def inputs(self, which: str, count: int) -> Mapping[str, Tensor]:
        return {"pixel_values": Shift()(self.parts[which].images[:count], torch.Generator())}

    def task_inputs(self, task: ImageTask, count: int) -> Mapping[str, Tensor]:
        known = self.part("a", task)[:count]
        return {"pixel_values": task.shift(known.images, torch.Generator().manual_seed(8))}

    @torch.no_grad()
    def right(self, model: Any, examples: Examples, classes: tuple[int, int], shift: Shift) -> float:
        """Percent of examples of these classes, told from each other."""
        first, last = classes
        seen = shift(examples.images, torch.Generator().manual_seed(7))
        logits = torch.cat([model(batch).logits[:, first:last] for batch in torch.split(seen, 250)])
        return 100 * float((logits.argmax(-1) == examples.labels - first).float().mean())

    @torch.no_grad()
    def neighbours(self, model: Any, examples: Examples) -> float:
        """Percent of examples that have the class of the nearest other one, by the cosine of features."""
        batches = torch.split(Shift()(examples.images, torch.Generator()), 250)
        states = torch.cat([model.vit(batch).last_hidden_state[:, 0] for batch in batches])
        features = nn.functional.normalize(states)
        nearest = (features @ features.T).fill_diagonal_(-1).argmax(1)
        return 100 * float((examples.labels[nearest] == examples.labels).float().mean())

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
        StyleTask(
            "pencil",
            "drawn with a pencil; support: as they are",
            Pencil(),
            (0, 10),
            (0, 10),
            Recipe(200, 1e-3),
        ),
        HeadTask(
            "labelling",
            "does it fly, roll, float, live with us, or in the wild? support: neighbours of photographs",
            Shift(),
            (0, 5),
            (0, 10),
            Recipe(200, 1e-3),
            PHOTOGRAPHS,
            ((0, 2), (1, 9), (8,), (3, 5), (4, 6, 7)),
        ),
        HeadTask(
            "clothes",
            "eight kinds of clothes; support: neighbours of photographs",
            Shift(),
            (0, 8),
            (0, 10),
            Recipe(200, 1e-3),
            CLOTHES,
            ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)),
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
