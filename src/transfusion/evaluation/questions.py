"""Questions: what raw examples ask of a model, and whether it can answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import ArchitectureError, DataError
from transfusion.evaluation.asking import Asker, Feed, Headed
from transfusion.evaluation.classes import Classes
from transfusion.evaluation.features import IMAGE, TEXT, compares
from transfusion.evaluation.feeding import Pictures, Texts, accepted
from transfusion.evaluation.heads import Linear, LinearHead
from transfusion.evaluation.labelling import called, targets_of
from transfusion.evaluation.preparing import Eye
from transfusion.evaluation.wording import Reader
from transfusion.evaluation.zeroshot import ZeroShot
from transfusion.examples import Examples
from transfusion.live import Live
from transfusion.measuring import Question, logits_of, predicts
from transfusion.model import Model
from transfusion.probing.subject import Subject


@dataclass(frozen=True)
class Matter:
    """A model, raw examples, and what the user gave to understand them by."""

    model: Model
    live: Live
    dtype: torch.dtype
    examples: Examples
    classes: Classes | None
    head: LinearHead | None
    lender: Model | None
    """The model that the head is borrowed from."""
    truncate: bool

    @property
    def subject(self) -> Subject:
        return Subject(self.model, self.live.module)

    @property
    def name(self) -> str:
        return type(self.live.module).__name__

    def asked(self) -> tuple[Feed, Asker, tuple[str, ...]]:
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

    def alone(self, asker: Asker) -> bool:
        """Whether the library takes one text at a time, because it could not tell where others end."""
        config: Any = getattr(self.live.module, "config", None)
        classed = isinstance(asker, Headed) and asker.asks is Question.CLASS
        texts = self.examples.texts is not None and hasattr(config, "pad_token_id")
        return classed and texts and config.pad_token_id is None

    # ── images ───────────────────────────────────────────────────────────────────────────────

    def _of_images(self) -> tuple[Feed, Asker, tuple[str, ...]]:
        eye = Eye.of(self.subject)
        asker: Asker
        if self.head is not None:
            asker = Linear(self.live, self.dtype, self.examples.label, IMAGE, self.head)
        elif compares(self.live):
            asker = self._zero_shot()
        else:
            asker = self._headed(eye.inputs([next(iter(self.examples.images or ()))]))
        targets = self._targets(asker)
        return Pictures(self.examples.label, self.examples.images or (), eye, targets), asker, eye.notes

    def _zero_shot(self) -> ZeroShot:
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
        return ZeroShot(self.live, self.dtype, self.examples.label, self.classes, reader, prompts)

    # ── texts ────────────────────────────────────────────────────────────────────────────────

    def _of_texts(self) -> tuple[Feed, Asker, tuple[str, ...]]:
        texts = self.examples.texts or ()
        if self.head is None and compares(self.live):
            raise ArchitectureError(
                f"{self.examples.label}: texts, and {self.name} has no head to class them with",
                hint="give a linear head on its text features: --head FILE.safetensors",
            )
        reader = self._reader()
        tokens, cut = reader.read(texts, self.examples.label, truncate=self.truncate)
        takes = accepted(self.live.module)
        feed = Texts(self.examples.label, tokens, reader, takes, None)
        asker: Asker
        if self.head is not None:
            asker = Linear(self.live, self.dtype, self.examples.label, TEXT, self.head)
        else:
            asker = self._headed(dict(feed.heaviest().inputs))
        notes = [f"{self.examples.label}: {cut} of {len(texts)} texts were cut"] if cut else []
        if self.alone(asker):
            notes.append(f"{self.model.label}: one text at a time, for its configuration has no pad_token_id")
        if not asker.tokens:
            feed = Texts(feed.label, tokens, reader, takes, self._targets(asker))
        return feed, asker, tuple(notes)

    def _reader(self) -> Reader:
        lenders = [Subject(self.lender, self.live.module)] if self.lender else []
        return Reader.of(self.subject, *lenders)

    # ── heads and classes ────────────────────────────────────────────────────────────────────

    def _headed(self, inputs: dict[str, Tensor]) -> Headed:
        """The model's own head: of classes, or of tokens that follow."""
        label = self.examples.label
        try:
            logits = logits_of(self.live, label, inputs, self.dtype)
        except ArchitectureError as error:
            if self.lender is not None:
                raise ArchitectureError(
                    f"{self.lender.label}: its head was asked for, and {self.name} has none for {label}",
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
            return Headed(self.live, self.dtype, Question.CLASS, label, logits.shape[-1])
        if logits.ndim == 3 and "input_ids" in inputs and predicts(self.live, logits.shape[-1], self.dtype):
            return Headed(self.live, self.dtype, Question.NEXT, label, None)
        raise ArchitectureError(
            f"{self.model.label}: {self.name} gives scores of shape {tuple(logits.shape)}, neither classes of"
            " an example nor next tokens",
            hint="give a .safetensors with inputs and labels, or another model",
        )

    def _targets(self, asker: Asker) -> Tensor:
        count = asker.classes
        assert count is not None
        own = () if isinstance(asker, ZeroShot | Linear) else self._own_names(count)
        owner = self.classes.label if isinstance(asker, ZeroShot) and self.classes else self.model.label
        return targets_of(self.examples, called(own, self.classes, count, owner), count, owner)

    def _own_names(self, count: int) -> tuple[str, ...]:
        """What the model calls its classes."""
        config: Any = getattr(self.live.module, "config", None)
        told = getattr(config, "id2label", None)
        if isinstance(told, dict) and len(told) == count:
            return tuple(str(told[place]) for place in sorted(told))
        about = (self.model.checkpoint.config or {}).get("label_names") or []
        return tuple(map(str, about)) if len(about) == count else ()
