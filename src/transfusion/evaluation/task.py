"""Tasks: examples with the user's settings for them, and the evaluator of a model on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os.path import isdir
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from transfusion.data.dataset import Dataset
from transfusion.data.examples import TASKS, Columns, Examples
from transfusion.data.read_examples import read_examples
from transfusion.errors import ArchitectureError, DataError, SettingError
from transfusion.evaluation.classes import Classes, class_names, class_numbers
from transfusion.evaluation.evaluator import MOST, Evaluator, batch_size_for
from transfusion.evaluation.inputs import (
    Batches,
    ImageBatches,
    ImageProcessor,
    TextBatches,
    TextTokenizer,
    accepted_inputs,
)
from transfusion.evaluation.scorers import (
    IMAGE,
    TEXT,
    LinearTaskHeadScorer,
    PredictionKind,
    Scorer,
    TaskHeadScorer,
    ZeroShotScorer,
    compares_images_with_texts,
    logits_of,
    predicts_next_token,
)
from transfusion.evaluation.scores import ACCURACY, F1, LOSS, METRICS, PERPLEXITY, RATES
from transfusion.evaluation.task_heads import (
    LinearTaskHead,
    has_own_task_head,
    is_linear_task_head,
    open_task_head_donor,
    with_task_head_of,
)
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.runtime.engines import require_device

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
        if donor is None or not all(has_own_task_head(model, one) for one in (donor, base) if one):
            return []
        return [f"{model.label} has a task head of its own; it was replaced by that of {donor.label}"]

    def evaluator(
        self,
        model: Model,
        live: LiveModel,
        *,
        batch: int | None = None,
    ) -> Evaluator:
        """Return the evaluator of a live model; without ``batch``, with a batch size that fits.

        With a ``task_head`` the live model has to be the one that `live` builds.
        """
        self._check(batch)
        found = self._read()
        if isinstance(found, Dataset):
            evaluator = Evaluator.of(live, found, batch or MOST)
            return self._scored(evaluator, None)
        linear = is_linear_task_head(self.task_head)
        task_head = LinearTaskHead.load(Path(str(self.task_head))) if linear else None
        donor = self._task_head_donor()
        task = Task(model, live, found, self._classes(), task_head, donor, truncate=self.truncate)
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
        columns = Columns(self.text, self.image, self.label)
        return read_examples(given, self.split, columns).limited(self.limit)

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


DataReference: TypeAlias = str | Path | Dataset | Examples | EvaluationData
"""Examples: a path, a hub id, examples in memory, or any of these with settings."""


@dataclass(frozen=True)
class Task:
    """A model, raw examples, and the user's settings for them."""

    model: Model
    live: LiveModel
    examples: Examples
    classes: Classes | None
    task_head: LinearTaskHead | None
    task_head_donor: Model | None
    """The model whose task head is used."""
    truncate: bool

    @property
    def subject(self) -> ProbedModel:
        return ProbedModel(self.model, self.live.module)

    @property
    def name(self) -> str:
        return type(self.live.module).__name__

    def asked(self) -> tuple[Batches, Scorer, tuple[str, ...]]:
        """Return the batches, the scorer, and notes."""
        kind = IMAGE if self.examples.images is not None else TEXT
        self._require_kind(kind)
        if kind == IMAGE:
            return self._of_images()
        return self._of_texts()

    def _require_kind(self, kind: str) -> None:
        inputs = self.live.family.inputs
        takes = "image" in inputs or "patches" in inputs if kind == IMAGE else "tokens" in inputs
        if not takes:
            raise DataError(
                f"{self.examples.label}: {kind}s, and {self.name} reads {', '.join(inputs)}",
                hint="give inputs of a kind that the model reads",
            )

    def alone(self, scorer: Scorer) -> bool:
        """Whether texts go one at a time: without a padding token the library cannot find their ends."""
        config: Any = getattr(self.live.module, "config", None)
        classed = isinstance(scorer, TaskHeadScorer) and scorer.predicts is PredictionKind.CLASS
        texts = self.examples.texts is not None and hasattr(config, "pad_token_id")
        return classed and texts and config.pad_token_id is None

    # ── images ───────────────────────────────────────────────────────────────────────────────

    def _of_images(self) -> tuple[Batches, Scorer, tuple[str, ...]]:
        processor = ImageProcessor.of(self.subject)
        scorer: Scorer
        if self.task_head is not None:
            scorer = LinearTaskHeadScorer(self.live, self.examples.label, IMAGE, self.task_head)
        elif compares_images_with_texts(self.live):
            scorer = self._zero_shot()
        else:
            scorer = self._of_task_head(processor.inputs([next(iter(self.examples.images or ()))]))
        targets = self._targets(scorer)
        return (
            ImageBatches(self.examples.label, self.examples.images or (), processor, targets),
            scorer,
            processor.notes,
        )

    def _zero_shot(self) -> ZeroShotScorer:
        if self.classes is None:
            raise DataError(
                f"{self.examples.label}: {self.name} has no classes of its own",
                hint="give a file of class names and templates with `classes` (`support_classes` for the"
                " support), or a linear task head with `head`",
            )
        self.classes.require_templates()
        tokenizer = self._tokenizer()
        prompts, _ = tokenizer.read(
            self.classes.prompts(), self.classes.label, truncate=self.truncate, what="prompt"
        )
        return ZeroShotScorer(self.live, self.examples.label, self.classes, tokenizer, prompts)

    # ── texts ────────────────────────────────────────────────────────────────────────────────

    def _of_texts(self) -> tuple[Batches, Scorer, tuple[str, ...]]:
        texts = self.examples.texts or ()
        if self.task_head is None and compares_images_with_texts(self.live):
            raise ArchitectureError(
                f"{self.examples.label}: texts, and {self.name} has no task head to classify them",
                hint='give a linear task head on its text features: `head="FILE.safetensors"`',
            )
        tokenizer = self._tokenizer()
        tokens, cut = tokenizer.read(texts, self.examples.label, truncate=self.truncate)
        takes = accepted_inputs(self.live.module)
        batch_source = TextBatches(self.examples.label, tokens, tokenizer, takes, None)
        scorer: Scorer
        if self.task_head is not None:
            scorer = LinearTaskHeadScorer(self.live, self.examples.label, TEXT, self.task_head)
        else:
            scorer = self._of_task_head(dict(batch_source.heaviest().inputs))
        notes = [f"{self.examples.label}: {cut} of {len(texts)} texts were truncated"] if cut else []
        if self.alone(scorer):
            notes.append(f"{self.model.label}: one text at a time: its configuration has no pad_token_id")
        if not scorer.tokens:
            batch_source = TextBatches(batch_source.label, tokens, tokenizer, takes, self._targets(scorer))
        return batch_source, scorer, tuple(notes)

    def _tokenizer(self) -> TextTokenizer:
        donors = [ProbedModel(self.task_head_donor, self.live.module)] if self.task_head_donor else []
        return TextTokenizer.of(self.subject, *donors)

    # ── task heads and classes ────────────────────────────────────────────────────────────────────

    def _of_task_head(self, inputs: dict[str, Tensor]) -> TaskHeadScorer:
        """Return the scorer of the model's own task head: classes, or next tokens."""
        label = self.examples.label
        try:
            logits = logits_of(self.live, label, inputs)
        except ArchitectureError as error:
            if self.task_head_donor is not None:
                raise ArchitectureError(
                    f"{self.task_head_donor.label}: {self.name} has no task head for {label}",
                    hint="give a fine-tuned model with a task head",
                ) from error
            raise ArchitectureError(
                f"{self.model.label}: {self.name} has no task head for {label}",
                hint="give a model with a task head, or that of a fine-tuned model with `head`"
                if self.classes is None
                else "class names are for models such as CLIP that read them; this one needs a task head of"
                " its own, or that of a fine-tuned model with `head`",
            ) from error
        if logits.ndim == 2 and logits.shape[-1] > 1:
            return TaskHeadScorer(self.live, PredictionKind.CLASS, label, logits.shape[-1])
        if logits.ndim == 3 and "input_ids" in inputs and predicts_next_token(self.live, logits.shape[-1]):
            return TaskHeadScorer(self.live, PredictionKind.NEXT, label, None)
        raise ArchitectureError(
            f"{self.model.label}: {self.name} gives scores of shape {tuple(logits.shape)}, neither classes of"
            " an example nor next tokens",
            hint="give a .safetensors with inputs and labels, or another model",
        )

    def _targets(self, scorer: Scorer) -> Tensor:
        count = scorer.classes
        assert count is not None
        own = () if isinstance(scorer, ZeroShotScorer | LinearTaskHeadScorer) else self._own_names(count)
        owner = (
            self.classes.label if isinstance(scorer, ZeroShotScorer) and self.classes else self.model.label
        )
        return class_numbers(self.examples, class_names(own, self.classes, count, owner), count, owner)

    def _own_names(self, count: int) -> tuple[str, ...]:
        """Return the model's own class names."""
        config: Any = getattr(self.live.module, "config", None)
        info = getattr(config, "id2label", None)
        if isinstance(info, dict) and len(info) == count:
            return tuple(str(info[place]) for place in sorted(info))
        about = (self.model.checkpoint.config or {}).get("label_names") or []
        return tuple(map(str, about)) if len(about) == count else ()
