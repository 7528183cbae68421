"""Asking: what a model is given at a time, and how its answers are had of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from transfusion.data.dataset import Dataset
from transfusion.evaluation.predictions import PredictionKind, logits_of, targets_of
from transfusion.live.live_model import LiveModel


@dataclass(frozen=True)
class Batch:
    """Some examples: the model's inputs by name, and the right answers."""

    inputs: Mapping[str, Tensor]
    targets: Tensor


class Batches(Protocol):
    """Examples that are made into the model's inputs when they are asked for."""

    @property
    def label(self) -> str: ...

    def __len__(self) -> int: ...

    @property
    def labels(self) -> Tensor | None:
        """One class for every example; none if there is no such thing."""
        ...

    def chosen(self, places: Sequence[int]) -> Batches:
        """Some of the examples, counted from 0."""
        ...

    def batches(self, size: int) -> Iterator[Batch]: ...

    def heaviest(self) -> Batch: ...


@dataclass(frozen=True)
class TensorBatches:
    """Examples that are the model's inputs already."""

    data: Dataset

    @property
    def label(self) -> str:
        return self.data.label

    def __len__(self) -> int:
        return len(self.data)

    @property
    def labels(self) -> Tensor | None:
        """One class for every example; none where positions have classes."""
        known = self.data.labels
        return known if known is not None and known.ndim == 1 else None

    def chosen(self, places: Sequence[int]) -> TensorBatches:
        """Some of the examples."""
        return TensorBatches(self.data.chosen(places))

    def batches(self, size: int) -> Iterator[Batch]:
        """Some at a time."""
        for part in self.data.batches(size):
            yield Batch(part.inputs, targets_of(part))

    def heaviest(self) -> Batch:
        """The example that takes most memory: all take the same."""
        return next(self.batches(1))


class Scorer(ABC):
    """A question to a live model."""

    question: str
    classes: int | None
    """How many answers there are to choose from; none for tokens."""
    tokens = False
    """Whether every token is an answer of its own."""

    def ready(self) -> None:  # noqa: B027
        """Prepare for a pass over the examples, in which the model does not change."""

    @abstractmethod
    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """The scores (answers × classes) that the model gives at this moment, and the right answers."""


@dataclass(frozen=True)
class HeadScorer(Scorer):
    """What the model's own head says."""

    live: LiveModel
    dtype: torch.dtype
    asks: PredictionKind
    label: str
    classes: int | None

    @property
    def question(self) -> str:  # type: ignore[override]
        return self.asks

    @property
    def tokens(self) -> bool:  # type: ignore[override]
        return self.asks is PredictionKind.NEXT

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """One row for every example, position or token."""
        logits = logits_of(self.live, self.label, batch.inputs, self.dtype, gradients=gradients)
        targets = batch.targets.to(logits.device)
        if self.asks is PredictionKind.NEXT:
            logits, targets = logits[:, :-1], targets[:, 1:]
        return logits.flatten(0, -2), targets.flatten()
