"""Data: what the user asked to be measured on, and how a meter is made of it for a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os.path import isdir
from pathlib import Path

import torch

from transfusion.data.dataset import Dataset
from transfusion.data.examples import Columns, Examples
from transfusion.data.known_tasks import TASKS
from transfusion.data.read_examples import read_examples
from transfusion.errors import DataError, SettingError
from transfusion.evaluation.batch_size import MOST, batch_size_for
from transfusion.evaluation.class_prompts import Classes
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.scores import ACCURACY, F1, LOSS, METRICS, PERPLEXITY, RATES
from transfusion.evaluation.task_heads import (
    LinearHead,
    has_own_head,
    head_donor_of,
    is_linear_head,
    with_head_of,
)
from transfusion.evaluation.tasks import Task
from transfusion.live.live_model import LiveModel
from transfusion.model.model import Model
from transfusion.runtime.devices import require_device

TENSORS = (".safetensors", ".npz")


@dataclass(frozen=True)
class EvaluationData:
    """Where the examples are, and how they are to be understood, as far as the user said so."""

    reference: str | Path | Dataset | Examples
    """A folder, a file or a hub id; or examples in memory."""
    split: str | None = None
    text: tuple[str, ...] = ()
    """The columns with the text: one, or two for pairs."""
    image: str | None = None
    label: str | None = None
    classes: str | Path | Classes | None = None
    """A file of class names and templates, or the name of one that ships with the package."""
    templates: tuple[str, ...] = ()
    """Instead of the templates of the classes' file."""
    limit: int | None = None
    head: str | Path | Model | None = None
    """A fine-tuned model whose head is borrowed, or a file with a linear head."""
    metric: str | None = None
    """The headline, if not the usual one."""
    truncate: bool = False
    """Whether texts that are longer than the model are cut."""

    @property
    def files(self) -> list[str | Path]:
        """Whatever may be a file on this machine: examples, class names and head."""
        return [one for one in (self.reference, self.classes, self.head) if isinstance(one, str | Path)]

    @classmethod
    def of(cls, given: str | Path | Dataset | Examples | EvaluationData) -> EvaluationData:
        """The same, if it is that already; or data of which nothing more is said."""
        return given if isinstance(given, EvaluationData) else cls(given)

    def live(self, model: Model, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LiveModel:
        """The live model to measure, with the head that was asked for."""
        require_device(device)
        head_donor = self._lender()
        live = LiveModel.of(model, dtype) if head_donor is None else with_head_of(head_donor, model, dtype)
        live.module.to(device)
        return live

    def replaced(self, model: Model, base: Model | None) -> list[str]:
        """A note, if a borrowed head is in the place of one that the model has and the base has not."""
        head_donor = self._lender()
        if (
            head_donor is None
            or not has_own_head(model, head_donor)
            or (base and not has_own_head(model, base))
        ):
            return []
        return [f"{model.label} has a head of its own; it was replaced by that of {head_donor.label}"]

    def evaluator(
        self,
        model: Model,
        live: LiveModel,
        *,
        dtype: torch.dtype = torch.float32,
        batch: int | None = None,
    ) -> Evaluator:
        """A meter for a live model, which was made of this model; without ``batch``, of a size that fits.

        Where a head is borrowed, the live model has to be the one that `live` makes.
        """
        self._check(batch)
        found = self._read()
        if isinstance(found, Dataset):
            evaluator = Evaluator.of(live, found, dtype, batch or MOST)
            return self._scored(evaluator, None)
        linear = LinearHead.load(Path(str(self.head))) if is_linear_head(self.head) else None
        task_described = Task(
            model, live, dtype, found, self._classes(), linear, self._lender(), truncate=self.truncate
        )
        batch_source, scorer, notes = task_described.asked()
        size = 1 if task_described.alone(scorer) else batch
        size = size or batch_size_for(live.module, scorer, batch_source.heaviest, len(batch_source))
        headline = LOSS if scorer.tokens else ACCURACY
        return self._scored(Evaluator(live, batch_source, scorer, size, headline, notes=notes), found.task)

    def _read(self) -> Dataset | Examples:
        given = self.reference
        if isinstance(given, Dataset | Examples):
            return given.limited(self.limit)
        if Path(given).suffix in TENSORS and not isdir(given):
            return Dataset.load(given).limited(self.limit)
        return read_examples(given, self.split, Columns(self.text, self.image, self.label)).limited(
            self.limit
        )

    def _classes(self) -> Classes | None:
        if self.classes is None or isinstance(self.classes, Classes):
            return self.classes
        return Classes.of(self.classes, self.templates)

    def _lender(self) -> Model | None:
        if self.head is None or isinstance(self.head, Model):
            return self.head
        return None if is_linear_head(self.head) else head_donor_of(self.head)

    def _check(self, batch: int | None) -> None:
        if self.limit is not None and self.limit < 1:
            raise SettingError(f"limit = {self.limit}: no examples", hint="give 1 or more")
        if batch is not None and batch < 1:
            raise SettingError(f"batch = {batch}: no examples at a time", hint="give 1 or more")
        if self.metric is not None and self.metric not in METRICS:
            raise SettingError(
                f"metric = {self.metric!r} is not a choice", hint=f"choose one of {', '.join(METRICS)}"
            )

    def _scored(self, evaluator: Evaluator, task: str | None) -> Evaluator:
        """The same meter with the metrics of a known task, and the headline that was asked for."""
        usual = TASKS[task].metrics if task and not evaluator.scorer.tokens else (evaluator.headline,)
        chosen = self.metric or usual[0]
        if (chosen == PERPLEXITY) > evaluator.scorer.tokens or (
            chosen == F1 and evaluator.scorer.classes != 2
        ):
            raise DataError(
                f"{evaluator.batch_source.label}: no {chosen} of the {evaluator.question}",
                hint="perplexity is of next tokens, and f1 of two classes",
            )
        rates = tuple(name for name in dict.fromkeys((*usual, chosen)) if name in RATES)
        return replace(evaluator, headline=chosen, rates=rates)
