"""The pairs of bases, the tasks that one of each pair learns, and how well a model does on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.pairs import data
from experiments.pairs.data import (
    CLOTHES,
    DIGITS,
    MASK,
    PAD,
    PHOTOGRAPHS,
    REVIEWS,
    SPECIAL,
    TEACHER,
    Examples,
    Texts,
)
from experiments.pairs.training import MODELS, Recipe, fit, kept, key
from transfusion.writer import publish_file

STARTS = {"a": 1, "b": 2}
"""Added to a hundred times the seed: where the two bases of a pair start from."""


@dataclass(frozen=True)
class Shift:
    """What happens to images, in this order; noise and the hidden square differ from image to image."""

    grey: bool = False
    inverted: bool = False
    turned: int = 0
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
        if self.turned:
            seen = torch.rot90(seen, self.turned // 90, (2, 3))
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


@dataclass(frozen=True)
class TextTask:
    """Is the review a good one, by its end or (``opening``) its beginning? Words may be dropped."""

    name: str
    about: str
    tuning: Recipe
    opening: bool = False
    dropped: float = 0.0


T = TypeVar("T", ImageTask, TextTask)


@dataclass(frozen=True, kw_only=True)
class Pair(ABC, Generic[T]):
    """Two bases of one architecture that share neither seed nor data, and tasks for them.

    Of the data, as many examples as are asked for are for tests, and half of the others for each base.
    """

    name: str
    about: str
    config: dict[str, Any]
    packages: tuple[str, ...]
    training: Recipe
    tests: int
    tasks: tuple[T, ...]

    # What a kind of model does for itself

    @abstractmethod
    def new_base(self, which: str, seed: int) -> Any:
        """Train a base."""

    @abstractmethod
    def new_tuned(self, base: Path, which: str, task: T, seed: int) -> Any:
        """Fine-tune a base with what it was trained on."""

    @abstractmethod
    def load(self, folder: Path) -> Any:
        """A model, of the class that it was saved as."""

    @abstractmethod
    def untouched(self, b: Any, tuned: Any) -> Any:
        """B for the task, before anything moves."""

    @abstractmethod
    def accuracy(self, model: Any, task: T) -> float:
        """Percent right on the task, on data that nobody was trained on."""

    @abstractmethod
    def support(self, model: Any, b: Any, task: T) -> float:
        """Percent right on what B could do before."""

    @abstractmethod
    def inputs(self, which: str, count: int) -> Mapping[str, Tensor]:
        """Unlabelled, unshifted inputs of one base's own half, as its model takes them."""

    # What all have in common

    def base(self, which: str, seed: int) -> Path:
        """The folder of A or B; it is trained if it is not there."""
        return kept(self._base_key(which, seed), lambda: self.new_base(which, seed))

    def tuned(self, which: str, task: T, seed: int) -> Path:
        """The folder of a base's fine-tune; it is trained if it is not there."""
        name = f"{self.name}-{which}-{task.name}-seed-{seed}"
        made_by = asdict(task) | {"base": self._base_key(which, seed)}
        for harmless in ("about", "support"):
            made_by.pop(harmless, None)
        return kept(key(name, made_by), lambda: self.new_tuned(self.base(which, seed), which, task, seed))

    def _base_key(self, which: str, seed: int) -> str:
        made_by = asdict(self) | {"seed": self.seed_of(which, seed)}
        for harmless in ("about", "tasks"):
            del made_by[harmless]
        return key(f"{self.name}-{which}-seed-{seed}", made_by)

    def seed_of(self, which: str, seed: int) -> int:
        return 100 * seed + STARTS[which]


# ── images ───────────────────────────────────────────────────────────────────────────────────


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
class Successors(ImagePair):
    """A of another pair, and a B that has gone on from it with images of its own."""

    origin: ImagePair
    going_on: Recipe

    def base(self, which: str, seed: int) -> Path:
        return self.origin.base("a", seed) if which == "a" else super().base(which, seed)

    def tuned(self, which: str, task: ImageTask, seed: int) -> Path:
        return self.origin.tuned("a", task, seed) if which == "a" else super().tuned(which, task, seed)

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


