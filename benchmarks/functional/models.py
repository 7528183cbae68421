"""Pairs of models of well-known sizes, drawn at random: enough for time and memory.

Weights have a standard deviation of one over the square root of what a layer reads, so that activations have
the size that they have in trained models. Causal models get a tokenizer of the bundled corpus' words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from growth.llamas import SIZES, pair
from transfusion.running.probes.texts import corpus


@dataclass(frozen=True)
class Subject:
    """A size of models, and the limits that it is run with."""

    name: str
    make: Callable[[Path, str], tuple[Path, Path]]
    memory: str
    """The limit of the second run."""


def _drawn(folder: Path, name: str, made_by: Any, config: Any) -> tuple[Path, Path]:
    places = folder / f"{name}-a", folder / f"{name}-b"
    for seed, place in enumerate(places):
        if (place / "config.json").exists():
            continue
        torch.manual_seed(seed)
        module = made_by(config).eval()
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        module.save_pretrained(place)
    return places


def vit(folder: Path, name: str) -> tuple[Path, Path]:
    return _drawn(folder, name, transformers.ViTForImageClassification, transformers.ViTConfig())


def bert(folder: Path, name: str) -> tuple[Path, Path]:
    places = _drawn(folder, name, transformers.BertModel, transformers.BertConfig())
    for place in places:
        add_tokenizer(place, 30522)
    return places


def llama(folder: Path, name: str) -> tuple[Path, Path]:
    size = SIZES[name.removeprefix("Llama ").replace(" ", "")]
    places = pair(folder, size, related=False)
    for place in places:
        add_tokenizer(place, size.vocabulary)
    return places


def add_tokenizer(place: Path, vocabulary: int) -> None:
    """Write a tokenizer of words, the same for every model of a pair."""
    if (place / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=vocabulary, special_tokens=["[UNK]"])
    texts = [passage for passages in corpus().values() for passage in passages]
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    wrapped.save_pretrained(place)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("ViT-B/16", lambda folder, _: vit(folder, "vit-b"), "1.5GB"),
        Subject("BERT-base", lambda folder, _: bert(folder, "bert-base"), "1.5GB"),
        Subject("Llama 0.1 B", llama, "1.5GB"),
        Subject("Llama 0.3 B", llama, "2GB"),
        Subject("Llama 1.1 B", llama, "3GB"),
    )
}
