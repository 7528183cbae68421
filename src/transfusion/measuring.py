"""Loss and accuracy of a live model on examples: classes of whole inputs, of positions, or the next token."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from transfusion.dataset import Dataset
from transfusion.errors import ArchitectureError, DataError, SettingError
from transfusion.live import Live, in_dtype
from transfusion.probes import run
from transfusion.probing.subject import vocabulary

IGNORED = -100
"""The label of what does not count, as everywhere in torch."""


class Question(StrEnum):
    """What the examples ask of the model."""

    CLASS = "class of every example"
    POSITION = "class of every position"
    NEXT = "next token"


class Score(NamedTuple):
    """The mean cross-entropy, and the share of right answers."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Meter:
    """A live model and the examples to measure it on, which have been found to fit."""

    live: Live
    data: Dataset
    question: Question
    dtype: torch.dtype
    batch: int

    @classmethod
    def of(cls, live: Live, data: Dataset, dtype: torch.dtype, batch: int) -> Meter:
        """Find out what the examples ask of the model; refuse those that it cannot answer."""
        if batch < 1:
            raise SettingError(f"batch = {batch}: no examples at a time", hint="give 1 or more")
        _require_inputs(live, data)
        logits = _logits(live, data.limited(1), dtype)
        question = _question(live, data, logits, dtype)
        if question is not Question.NEXT and data.labels is None:
            raise DataError(f"{data.label}: no labels in it", hint="add a tensor 'labels', one per example")
        if data.labels is not None:
            _require_labels(live, data, logits)
        return cls(live, data, question, dtype, batch)

    def measure(self) -> Score:
        """The model as it is at this moment, on all examples."""
        loss, right, count = torch.zeros((), dtype=torch.float64), 0, 0
        for part in self.data.batches(self.batch):
            logits, targets = _logits(self.live, part, self.dtype), _targets(part)
            if self.question is Question.NEXT:
                logits, targets = logits[:, :-1], targets[:, 1:]
            logits, targets = logits.flatten(0, -2), targets.flatten()
            loss += nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
            right += int((logits.argmax(-1) == targets).sum())
            count += int((targets != IGNORED).sum())
        if not count:
            raise DataError(
                f"{self.data.label}: nothing in it counts: every label is {IGNORED} or hidden by the mask",
                hint="give labels for something",
            )
        if not torch.isfinite(loss):
            raise DataError(
                f"{self.data.label}: the loss is not a finite number",
                hint="look at the scale of the inputs, or compute in float64",
            )
        return Score(float(loss) / count, right / count)


def _name(live: Live) -> str:
    return type(live.module).__name__


def _require_inputs(live: Live, data: Dataset) -> None:
    takes = set(inspect.signature(live.module.forward).parameters)
    if live.family.library != "transformers":
        takes = set(live.inputs)
    data.require_for(
        _name(live),
        takes=takes,
        needs=next(iter(live.inputs)),
        image=tuple(live.inputs["pixel_values"].shape[1:]) if "image" in live.family.inputs else None,
        vocabulary=vocabulary(live.module),
    )


def _logits(live: Live, data: Dataset, dtype: torch.dtype) -> Tensor:
    """The scores that a model gives to classes, in their fixed order."""
    try:
        inputs = in_dtype(data.inputs, dtype)
        outputs = run(live.module, live.family, inputs, double=dtype is torch.float64)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{data.label}: {_name(live)} cannot be run on it ({reason})",
            hint="check the names, shapes and types of the inputs",
        ) from error
    name = "output" if live.family.library == "timm" else "logits"
    if name not in outputs or live.architecture.outputs.get(name, ""):
        raise ArchitectureError(
            f"{_name(live)} gives no logits, so it has no loss",
            hint="give models with a head, such as a classifier or a language model",
        )
    logits = outputs[name]
    if logits.ndim not in (2, 3):
        raise ArchitectureError(
            f"{_name(live)} gives logits of {logits.ndim} dimensions, and only classes of examples or of"
            " positions can be measured",
            hint="give a classifier or a language model",
        )
    return logits


def _question(live: Live, data: Dataset, logits: Tensor, dtype: torch.dtype) -> Question:
    """What is asked; libraries give a decoder that listens to an encoder labels that are shifted already."""
    if logits.ndim == 2:
        return Question.CLASS
    shifted = data.labels is not None and "decoder_input_ids" in data.inputs
    if shifted or not _predicts(live, logits.shape[-1], dtype):
        return Question.POSITION
    return Question.NEXT


def _predicts(live: Live, classes: int, dtype: torch.dtype) -> bool:
    """Whether a model speaks of the next token: its classes are tokens, and no position sees later ones."""
    read = "decoder_input_ids" if "decoder_input_ids" in live.inputs else "input_ids"
    if read not in live.inputs or vocabulary(live.module) != classes:
        return False
    probe = Dataset.of("probe", live.inputs, None)
    changed = live.inputs[read].clone()
    changed[:, -1] = (changed[:, -1] + 1) % classes
    other = Dataset.of("probe", {**live.inputs, read: changed}, None)
    before, after = (_logits(live, one, dtype)[:, :-1] for one in (probe, other))
    return bool(torch.allclose(before, after, rtol=0, atol=1e-4 * float(before.abs().max())))


def _require_labels(live: Live, data: Dataset, logits: Tensor) -> None:
    assert data.labels is not None
    wanted = tuple(logits.shape[1:-1])
    if tuple(data.labels.shape[1:]) != wanted:
        raise DataError(
            f"{data.label}: labels have shape {tuple(data.labels.shape)}, and {_name(live)} gives logits"
            f" for {(len(data), *wanted)}",
            hint="give one label per example" if not wanted else "give one label per position",
        )
    counting = data.labels[data.labels != IGNORED] if wanted else data.labels
    classes = logits.shape[-1]
    wrong = counting[(counting < 0) | (counting >= classes)]
    if len(wrong):
        raise DataError(
            f"{data.label}: label {int(wrong[0])} is none of the {classes} classes, counted from 0, of"
            f" {_name(live)}",
            hint="the labels must be those that the model was trained with",
        )


def _targets(data: Dataset) -> Tensor:
    """The right answers; a text without labels is its own."""
    if data.labels is not None:
        return data.labels
    name = "decoder_input_ids" if "decoder_input_ids" in data.inputs else "input_ids"
    ids = data.inputs[name].long()
    mask = data.inputs.get(name.replace("input_ids", "attention_mask"))
    return ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
