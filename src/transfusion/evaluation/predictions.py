"""What is predicted for examples: a class of the example, of every position, or the next token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import Tensor

from transfusion.data.dataset import Dataset
from transfusion.errors import ArchitectureError, DataError
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.probed_model import vocabulary
from transfusion.running.probes.random_inputs import in_dtype, run_model

IGNORED = -100
"""The label that does not count, as in torch."""


class PredictionKind(StrEnum):
    """What the model predicts for the examples."""

    CLASS = "class of every example"
    POSITION = "class of every position"
    NEXT = "next token"


def prediction_kind(live: LiveModel, data: Dataset, dtype: torch.dtype) -> tuple[PredictionKind, int]:
    """Return what is predicted, and the number of classes; refuse examples that do not fit the model."""
    _require_inputs(live, data)
    logits = logits_of(live, data.label, data.limited(1).inputs, dtype)
    question = _question(live, data, logits, dtype)
    if question is not PredictionKind.NEXT and data.labels is None:
        raise DataError(f"{data.label}: no labels in it", hint="add a tensor 'labels', one per example")
    if data.labels is not None:
        _require_labels(live, data, logits)
    return question, logits.shape[-1]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch means that the memory is full."""
    info = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in info or "can't allocate memory" in info)
    )


def _name(live: LiveModel) -> str:
    return type(live.module).__name__


def _require_inputs(live: LiveModel, data: Dataset) -> None:
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


def logits_of(
    live: LiveModel, label: str, inputs: Mapping[str, Tensor], dtype: torch.dtype, *, gradients: bool = False
) -> Tensor:
    """Run a model and return its logits."""
    device = next(live.module.parameters()).device
    given = {name: one.to(device) for name, one in in_dtype(inputs, dtype).items()}
    try:
        outputs = run_model(
            live.module,
            live.family,
            given,
            double=dtype is torch.float64,
            gradients=gradients,
        )
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{label}: {_name(live)} cannot be run on it ({reason})",
            hint="check the names, shapes and types of the inputs",
        ) from error
    name = "output" if live.family.library == "timm" else "logits"
    if name not in outputs or live.architecture.output_space(name):
        raise ArchitectureError(
            f"{_name(live)} gives no logits, so it has no loss",
            hint="give models with a task head, such as a classifier or a language model",
        )
    logits = outputs[name]
    if logits.ndim not in (2, 3):
        raise ArchitectureError(
            f"{_name(live)} gives logits of {logits.ndim} dimensions, and only classes of examples or of"
            " positions can be measured",
            hint="give a classifier or a language model",
        )
    return logits


def _question(live: LiveModel, data: Dataset, logits: Tensor, dtype: torch.dtype) -> PredictionKind:
    """Return what is predicted; labels of an encoder-decoder are shifted already."""
    if logits.ndim == 2:
        return PredictionKind.CLASS
    shifted = data.labels is not None and "decoder_input_ids" in data.inputs
    if shifted or not predicts_next_token(live, logits.shape[-1], dtype):
        return PredictionKind.POSITION
    return PredictionKind.NEXT


def predicts_next_token(live: LiveModel, classes: int, dtype: torch.dtype) -> bool:
    """Whether a model predicts the next token: its classes are tokens, and attention is causal."""
    read = "decoder_input_ids" if "decoder_input_ids" in live.inputs else "input_ids"
    if read not in live.inputs or vocabulary(live.module) != classes:
        return False
    changed = live.inputs[read].clone()
    changed[:, -1] = (changed[:, -1] + 1) % classes
    other = {**live.inputs, read: changed}
    before, after = (logits_of(live, "probe", one, dtype)[:, :-1] for one in (live.inputs, other))
    return bool(torch.allclose(before, after, rtol=0, atol=1e-4 * float(before.abs().max())))


def _require_labels(live: LiveModel, data: Dataset, logits: Tensor) -> None:
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


def targets_of(data: Dataset) -> Tensor:
    """Return the targets; without labels, the texts themselves."""
    if data.labels is not None:
        return data.labels
    name = "decoder_input_ids" if "decoder_input_ids" in data.inputs else "input_ids"
    ids = data.inputs[name].long()
    mask = data.inputs.get(name.replace("input_ids", "attention_mask"))
    return ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
