"""Tasks: how raw examples become batches and a scorer for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transfusion.data.examples import Examples
from transfusion.errors import ArchitectureError, DataError
from transfusion.evaluation.batches import Batches, Scorer, TaskHeadScorer
from transfusion.evaluation.class_prompts import Classes
from transfusion.evaluation.example_batches import ImageBatches, TextBatches, accepted_inputs
from transfusion.evaluation.features import IMAGE, TEXT, compares_images_with_texts
from transfusion.evaluation.image_processor import ImageProcessor
from transfusion.evaluation.labels import class_names, targets_of
from transfusion.evaluation.predictions import PredictionKind, logits_of, predicts_next_token
from transfusion.evaluation.task_heads import LinearTaskHead, LinearTaskHeadScorer
from transfusion.evaluation.text_batches import TextTokenizer
from transfusion.evaluation.zero_shot import ZeroShotScorer
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.probed_model import ProbedModel


@dataclass(frozen=True)
class Task:
    """A model, raw examples, and the user's settings for them."""

    model: Model
    live: LiveModel
    dtype: torch.dtype
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
            scorer = LinearTaskHeadScorer(self.live, self.dtype, self.examples.label, IMAGE, self.task_head)
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
        return ZeroShotScorer(self.live, self.dtype, self.examples.label, self.classes, tokenizer, prompts)

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
            scorer = LinearTaskHeadScorer(self.live, self.dtype, self.examples.label, TEXT, self.task_head)
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
            logits = logits_of(self.live, label, inputs, self.dtype)
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
            return TaskHeadScorer(self.live, self.dtype, PredictionKind.CLASS, label, logits.shape[-1])
        if (
            logits.ndim == 3
            and "input_ids" in inputs
            and predicts_next_token(self.live, logits.shape[-1], self.dtype)
        ):
            return TaskHeadScorer(self.live, self.dtype, PredictionKind.NEXT, label, None)
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
        return targets_of(self.examples, class_names(own, self.classes, count, owner), count, owner)

    def _own_names(self, count: int) -> tuple[str, ...]:
        """Return the model's own class names."""
        config: Any = getattr(self.live.module, "config", None)
        info = getattr(config, "id2label", None)
        if isinstance(info, dict) and len(info) == count:
            return tuple(str(info[place]) for place in sorted(info))
        about = (self.model.checkpoint.config or {}).get("label_names") or []
        return tuple(map(str, about)) if len(about) == count else ()