# ── reviews ──────────────────────────────────────────────────────────────────────────────────

AMONG = 50
"""Passages of which one is to be found."""


@dataclass(frozen=True)
class Encoder:
    """A model with its tokenizer, saved together; what it was taught with is not among its own tensors."""

    model: Any
    tokenizer: Any
    head: nn.Module | None = None
    beside: Path | None = None

    def save_pretrained(self, folder: str) -> None:
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self.head is not None and self.beside is not None:
            tensors = self.head.state_dict()
            publish_file(self.beside, lambda staged: save_file(tensors, staged), force=True)


@dataclass(frozen=True, kw_only=True)
class TextPair(Pair[TextTask]):
    """BERTs that learned, each from its own reviews, to say what all-MiniLM-L6-v2 says about a passage.

    The head that says it is a file beside the folder of its base. A fine-tune brings a head of its own, which
    is carried over.
    """

    width: int
    lessons: int
    masked: float

    @cached_property
    def parts(self) -> dict[str, Texts]:
        every = data.reviews(self.config["vocab_size"])
        half = (len(every) - self.tests) // 2
        return {
            "test": every[: self.tests],
            "a": every[self.tests : self.tests + half],
            "b": every[self.tests + half :],
        }

    def lesson(self, which: str) -> tuple[Tensor, Tensor]:
        """Passages, by turns a beginning and an end of a review, and what the teacher says about them."""
        texts = self.parts[which][: self.lessons]
        passages = texts.passages(torch.arange(len(texts)) % 2 * texts.room(self.width), self.width)
        vocabulary = self.config["vocab_size"]
        name = f"{vocabulary}-{self.width}-{self.tests}-{which}-{len(texts)}"
        return passages, data.meanings(name, vocabulary, passages)

    @property
    def _tokenizer(self) -> Any:
        return data.tokenizer(self.config["vocab_size"], self.width)

    # bases

    def new_base(self, which: str, seed: int) -> Any:
        torch.manual_seed(own := self.seed_of(which, seed))
        passages, meanings = self.lesson(which)
        model = transformers.BertModel(transformers.BertConfig(**self.config))
        head = nn.Linear(self.config["hidden_size"], meanings.shape[1])
        recipe = self.training

        def loss(generator: torch.Generator) -> Tensor:
            some = torch.randint(len(passages), (recipe.batch,), generator=generator)
            hidden = torch.rand(recipe.batch, self.width, generator=generator) < self.masked
            seen = passages[some]
            seen = seen.masked_fill(hidden & (seen >= SPECIAL), MASK)
            said = nn.functional.normalize(head(_pooled(model, seen)))
            return missed(said, meanings[some])

        name = f"{self.name} {which}, seed {seed}"
        fit(nn.ModuleList([model, head]), loss, recipe, seed=own, name=name)
        beside = self._head_beside(MODELS / self._base_key(which, seed))
        return Encoder(model.eval(), self._tokenizer, head, beside)

    @staticmethod
    def _head_beside(folder: Path) -> Path:
        return folder.with_name(f"{folder.name}-head.safetensors")

    # tasks

    def new_tuned(self, base: Path, which: str, task: TextTask, seed: int) -> Any:
        torch.manual_seed(own := self.seed_of(which, seed) + 10)
        with quiet():
            model = transformers.BertForSequenceClassification.from_pretrained(base, num_labels=2)
        known, recipe = self.parts[which], task.tuning

        def loss(generator: torch.Generator) -> Tensor:
            some = known[torch.randint(len(known), (recipe.batch,), generator=generator)]
            passages, labels = self.questions(some, task, generator)
            return nn.functional.cross_entropy(self._answers(model, passages), labels)

        name = f"{self.name} {which} {task.name}, seed {seed}"
        return Encoder(fit(model, loss, recipe, seed=own, name=name), self._tokenizer)

    def questions(self, texts: Texts, task: TextTask, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Passages, and what is to be said about them."""
        room = texts.room(self.width)
        passages = texts.passages(torch.zeros_like(room) if task.opening else room, self.width)
        if task.dropped:
            gone = torch.rand(passages.shape, generator=generator) < task.dropped
            gone &= (passages >= SPECIAL) | (passages == data.UNKNOWN)
            rest = passages.masked_fill(gone, PAD)
            order = torch.sort((rest == PAD).byte(), dim=1, stable=True).indices
            passages = rest.gather(1, order)
        return passages, texts.labels

    @staticmethod
    def _answers(model: Any, passages: Tensor) -> Tensor:
        logits: Tensor = model(passages, attention_mask=passages != PAD).logits
        return logits

    def load(self, folder: Path) -> Any:
        config = transformers.AutoConfig.from_pretrained(folder)
        return getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()

    def untouched(self, b: Any, tuned: Any) -> Any:
        """B's encoder under the head that A's fine-tune brings."""
        model = transformers.BertForSequenceClassification(tuned.config).eval()
        model.load_state_dict(tuned.state_dict())
        model.bert.load_state_dict(b.state_dict())
        return model

    @torch.no_grad()
    def accuracy(self, model: Any, task: TextTask) -> float:
        passages, labels = self.questions(self.parts["test"], task, torch.Generator().manual_seed(7))
        logits = torch.cat([self._answers(model, batch) for batch in torch.split(passages, 250)])
        return 100 * float((logits.argmax(-1) == labels).float().mean())

    @torch.no_grad()
    def support(self, model: Any, b: Any, task: TextTask) -> float:
        """Percent of passages found by what B's own head says about them, each among some others."""
        passages, meanings = self.lesson("test")
        head = nn.Linear(self.config["hidden_size"], meanings.shape[1])
        head.load_state_dict(load_file(self._head_beside(Path(b.name_or_path))))
        encoder = getattr(model, "bert", model)
        said = torch.cat([head(_pooled(encoder, batch)) for batch in torch.split(passages, 250)])
        groups = zip(torch.split(said, AMONG), torch.split(meanings, AMONG), strict=True)
        found = [(some @ true.T).argmax(1) == torch.arange(len(true)) for some, true in groups]
        return 100 * float(torch.cat(found).float().mean())

    def inputs(self, which: str, count: int) -> Mapping[str, Tensor]:
        passages = self.lesson(which)[0][:count]
        return {"input_ids": passages, "attention_mask": (passages != PAD).long()}


def _pooled(encoder: Any, passages: Tensor) -> Tensor:
    pooled: Tensor = encoder(passages, attention_mask=passages != PAD).pooler_output
    return pooled


def missed(said: Tensor, true: Tensor) -> Tensor:
    """How far directions are from the true ones, and how badly each is told from those of the others."""
    likeness = said @ true.T
    return 1 - likeness.diag().mean() + nn.functional.cross_entropy(likeness / 0.1, torch.arange(len(true)))


@contextmanager
def quiet() -> Iterator[None]:
    """No warning that a head is new: it is meant to be."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


TEXT = TextPair(
    name="text",
    about="IMDB reviews in 6 000 pieces of words; BERT of 4 layers, width 128, taught by all-MiniLM-L6-v2",
    packages=(REVIEWS, TEACHER),
    width=40,
    lessons=12_000,
    masked=0.1,
    config={
        "vocab_size": 6000,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 40,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.05,
        "pad_token_id": PAD,
    },
    training=Recipe(steps=1500, rate=1.5e-3, batch=64),
    tests=4000,
    tasks=(
        TextTask("sentiment", "is the review good, by its end?", Recipe(300, 5e-4, 64)),
        TextTask("dropped", "the same, with four pieces in ten missing", Recipe(300, 5e-4, 64), dropped=0.4),
        TextTask("opening", "is the review good, by its beginning?", Recipe(300, 5e-4, 64), opening=True),
    ),
)

PAIRS: dict[str, Pair[Any]] = {pair.name: pair for pair in (MNIST, CIFAR, TEXT, SUCCESSORS)}
APART = (MNIST.name, CIFAR.name, TEXT.name)
"""The pairs whose bases were trained apart."""
