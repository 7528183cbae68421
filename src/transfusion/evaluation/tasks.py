"""Questions: what raw examples ask of a model, and whether it can answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transfusion.data.examples import Examples
from transfusion.data.probes.probed_model import ProbedModel
from transfusion.errors import ArchitectureError, DataError
from transfusion.evaluation.batches import Batches, HeadScorer, Scorer
from transfusion.evaluation.class_prompts import Classes
from transfusion.evaluation.example_batches import ImageBatches, TextBatches, accepted
from transfusion.evaluation.features import IMAGE, TEXT, compares
from transfusion.evaluation.image_processor import ImageProcessor
from transfusion.evaluation.labels import called, targets_of
from transfusion.evaluation.predictions import PredictionKind, logits_of, predicts
from transfusion.evaluation.task_heads import LinearHead, LinearHeadScorer
from transfusion.evaluation.text_batches import TextTokenizer
from transfusion.evaluation.zero_shot import ZeroShotScorer
from transfusion.live.live_model import LiveModel
from transfusion.model.model import Model


@dataclass(frozen=True)
class Task:
    """A model, raw examples, and what the user gave to understand them by."""

    model: Model
    live: LiveModel
    dtype: torch.dtype
    examples: Examples
    classes: Classes | None
    head: LinearHead | None
    head_donor: Model | None
    """The model that the head is borrowed from."""
    truncate: bool

    @property
    def subject(self) -> ProbedModel:
        return ProbedModel(self.model, self.live.module)

    @property
    def name(self) -> str:
        return type(self.live.module).__name__

    def asked(self) -> tuple[Batches, Scorer, tuple[str, ...]]:
        """The examples as inputs, the question, and notes."""
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
                hint="give what the model reads",
            )

    def alone(self, scorer: Scorer) -> bool:
        """Whether the library takes one text at a time, because it could not tell where others end."""
        config: Any = getattr(self.live.module, "config", None)
        classed = isinstance(scorer, HeadScorer) and scorer.asks is PredictionKind.CLASS
        texts = self.examples.texts is not None and hasattr(config, "pad_token_id")
        return classed and texts and config.pad_token_id is None

    # ── images ───────────────────────────────────────────────────────────────────────────────

    def _of_images(self) -> tuple[Batches, Scorer, tuple[str, ...]]:
        processor = ImageProcessor.of(self.subject)
        scorer: Scorer
        if self.head is not None:
            scorer = LinearHeadScorer(self.live, self.dtype, self.examples.label, IMAGE, self.head)
        elif compares(self.live):
            scorer = self._zero_shot()
        else:
            scorer = self._headed(processor.inputs([next(iter(self.examples.images or ()))]))
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
                hint="give a file of class names and templates with --classes (--support-classes for the"
                " support), or a linear head with --head",
            )
        self.classes.require_templates()
        reader = self._reader()
        prompts, _ = reader.read(
            self.classes.prompts(), self.classes.label, truncate=self.truncate, what="prompt"
        )
        return ZeroShotScorer(self.live, self.dtype, self.examples.label, self.classes, reader, prompts)

    # ── texts ────────────────────────────────────────────────────────────────────────────────

    def _of_texts(self) -> tuple[Batches, Scorer, tuple[str, ...]]:
        texts = self.examples.texts or ()
        if self.head is None and compares(self.live):
            raise ArchitectureError(
                f"{self.examples.label}: texts, and {self.name} has no head to class them with",
                hint="give a linear head on its text features: --head FILE.safetensors",
            )
        reader = self._reader()
        tokens, cut = reader.read(texts, self.examples.label, truncate=self.truncate)
        takes = accepted(self.live.module)
        batch_source = TextBatches(self.examples.label, tokens, reader, takes, None)
        scorer: Scorer
        if self.head is not None:
            scorer = LinearHeadScorer(self.live, self.dtype, self.examples.label, TEXT, self.head)
        else:
            scorer = self._headed(dict(batch_source.heaviest().inputs))
        notes = [f"{self.examples.label}: {cut} of {len(texts)} texts were cut"] if cut else []
        if self.alone(scorer):
            notes.append(f"{self.model.label}: one text at a time, for its configuration has no pad_token_id")
        if not scorer.tokens:
            batch_source = TextBatches(batch_source.label, tokens, reader, takes, self._targets(scorer))
        return batch_source, scorer, tuple(notes)

    def _reader(self) -> TextTokenizer:
        lenders = [ProbedModel(self.head_donor, self.live.module)] if self.head_donor else []
        return TextTokenizer.of(self.subject, *lenders)

    # ── heads and classes ────────────────────────────────────────────────────────────────────

    def _headed(self, inputs: dict[str, Tensor]) -> HeadScorer:
        """The model's own head: of classes, or of tokens that follow."""
        label = self.examples.label
        try:
            logits = logits_of(self.live, label, inputs, self.dtype)
        except ArchitectureError as error:
            if self.head_donor is not None:
                raise ArchitectureError(
                    f"{self.head_donor.label}: its head was asked for, and {self.name} has none for {label}",
                    hint="give a fine-tuned model with a head",
                ) from error
            raise ArchitectureError(
                f"{self.model.label}: {self.name} has no head for {label}",
                hint="give a model with a head, or borrow a fine-tuned one with --head"
                if self.classes is None
                else "class names are for models such as CLIP that read them; this one needs a head of its"
                " own, or one borrowed with --head",
            ) from error
        if logits.ndim == 2 and logits.shape[-1] > 1:
            return HeadScorer(self.live, self.dtype, PredictionKind.CLASS, label, logits.shape[-1])
        if logits.ndim == 3 and "input_ids" in inputs and predicts(self.live, logits.shape[-1], self.dtype):
            return HeadScorer(self.live, self.dtype, PredictionKind.NEXT, label, None)
        raise ArchitectureError(
            f"{self.model.label}: {self.name} gives scores of shape {tuple(logits.shape)}, neither classes of"
            " an example nor next tokens",
            hint="give a .safetensors with inputs and labels, or another model",
        )

    def _targets(self, scorer: Scorer) -> Tensor:
        count = scorer.classes
        assert count is not None
        own = () if isinstance(scorer, ZeroShotScorer | LinearHeadScorer) else self._own_names(count)
        owner = (
            self.classes.label if isinstance(scorer, ZeroShotScorer) and self.classes else self.model.label
        )
        return targets_of(self.examples, called(own, self.classes, count, owner), count, owner)

    def _own_names(self, count: int) -> tuple[str, ...]:
        """What the model calls its classes."""
        config: Any = getattr(self.live.module, "config", None)
        info = getattr(config, "id2label", None)
        if isinstance(info, dict) and len(info) == count:
            return tuple(str(info[place]) for place in sorted(info))
        about = (self.model.checkpoint.config or {}).get("label_names") or []
        return tuple(map(str, about)) if len(about) == count else ()
