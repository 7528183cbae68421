"""The examples of an evaluation with their settings, and the evaluator of a model on them."""

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
    LinearTaskHead,
    has_own_task_head,
    is_linear_task_head,
    open_task_head_donor,
    with_task_head_of,
)
from transfusion.evaluation.tasks import Task
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.runtime.devices import require_device

TENSORS = (".safetensors", ".npz")


@dataclass(frozen=True)
class EvaluationData:
    """A reference to examples, and the settings that the user gave for them."""

    reference: str | Path | Dataset | Examples
    """A folder, a file or a hub id; or examples in memory."""
    split: str | None = None
    text: tuple[str, ...] = ()
    """The text columns: one, or two for pairs."""
    image: str | None = None
    label: str | None = None
    classes: str | Path | Classes | None = None
    """A file of class names and templates, or the name of classes that ship with the package."""
    templates: tuple[str, ...] = ()
    """Templates that replace those of the file."""
    limit: int | None = None
    task_head: str | Path | Model | None = None
    """A fine-tuned model whose task head is used, or a file with a linear one."""
    metric: str | None = None
    """The main metric, if not the usual one."""
    truncate: bool = False
    """Whether texts that are too long for the model are truncated."""

    @property
    def files(self) -> list[str | Path]:
        """The references that may be files on this machine: examples, class names and task head."""
        return [one for one in (self.reference, self.classes, self.task_head) if isinstance(one, str | Path)]

    @classmethod
    def of(cls, given: str | Path | Dataset | Examples | EvaluationData) -> EvaluationData:
        """Return ``given`` if it has settings already; otherwise data without settings."""
        return given if isinstance(given, EvaluationData) else cls(given)

    def live(self, model: Model, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LiveModel:
        """Build the live model to measure, with the task head that was asked for."""
        require_device(device)
        donor = self._task_head_donor()
        live = LiveModel.of(model, dtype) if donor is None else with_task_head_of(donor, model, dtype)
        live.module.to(device)
        return live

    def replaced(self, model: Model, base: Model | None) -> list[str]:
        """Return a note if ``task_head`` replaces a task head that the model has and the base has not."""
        donor = self._task_head_donor()
        if (
            donor is None
            or not has_own_task_head(model, donor)
            or (base and not has_own_task_head(model, base))
        ):
            return []
        return [f"{model.label} has a task head of its own; it was replaced by that of {donor.label}"]

    def evaluator(
        self,
        model: Model,
        live: LiveModel,
        *,
        dtype: torch.dtype = torch.float32,
        batch: int | None = None,
    ) -> Evaluator:
        """Return the evaluator of a live model; without ``batch``, with a batch size that fits.

        With a ``task_head`` the live model has to be the one that `live` builds.
        """
        self._check(batch)
        found = self._read()
        if isinstance(found, Dataset):
            evaluator = Evaluator.of(live, found, dtype, batch or MOST)
            return self._scored(evaluator, None)
        linear = (
            LinearTaskHead.load(Path(str(self.task_head))) if is_linear_task_head(self.task_head) else None
        )
        task = Task(
            model,
            live,
            dtype,
            found,
            self._classes(),
            linear,
            self._task_head_donor(),
            truncate=self.truncate,
        )
        batch_source, scorer, notes = task.asked()
        size = 1 if task.alone(scorer) else batch
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

    def _task_head_donor(self) -> Model | None:
        if self.task_head is None or isinstance(self.task_head, Model):
            return self.task_head
        return None if is_linear_task_head(self.task_head) else open_task_head_donor(self.task_head)

    def _check(self, batch: int | None) -> None:
        if self.limit is not None and self.limit < 1:
            raise SettingError(f"limit = {self.limit}: no examples", hint="give 1 or more")
        if batch is not None and batch < 1:
            raise SettingError(f"batch = {batch}: no examples at a time", hint="give 1 or more")
        if self.metric is not None and self.metric not in METRICS:
            raise SettingError(
                f"metric = {self.metric!r} is not a choice", hint=f"choose one of {', '.join(METRICS)}"
            )

    def _scored(self, evaluator: Evaluator, known: str | None) -> Evaluator:
        """Return the evaluator with the metrics of a known task, and the main metric that was asked for."""
        usual = TASKS[known].metrics if known and not evaluator.scorer.tokens else (evaluator.headline,)
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
