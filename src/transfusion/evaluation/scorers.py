"""Scorers: a live model's logits and the targets of a batch, from its task head, a linear one, or prompts."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.data.dataset import Dataset
from transfusion.errors import ArchitectureError, DataError, MismatchError, reason_of
from transfusion.evaluation.classes import Classes
from transfusion.evaluation.inputs import IGNORED, Batch, TextTokenizer, Tokens
from transfusion.evaluation.task_heads import LinearTaskHead
from transfusion.files.tensor_files import content
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.inputs import in_double, in_dtype, plain_experts, run_model
from transfusion.running.probes.probed_model import vocabulary

IMAGE, TEXT = "image", "text"
_METHODS = {
    "open_clip": {IMAGE: "encode_image", TEXT: "encode_text"},
    "transformers": {IMAGE: "get_image_features", TEXT: "get_text_features"},
}
_EMBEDDINGS = ("image_embeds", "text_embeds", "pooler_output")
"""The outputs with the features of a single tower."""
_IMAGE_PARTS = ("visual.", "vision_model.", "visual_projection.")


class Scorer(ABC):
    """Computes logits and targets of a batch with a live model."""

    question: str
    classes: int | None
    """The number of classes; None for tokens."""
    tokens = False
    """Whether every token is a prediction of its own."""

    def ready(self) -> None:  # noqa: B027
        """Prepare for a pass over the examples, during which the model does not change."""

    @abstractmethod
    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """Return logits (predictions × classes) with the current weights, and the targets."""


# ── running a model ──────────────────────────────────────────────────────────────────────────


def _placed(live: LiveModel, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """Return inputs in the module's type and on its device, and whether it computes in float64."""
    like = next(live.module.parameters())
    placed = {name: one.to(like.device) for name, one in in_dtype(inputs, like.dtype).items()}
    return placed, like.dtype is torch.float64


@contextmanager
def _refusing(live: LiveModel, label: str) -> Iterator[None]:
    """Within the block, an error of the model's library becomes one about the examples."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        raise DataError(
            f"{label}: {_name(live)} cannot be run on it ({reason_of(error)})",
            hint="check the names, shapes and types of the inputs",
        ) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch means that the memory is full."""
    info = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in info or "can't allocate memory" in info)
    )


def _name(live: LiveModel) -> str:
    return type(live.module).__name__


# ── task heads ───────────────────────────────────────────────────────────────────────────────


class PredictionKind(StrEnum):
    """What the model predicts for the examples."""

    CLASS = "class of every example"
    POSITION = "class of every position"
    NEXT = "next token"


@dataclass(frozen=True)
class TaskHeadScorer(Scorer):
    """Scores the outputs of the model's own task head."""

    live: LiveModel
    predicts: PredictionKind
    label: str
    classes: int | None

    @property
    def question(self) -> str:  # type: ignore[override]
        return self.predicts

    @property
    def tokens(self) -> bool:  # type: ignore[override]
        return self.predicts is PredictionKind.NEXT

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """Return one row for every example, position or token."""
        logits = logits_of(self.live, self.label, batch.inputs, gradients=gradients)
        targets = batch.targets.to(logits.device)
        if self.predicts is PredictionKind.NEXT:
            logits, targets = logits[:, :-1], targets[:, 1:]
        return logits.flatten(0, -2), targets.flatten()


def prediction_kind(live: LiveModel, data: Dataset) -> tuple[PredictionKind, int]:
    """Return what is predicted, and the number of classes; refuse examples that do not fit the model."""
    _require_inputs(live, data)
    logits = logits_of(live, data.label, data.limited(1).inputs)
    question = _question(live, data, logits)
    if question is not PredictionKind.NEXT and data.labels is None:
        raise DataError(f"{data.label}: no labels in it", hint="add a tensor 'labels', one per example")
    if data.labels is not None:
        _require_labels(live, data, logits)
    return question, logits.shape[-1]


def _question(live: LiveModel, data: Dataset, logits: Tensor) -> PredictionKind:
    """Return what is predicted; labels of an encoder-decoder are shifted already."""
    if logits.ndim == 2:
        return PredictionKind.CLASS
    shifted = data.labels is not None and "decoder_input_ids" in data.inputs
    if shifted or not predicts_next_token(live, logits.shape[-1]):
        return PredictionKind.POSITION
    return PredictionKind.NEXT


def predicts_next_token(live: LiveModel, classes: int) -> bool:
    """Whether a model predicts the next token: its classes are tokens, and attention is causal."""
    read = "decoder_input_ids" if "decoder_input_ids" in live.inputs else "input_ids"
    if read not in live.inputs or vocabulary(live.module) != classes:
        return False
    changed = live.inputs[read].clone()
    changed[:, -1] = (changed[:, -1] + 1) % classes
    other = {**live.inputs, read: changed}
    before, after = (logits_of(live, "probe", one)[:, :-1] for one in (live.inputs, other))
    return bool(torch.allclose(before, after, rtol=0, atol=1e-4 * float(before.abs().max())))


def logits_of(
    live: LiveModel, label: str, inputs: Mapping[str, Tensor], *, gradients: bool = False
) -> Tensor:
    """Run a model and return its logits."""
    given, double = _placed(live, inputs)
    with _refusing(live, label):
        outputs = run_model(live.module, live.family, given, double=double, gradients=gradients)
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


# ── features of images and texts ─────────────────────────────────────────────────────────────


