"""Batches of examples, and scorers that turn a model's outputs into logits and targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from transfusion.data.dataset import Dataset
from transfusion.evaluation.predictions import PredictionKind, logits_of, targets_of
from transfusion.running.live_model import LiveModel


@dataclass(frozen=True)
class Batch:
    """The model's inputs by name, and the targets."""

    inputs: Mapping[str, Tensor]
    targets: Tensor


class Batches(Protocol):
    """Examples that become the model's inputs batch by batch."""

    @property
    def label(self) -> str: ...

    def __len__(self) -> int: ...

    @property
    def labels(self) -> Tensor | None:
        """The class of every example; None if examples have no class of their own."""
        ...

    def chosen(self, indices: Sequence[int]) -> Batches:
        """Return the examples with these indices."""
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
        """The class of every example; None if positions have classes."""
        known = self.data.labels
        return known if known is not None and known.ndim == 1 else None

    def chosen(self, indices: Sequence[int]) -> TensorBatches:
        """Return the examples with these indices."""
        return TensorBatches(self.data.chosen(indices))

    def batches(self, size: int) -> Iterator[Batch]:
        """Iterate over the batches."""
        for part in self.data.batches(size):
            yield Batch(part.inputs, targets_of(part))

    def heaviest(self) -> Batch:
        """Return one example; all need the same memory."""
        return next(self.batches(1))


class Scorer(ABC):
    """Computes logits and targets of a batch with a live model."""

    question: str
    classes: int | None
    """The number of classes; None for tokens."""
    tokens = False
    """Whether every token is a prediction of its own."""

    def ready(self) -> None:  # noqa: B027
        """Prepare for a pass over the examples, during which the model does not change."""

    @abstractmethod
    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """Return logits (predictions × classes) with the current weights, and the targets."""


@dataclass(frozen=True)
class TaskHeadScorer(Scorer):
    """Scores the outputs of the model's own task head."""

    live: LiveModel
    dtype: torch.dtype
    predicts: PredictionKind
    label: str
    classes: int | None

    @property
    def question(self) -> str:  # type: ignore[override]
        return self.predicts

    @property
    def tokens(self) -> bool:  # type: ignore[override]
        return self.predicts is PredictionKind.NEXT

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """Return one row for every example, position or token."""
        logits = logits_of(self.live, self.label, batch.inputs, self.dtype, gradients=gradients)
        targets = batch.targets.to(logits.device)
        if self.predicts is PredictionKind.NEXT:
            logits, targets = logits[:, :-1], targets[:, 1:]
        return logits.flatten(0, -2), targets.flatten()
