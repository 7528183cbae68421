"""The pair of text encoders: film reviews, as a published model understands them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.pairs import data
from experiments.pairs.data import (
    MASK,
    PAD,
    REVIEWS,
    SPECIAL,
    TEACHER,
    Texts,
)
from experiments.pairs.pair import OfAnother, Pair
from experiments.pairs.training import MODELS, Recipe, fit
from transfusion.files.publishing import publish_file


@dataclass(frozen=True)
class TextTask:
    """Is the review a good one, by its end or (``opening``) its beginning? Words may be dropped."""

    name: str
    about: str
    tuning: Recipe
    opening: bool = False
    dropped: float = 0.0

    @property
    def group(self) -> str:
        return "corruption" if self.dropped else "other"


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

    def task_inputs(self, task: TextTask, count: int) -> Mapping[str, Tensor]:
        known = self.parts["a"][:count]
        passages, _ = self.questions(known, task, torch.Generator().manual_seed(8))
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


@dataclass(frozen=True, kw_only=True)
class OtherEncoder(OfAnother[TextTask], TextPair):
    """A of another pair with its fine-tunes, and a B of another shape with a tokenizer of its own."""

    def untouched(self, b: Any, tuned: Any) -> Any:
        """B's encoder under a head that says nothing: that of A's fine-tune has another width."""
        model = transformers.BertForSequenceClassification(b.config).eval()
        model.bert.load_state_dict(b.state_dict())
        nn.init.zeros_(model.classifier.weight)
        nn.init.zeros_(model.classifier.bias)
        return model

    def inputs(self, which: str, count: int) -> Mapping[str, Tensor]:
        return self.origin.inputs(which, count) if which == "a" else super().inputs(which, count)

    def task_inputs(self, task: TextTask, count: int) -> Mapping[str, Tensor]:
        return self.origin.task_inputs(task, count)


LARGER_TEXT = OtherEncoder(
    name="larger-text",
    about="as text, but B is a BERT of 6 layers, width 192, with 8 000 pieces of words instead of 6 000",
    origin=TEXT,
    packages=TEXT.packages,
    width=TEXT.width,
    lessons=TEXT.lessons,
    masked=TEXT.masked,
    config=TEXT.config
    | {
        "vocab_size": 8000,
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 384,
    },
    training=TEXT.training,
    tests=TEXT.tests,
    tasks=TEXT.tasks,
)