def compares_images_with_texts(live: LiveModel) -> bool:
    """Whether a model compares images with texts, as CLIP does."""
    methods = _METHODS.get(live.family.library, {})
    towers = all(callable(getattr(live.module, name, None)) for name in methods.values())
    return bool(methods) and towers and hasattr(live.module, "logit_scale")


def features(
    live: LiveModel, label: str, kind: str, inputs: Mapping[str, Tensor], *, gradients: bool
) -> Tensor:
    """Return the features (examples, width) of the tower for this kind of input."""
    given, double = _placed(live, inputs)
    with (
        _refusing(live, label),
        torch.set_grad_enabled(gradients),
        in_double(double),
        plain_experts(live.module),
    ):
        found = _run(live, kind, given)
    if not isinstance(found, Tensor) or found.ndim != 2:
        raise ArchitectureError(
            f"{_name(live)} gives no features of whole {kind}s",
            hint="give a model such as CLIP, or one with a task head of its own",
        )
    return found


def _run(live: LiveModel, kind: str, given: dict[str, Tensor]) -> Any:
    method = getattr(live.module, _METHODS.get(live.family.library, {}).get(kind, ""), None)
    if live.family.library == "open_clip" and method is not None:
        return method(next(iter(given.values())))
    if live.family.library == "timm":
        whole: Any = live.module
        return whole.forward_head(whole.forward_features(given["pixel_values"]), pre_logits=True)
    found = live.module(**given, return_dict=True) if method is None else method(**given)
    if isinstance(found, Tensor):
        return found
    return next((one for name in _EMBEDDINGS if (one := getattr(found, name, None)) is not None), None)


def unit_length(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1."""
    return nn.functional.normalize(vectors, dim=-1)


@dataclass(frozen=True)
class LinearTaskHeadScorer(Scorer):
    """Scores the features of images or texts with a linear task head."""

    live: LiveModel
    label: str
    kind: str
    task_head: LinearTaskHead

    @property
    def question(self) -> str:  # type: ignore[override]
        return f"class of every {self.kind}, by a linear head on its features"

    @property
    def classes(self) -> int:  # type: ignore[override]
        return len(self.task_head.weight)

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """Return one row for every example."""
        found = features(self.live, self.label, self.kind, batch.inputs, gradients=gradients)
        width = self.task_head.weight.shape[1]
        if found.shape[1] != width:
            raise MismatchError(
                f"{self.task_head.label}: made for features of width {width}, and"
                f" {type(self.live.module).__name__} gives {found.shape[1]}",
                hint="give the task head that was trained on features of this kind of model",
            )
        found = unit_length(found) if self.task_head.normalised else found
        logits = found @ self.task_head.weight.to(found).T
        if self.task_head.bias is not None:
            logits = logits + self.task_head.bias.to(found)
        return logits, batch.targets.to(logits.device)


# ── zero-shot ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ZeroShotScorer(Scorer):
    """Scores images by their similarity to the mean embedding of every class's prompts."""

    live: LiveModel
    label: str
    named: Classes
    tokenizer: TextTokenizer
    prompts: Sequence[Tokens]
    """Class by class, template by template."""
    chunk: int = 64
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def question(self) -> str:  # type: ignore[override]
        count = len(self.named.templates)
        return f"zero-shot class of every image, {count} prompt{'s' * (count != 1)} a class"

    @property
    def classes(self) -> int:  # type: ignore[override]
        return len(self.named.names)

    def ready(self) -> None:
        """Encode the prompts, unless the text tower is unchanged since the last time."""
        key = fingerprint(self.live)
        if key is None or key not in self._kept:
            self._kept.clear()
            self._kept[key or ""] = self._computed(gradients=False)

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """Return one row for every image."""
        seen = features(self.live, self.label, IMAGE, batch.inputs, gradients=gradients)
        with torch.set_grad_enabled(gradients):
            scale = self.live.module.get_parameter("logit_scale").exp()
            logits = scale * unit_length(seen) @ self.embeddings(gradients=gradients).T
        return logits, batch.targets.to(logits.device)

    def embeddings(self, *, gradients: bool = False) -> Tensor:
        """Return the embeddings (classes, width) of the classes; for gradients, computed anew."""
        if gradients and any(one.requires_grad for one in text_parameters(self.live).values()):
            return self._computed(gradients=True)
        if gradients or not self._kept:
            self.ready()
        return next(iter(self._kept.values()))

    def _computed(self, *, gradients: bool) -> Tensor:
        parts = []
        for start in range(0, len(self.prompts), self.chunk):
            inputs = self.tokenizer.inputs(self.prompts[start : start + self.chunk])
            parts.append(unit_length(features(self.live, self.label, TEXT, inputs, gradients=gradients)))
        single = torch.cat(parts)
        return unit_length(single.reshape(self.classes, -1, single.shape[-1]).mean(1))


def text_parameters(live: LiveModel) -> dict[str, nn.Parameter]:
    """Return the parameters that the features of texts may depend on."""
    parameters = live.module.named_parameters()
    return {name: one for name, one in parameters if not name.startswith(_IMAGE_PARTS)}


def fingerprint(live: LiveModel) -> str | None:
    """Return a hash of the parameters that texts depend on; None while hooks are registered."""
    if any(one._forward_hooks or one._forward_pre_hooks for one in live.module.modules()):
        return None
    total = hashlib.blake2b()
    for name, parameter in text_parameters(live).items():
        total.update(name.encode())
        total.update(content(parameter.detach().cpu().contiguous()))
    return total.hexdigest()
