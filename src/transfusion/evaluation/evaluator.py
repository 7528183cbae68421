"""Meters: a live model, examples for it and a question, measured as often as one likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.data.dataset import Dataset
from transfusion.errors import DataError, SettingError
from transfusion.evaluation.batches import Batches, HeadScorer, Scorer, TensorBatches
from transfusion.evaluation.predictions import IGNORED, PredictionKind, out_of_memory, prediction_kind
from transfusion.evaluation.scores import ACCURACY, LOSS, PERPLEXITY, RATES, Score, perplexity
from transfusion.live.live_model import LiveModel


@dataclass(frozen=True)
class Evaluator:
    """A live model and the examples to measure it on, which have been found to fit."""

    live: LiveModel
    batch_source: Batches
    scorer: Scorer
    batch: int
    headline: str = ACCURACY
    """The metric that `Score.value` is."""
    rates: tuple[str, ...] = (ACCURACY,)
    """What else is computed from the answers."""
    notes: tuple[str, ...] = ()
    """What the user should know about how it was measured."""
    on_examples: Callable[[int], None] = lambda count: None

    @classmethod
    def of(cls, live: LiveModel, data: Dataset, dtype: torch.dtype, batch: int) -> Evaluator:
        """Find out what the examples ask of the model; refuse those that it cannot answer."""
        if batch < 1:
            raise SettingError(f"batch = {batch}: no examples at a time", hint="give 1 or more")
        question, classes = prediction_kind(live, data, dtype)
        spoken = question is PredictionKind.NEXT
        scorer = HeadScorer(live, dtype, question, data.label, None if spoken else classes)
        return cls(live, TensorBatches(data), scorer, batch, headline=LOSS if spoken else ACCURACY)

    @property
    def question(self) -> str:
        """What is asked, in words."""
        return self.scorer.question

    def __len__(self) -> int:
        return len(self.batch_source)

    def following(self, on_examples: Callable[[int], None]) -> Evaluator:
        """The same, which tells how many examples of a pass are done, batch by batch."""
        return replace(self, on_examples=on_examples)

    def metadata(self) -> dict[str, Any]:
        """What is measured, for a file or another program."""
        return {
            "data": self.batch_source.label,
            "examples": len(self),
            "question": str(self.question),
            "metric": self.headline,
            "classes": self.scorer.classes,
        }

    def measure(self) -> Score:
        """The model as it is at this moment, on all examples; in smaller batches, if memory does not do."""
        size = self.batch
        while True:
            try:
                return self._measured(size)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if size == 1:
                    raise DataError(
                        f"{self.batch_source.label}: not even one example at a time fits into memory",
                        hint="give smaller inputs, or a machine with more memory",
                    ) from error
                size //= 2

    def _measured(self, size: int) -> Score:
        loss, done = torch.zeros((), dtype=torch.float64), 0
        said: list[Tensor] = []
        true: list[Tensor] = []
        self.scorer.ready()
        for batch in self.batch_source.batches(size):
            logits, targets = self.scorer.answer(batch)
            counting = targets != IGNORED
            loss += _cross_entropy(logits, targets, "sum").double().cpu()
            said.append(logits.argmax(-1)[counting].cpu())
            true.append(targets[counting].cpu())
            done += len(batch.targets)
            self.on_examples(done)
        answers, right = torch.cat(said), torch.cat(true)
        self._require(len(right), loss)
        return self._score(float(loss) / len(right), answers, right)

    def losses(self) -> Iterator[Tensor]:
        """The mean loss of every batch, with gradients to the live model's parameters."""
        for loss, count in self.sums():
            yield loss / count

    def sums(self) -> Iterator[tuple[Tensor, int]]:
        """The loss of every batch as a sum, with gradients, and how many answers count in it."""
        for batch in self.batch_source.batches(self.batch):
            with torch.enable_grad():
                logits, targets = self.scorer.answer(batch, gradients=True)
                if count := int((targets != IGNORED).sum()):
                    yield _cross_entropy(logits, targets, "sum"), count

    @property
    def labels(self) -> Tensor | None:
        """The class of every example; none where examples have no class of their own."""
        return None if self.scorer.classes is None else self.batch_source.labels

    def chosen(self, places: Sequence[int]) -> Evaluator:
        """The same for some of the examples only, counted from 0."""
        return replace(self, batch_source=self.batch_source.chosen(places))

    def _score(self, loss: float, answers: Tensor, right: Tensor) -> Score:
        metrics = {name: RATES[name](answers, right) for name in dict.fromkeys((ACCURACY, *self.rates))}
        metrics[LOSS] = loss
        if self.scorer.tokens:
            metrics[PERPLEXITY] = perplexity(loss)
        return Score(self.headline, metrics[self.headline], loss, metrics[ACCURACY], metrics)

    def _require(self, count: int, loss: Tensor) -> None:
        label = self.batch_source.label
        if not count:
            raise DataError(
                f"{label}: nothing in it counts: every label is {IGNORED} or hidden by the mask",
                hint="give labels for something",
            )
        if not torch.isfinite(loss):
            raise DataError(
                f"{label}: the loss is not a finite number",
                hint="look at the scale of the inputs, or compute in float64",
            )


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)
