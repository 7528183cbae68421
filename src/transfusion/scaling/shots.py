"""Shots: a few examples of every class, drawn from the training data by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import exists
from pathlib import Path

import torch
from torch import Tensor

from transfusion.dataset import Dataset
from transfusion.errors import DataError, SettingError, listing
from transfusion.evaluation import Data, Meter
from transfusion.examples import Examples


def drawn(meter: Meter, shots: int, seed: int) -> list[int]:
    """The places of so many examples of every class; of texts without classes, of so many texts."""
    if shots < 1:
        raise SettingError(f"shots = {shots}: nothing to learn from", hint="give 1 or more")
    if seed < 0:
        raise SettingError(f"seed = {seed}: a seed cannot be negative", hint="give 0 or more")
    generator = torch.Generator().manual_seed(seed)
    labels = meter.labels
    if labels is None:
        return _of_texts(meter, shots, generator)
    classes = meter.asker.classes or int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=classes)
    _require_enough(meter.feed.label, counts, shots)
    return sorted(place for one in range(classes) for place in _some(labels == one, shots, generator))


def _some(of: Tensor, count: int, generator: torch.Generator) -> list[int]:
    places = of.nonzero().flatten()
    chosen: list[int] = places[torch.randperm(len(places), generator=generator)[:count]].tolist()
    return chosen


def _of_texts(meter: Meter, shots: int, generator: torch.Generator) -> list[int]:
    if len(meter) < shots:
        raise DataError(
            f"{meter.feed.label}: {shots} shots were asked for, and there are {len(meter)} examples",
            hint=f"ask for {len(meter)} or fewer, or give more examples",
        )
    return sorted(_some(torch.ones(len(meter), dtype=torch.bool), shots, generator))


def _require_enough(label: str, counts: Tensor, shots: int) -> None:
    fewer = [f"{place} ({int(count)})" for place, count in enumerate(counts) if count < shots]
    if fewer:
        raise DataError(
            f"{label}: {shots} shots of every class were asked for, and there are fewer of"
            f" {'class' if len(fewer) == 1 else 'classes'} {listing(fewer)}",
            hint=f"ask for {int(counts.min())} or fewer, or give more examples"
            if int(counts.min())
            else "give examples of every class that the model tells apart",
        )


def others(meter: Meter, taken: Sequence[int]) -> list[int]:
    """The places that were not taken."""
    gone = set(taken)
    left = [place for place in range(len(meter)) if place not in gone]
    if not left:
        raise DataError(
            f"{meter.feed.label}: every example was drawn for training, and none is left to test on",
            hint="give examples of their own for the test, or ask for fewer shots",
        )
    return left


def same_examples(one: Data, other: Data) -> bool:
    """Whether two questions are about the same examples: one file, one part of it."""
    return one.split == other.split and _place(one) == _place(other)


def _place(data: Data) -> object:
    if isinstance(data.reference, Dataset | Examples):
        return id(data.reference)
    path = Path(data.reference)
    return path.resolve() if exists(path) else str(data.reference)
