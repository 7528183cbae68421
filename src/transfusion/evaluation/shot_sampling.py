"""Shots: a few examples of every class, drawn by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import exists
from pathlib import Path

import torch
from torch import Tensor

from transfusion.data.dataset import Dataset
from transfusion.data.examples import Examples
from transfusion.errors import DataError, SettingError, listing
from transfusion.evaluation.evaluation_data import EvaluationData
from transfusion.evaluation.evaluator import Evaluator


def draw_shots(evaluator: Evaluator, shots: int, seed: int) -> list[int]:
    """Return the indices of ``shots`` examples of every class; without classes, of ``shots`` texts."""
    if shots < 1:
        raise SettingError(f"shots = {shots}: nothing to learn from", hint="give 1 or more")
    if seed < 0:
        raise SettingError(f"seed = {seed}: a seed cannot be negative", hint="give 0 or more")
    generator = torch.Generator().manual_seed(seed)
    labels = evaluator.labels
    if labels is None:
        return _of_texts(evaluator, shots, generator)
    classes = evaluator.scorer.classes or int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=classes)
    _require_enough(evaluator.batch_source.label, counts, shots)
    return sorted(index for one in range(classes) for index in _draw(labels == one, shots, generator))


def _draw(of: Tensor, count: int, generator: torch.Generator) -> list[int]:
    indices = of.nonzero().flatten()
    chosen: list[int] = indices[torch.randperm(len(indices), generator=generator)[:count]].tolist()
    return chosen


def _of_texts(evaluator: Evaluator, shots: int, generator: torch.Generator) -> list[int]:
    if len(evaluator) < shots:
        raise DataError(
            f"{evaluator.batch_source.label}: {shots} shots were asked for, and there are"
            f" {len(evaluator)} examples",
            hint=f"ask for {len(evaluator)} or fewer, or give more examples",
        )
    return sorted(_draw(torch.ones(len(evaluator), dtype=torch.bool), shots, generator))


def _require_enough(label: str, counts: Tensor, shots: int) -> None:
    fewer = [f"{number} ({int(count)})" for number, count in enumerate(counts) if count < shots]
    if fewer:
        raise DataError(
            f"{label}: {shots} shots of every class were asked for, and there are fewer of"
            f" {'class' if len(fewer) == 1 else 'classes'} {listing(fewer)}",
            hint=f"ask for {int(counts.min())} or fewer, or give more examples"
            if int(counts.min())
            else "give examples of every class of the model",
        )


def remaining_examples(evaluator: Evaluator, taken: Sequence[int]) -> list[int]:
    """Return the indices that were not drawn."""
    gone = set(taken)
    left = [index for index in range(len(evaluator)) if index not in gone]
    if not left:
        raise DataError(
            f"{evaluator.batch_source.label}: every example was drawn for training,"
            " and none is left to test on",
            hint="give examples of their own for the test, or ask for fewer shots",
        )
    return left


def same_examples(one: EvaluationData, other: EvaluationData) -> bool:
    """Whether two references name the same examples: one source, one split."""
    return one.split == other.split and _source(one) == _source(other)


def _source(data: EvaluationData) -> object:
    if isinstance(data.reference, Dataset | Examples):
        return id(data.reference)
    path = Path(data.reference)
    return path.resolve() if exists(path) else str(data.reference)
