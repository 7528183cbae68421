"""A pair whose B was trained by others: all-MiniLM-L6-v2, a published encoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from experiments.pairs import data
from experiments.pairs.berts import AMONG, TEXT, OtherEncoder, TextTask
from experiments.pairs.data import END, PAD, START, Texts, decoded, shuffled
from experiments.pairs.training import Recipe

NAME = "minilm"


@cache
def splitter() -> Any:
    """The tokenizer that was published with the model."""
    return transformers.AutoTokenizer.from_pretrained(data.teacher())


@cache
def reviews(first: int, count: int) -> Texts:
    """Some of the reviews of IMDB in the model's own tokens: in the order of the other pairs."""
    order = shuffled(50_000)[first : first + count].tolist()

    def read() -> dict[str, Tensor]:
        texts = [data.entries()[n]["t"] for n in order]
        whole = splitter()(texts, add_special_tokens=False, verbose=False)["input_ids"]
        lengths = torch.tensor([len(ids) for ids in whole])
        return {
            "words": torch.tensor([id for ids in whole for id in ids]),
            "starts": torch.cumsum(lengths, 0) - lengths,
            "lengths": lengths,
            "labels": torch.tensor([data.entries()[n]["s"] for n in order]),
        }

    return Texts(**decoded(f"imdb-{NAME}-{first}-{count}", read))


@dataclass(frozen=True, kw_only=True)
class PublishedEncoder(OtherEncoder):
    """A of another pair with its fine-tunes, and all-MiniLM-L6-v2 as it was published for B."""

    shown: int
    """Reviews that B's own fine-tune learns from."""

    @cached_property
    def parts(self) -> dict[str, Texts]:
        half = (50_000 - self.origin.tests) // 2
        return {"test": reviews(0, self.tests), "b": reviews(self.origin.tests + half, self.shown)}

    @property
    def _tokenizer(self) -> Any:
        return splitter()

    def base(self, which: str, seed: int) -> Path:
        return data.teacher() if which == "b" else super().base(which, seed)

    def tuned(self, which: str, task: TextTask, seed: int) -> Path:
        """As for every pair; B is larger, and its own fine-tune has a recipe of its own."""
        own = replace(task, tuning=self.training) if which == "b" else task
        return super().tuned(which, own, seed)

    def questions(self, texts: Texts, task: TextTask, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        passages, labels = super().questions(texts, task, generator)
        return self._marked(passages), labels

    @staticmethod
    def _marked(passages: Tensor) -> Tensor:
        """Passages between the marks that this model knows."""
        for mark, known in ((START, splitter().cls_token_id), (END, splitter().sep_token_id)):
            passages = passages.masked_fill(passages == mark, known)
        return passages

    @torch.no_grad()
    def support(self, model: Any, b: Any, task: TextTask) -> float:
        """Percent of passages that are nearest to what B itself makes of them, each among some others."""
        texts = self.parts["test"]
        offsets = torch.arange(len(texts)) % 2 * texts.room(self.width)
        passages = self._marked(texts.passages(offsets, self.width))
        own, now = (
            torch.cat([_meaning(encoder, batch) for batch in torch.split(passages, 250)])
            for encoder in (b, getattr(model, "bert", model))
        )
        groups = zip(torch.split(now, AMONG), torch.split(own, AMONG), strict=True)
        found = [(some @ true.T).argmax(1) == torch.arange(len(true)) for some, true in groups]
        return 100 * float(torch.cat(found).float().mean())


def _meaning(encoder: Any, passages: Tensor) -> Tensor:
    """The embedding of a passage, as the model's authors take it: the mean of its states."""
    there = passages != PAD
    states = encoder(passages, attention_mask=there).last_hidden_state * there[..., None]
    return nn.functional.normalize(states.sum(1) / there.sum(1, keepdim=True))


MINILM = PublishedEncoder(
    name=NAME,
    about="as text, but B is all-MiniLM-L6-v2 as published: 6 layers, width 384, 30 522 pieces of words",
    origin=TEXT,
    packages=TEXT.packages,
    width=TEXT.width,
    lessons=TEXT.lessons,
    masked=TEXT.masked,
    config={},
    training=Recipe(100, 2e-4, 32),
    tests=1000,
    shown=5000,
    tasks=TEXT.tasks[:1],
)
