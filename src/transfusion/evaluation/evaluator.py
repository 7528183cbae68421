"""The evaluator: measures a live model on examples, with its current weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.errors import DataError
from transfusion.evaluation.inputs import IGNORED, Batch, Batches
from transfusion.evaluation.scorers import Scorer, out_of_memory
from transfusion.evaluation.scores import ACCURACY, LOSS, PERPLEXITY, RATES, Answers, Score, perplexity
from transfusion.runtime.engines import device_memory


@dataclass(frozen=True)
class Evaluator:
    """Examples, and the scorer of a live model that they fit."""

    batch_source: Batches
    scorer: Scorer
    batch: int
    metrics: tuple[str, ...] = (ACCURACY,)
    """The metrics to compute; the first is the main one, `Score.value`."""
    notes: tuple[str, ...] = ()
    """Notes for the user on how it is measured."""

    def __len__(self) -> int:
        return len(self.batch_source)

    def metadata(self) -> dict[str, Any]:
        """Return what is measured, for a file or another program."""
        return {
            "data": self.batch_source.label,
            "examples": len(self),
            "question": str(self.scorer.question),
            "metric": self.metrics[0],
            "classes": self.scorer.classes,
        }

    def measure(self, on_examples: Callable[[int], None] = lambda count: None) -> Score:
        """Measure the model on all examples; halve the batch if the memory is too small.

        ``on_examples`` is called with the number of examples done, after every batch.
        """
        size = self.batch
        while True:
            try:
                return self._measured(size, on_examples)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if size == 1:
                    raise DataError(
                        f"{self.batch_source.label}: not even one example at a time fits into memory",
                        hint="give smaller inputs, or a machine with more memory",
                    ) from error
                size //= 2

    def _measured(self, size: int, on_examples: Callable[[int], None]) -> Score:
        done = 0
        parts: list[tuple[Tensor, ...]] = []
        self.scorer.ready()
        for batch in self.batch_source.batches(size):
            logits, wanted = self.scorer.answer(batch)
            counting = wanted != IGNORED
            losses = _cross_entropy(logits, wanted, "none")
            rows = len(wanted) // len(batch.targets)  # of every example
            examples = done + torch.arange(len(wanted), device=wanted.device) // rows
            parts.append(tuple(one[counting].cpu() for one in (logits.argmax(-1), wanted, losses, examples)))
            done += len(batch.targets)
            on_examples(done)
        predictions, targets, losses, examples = map(torch.cat, zip(*parts, strict=True))
        losses = losses.double()
        label = self.batch_source.label
        if not len(targets):
            raise DataError(
                f"{label}: every label is {IGNORED} or masked", hint="give at least one label that counts"
            )
        if not torch.isfinite(losses.sum()):
            raise DataError(
                f"{label}: the loss is not a finite number",
                hint="check the scale of the inputs, or compute in float64",
            )
        loss = float(losses.mean())
        rates = [name for name in (ACCURACY, *self.metrics) if name in RATES]
        metrics = {name: RATES[name](predictions, targets) for name in rates} | {LOSS: loss}
        if self.scorer.classes is None:
            metrics[PERPLEXITY] = perplexity(loss)
        main, answers = self.metrics[0], Answers.of(predictions, targets, losses, examples)
        return Score(main, metrics[main], loss, metrics[ACCURACY], metrics, answers)

    def losses(self) -> Iterator[Tensor]:
        """Iterate over the mean losses of the batches, with gradients to the model's parameters."""
        for loss, count in self.sums():
            yield loss / count

    def sums(self) -> Iterator[tuple[Tensor, int]]:
        """Iterate over the summed losses of the batches, with gradients, and their numbers of predictions."""
        self.scorer.ready()
        for batch in self.batch_source.batches(self.batch):
            with torch.enable_grad():
                logits, targets = self.scorer.answer(batch, gradients=True)
                if count := int((targets != IGNORED).sum()):
                    yield _cross_entropy(logits, targets, "sum"), count

    @property
    def labels(self) -> Tensor | None:
        """The class of every example; None if examples have no class of their own."""
        known = self.batch_source.targets
        return known if known is not None and known.ndim == 1 else None

    def chosen(self, indices: Sequence[int]) -> Evaluator:
        """Return the evaluator of the examples with these indices."""
        return replace(self, batch_source=self.batch_source.chosen(indices))


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)


MOST = 64
SHARE = 0.25
"""The share of the machine's memory that the outputs of modules may fill."""


def batch_size_for(scorer: Scorer, heaviest: Batch, count: int) -> int:
    """Return a power of two, from the bytes of all modules' outputs for one example.

    The bytes are compared with all memory, not with the free part, so that a machine always chooses the same
    size.
    """
    module, filled = scorer.live.module, 0

    def add(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal filled
        parts = output if isinstance(output, tuple | list) else [output]
        filled += sum(part.nbytes for part in parts if isinstance(part, Tensor))

    scorer.ready()  # prompts do not depend on the number of examples
    handles = [one.register_forward_hook(add) for one in module.modules()]
    try:
        scorer.answer(heaviest)
    finally:
        for handle in handles:
            handle.remove()
    room = int(SHARE * device_memory(next(module.parameters()).device)) // max(filled, 1)
    size = 1
    while 2 * size <= min(room, MOST) and size < count:
        size *= 2
    return size
