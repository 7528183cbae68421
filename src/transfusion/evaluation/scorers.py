"""Scorers: the logits of a live model for a batch, from its task head, from a linear one, or from prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from transfusion.errors import ArchitectureError, DataError, MismatchError, listing, reason_of
from transfusion.evaluation.inputs import Batch, TextTokenizer, Tokens
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.inputs import LOGITS, in_double, in_dtype, plain_experts, run_model
from transfusion.running.probes.probed_model import vocabulary

IMAGE, TEXT = "image", "text"
HEAD = "a linear task head has weight (classes, width), and bias (classes) if it has one"
_METHODS = {
    "open_clip": {IMAGE: "encode_image", TEXT: "encode_text"},
    "transformers": {IMAGE: "get_image_features", TEXT: "get_text_features"},
}
_EMBEDDINGS = ("image_embeds", "text_embeds", "pooler_output")
"""The outputs with the features of a single tower."""
_IMAGE_PARTS = ("visual.", "vision_model.", "visual_projection.")


class PredictionKind(StrEnum):
    """What a task head predicts for the examples."""

    CLASS = "class of every example"
    POSITION = "class of every position"
    NEXT = "next token"


@dataclass(frozen=True)
class Scorer:
    """Computes logits with the current weights of a live model: those of its own task head."""

    live: LiveModel
    label: str
    """The examples, for messages."""
    question: str
    classes: int | None
    """The number of classes; None if every token is a prediction."""

    def ready(self) -> None:
        """Prepare for a pass over the examples, during which the model does not change."""

    def logits(self, inputs: Mapping[str, Tensor], *, gradients: bool) -> Tensor:
        """Return the logits of every example (examples, classes) or position (examples, tokens, classes)."""
        return logits_of(self.live, self.label, inputs, gradients=gradients)

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """Return logits (predictions, classes) and targets (predictions)."""
        logits = self.logits(batch.inputs, gradients=gradients)
        targets = batch.targets.to(logits.device)
        if self.classes is None:  # each position predicts the next token
            logits, targets = logits[:, :-1], targets[:, 1:]
        return logits.flatten(0, -2), targets.flatten()


def logits_of(
    live: LiveModel, label: str, inputs: Mapping[str, Tensor], *, gradients: bool = False
) -> Tensor:
    """Run a model and return its logits."""
    given, double = _typed(live, inputs)
    with _refusing(live, label):
        outputs = run_model(live.module, live.family, given, double=double, gradients=gradients)
    if LOGITS not in outputs or live.architecture.output_space(LOGITS):
        raise ArchitectureError(
            f"{name_of(live)} gives no logits, so it has no loss",
            hint="give models with a task head, such as a classifier or a language model",
        )
    logits = outputs[LOGITS]
    if logits.ndim not in (2, 3):
        raise ArchitectureError(
            f"{name_of(live)} gives logits of {logits.ndim} dimensions, and only classes of examples or of"
            " positions can be measured",
            hint="give a classifier or a language model",
        )
    return logits


def prediction_kind(live: LiveModel, logits: Tensor, *, shifted: bool = False) -> PredictionKind:
    """Return what logits predict; ``shifted``: labels that the data shifted are not those of next tokens."""
    if logits.ndim == 2:
        return PredictionKind.CLASS
    classes = logits.shape[-1]
    read = "decoder_input_ids" if "decoder_input_ids" in live.inputs else "input_ids"
    if shifted or read not in live.inputs or vocabulary(live.module) != classes:
        return PredictionKind.POSITION
    changed = live.inputs[read].clone()
    changed[:, -1] = (changed[:, -1] + 1) % classes
    other = {**live.inputs, read: changed}
    before, after = (logits_of(live, "probe", one)[:, :-1] for one in (live.inputs, other))
    causal = torch.allclose(before, after, rtol=0, atol=1e-4 * float(before.abs().max()))
    return PredictionKind.NEXT if causal else PredictionKind.POSITION


def _typed(live: LiveModel, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """Return inputs in the module's type, and whether it computes in float64."""
    dtype = next(live.module.parameters()).dtype
    return in_dtype(inputs, dtype), dtype is torch.float64


@contextmanager
def _refusing(live: LiveModel, label: str) -> Iterator[None]:
    """Within the block, an error of the model's library becomes one about the examples."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        raise DataError(
            f"{label}: {name_of(live)} cannot be run on it ({reason_of(error)})",
            hint="check the names, shapes and types of the inputs",
        ) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch means that the memory is full."""
    info = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in info or "can't allocate memory" in info)
    )


def name_of(live: LiveModel) -> str:
    """Return the class of a live model."""
    return type(live.module).__name__


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
    given, double = _typed(live, inputs)
    with (
        _refusing(live, label),
        torch.set_grad_enabled(gradients),
        in_double(double),
        plain_experts(live.module),
    ):
        found = _run(live, kind, given)
    if not isinstance(found, Tensor) or found.ndim != 2:
        raise ArchitectureError(
            f"{name_of(live)} gives no features of whole {kind}s",
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
class LinearTaskHead:
    """A linear map from features to classes, in a file."""

    label: str
    weight: Tensor  # (classes, width)
    bias: Tensor | None
    normalised: bool
    """Whether features are scaled to length 1 first: ``normalise`` is "true" in the file's metadata."""


def read_linear_task_head(given: object) -> LinearTaskHead | None:
    """Read the linear task head in a file; None if this is no file that holds one and nothing else."""
    if not isinstance(given, str | Path) or not isfile(given) or Path(given).suffix != ".safetensors":
        return None
    try:
        with safe_open(given, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in {"weight", "bias"} & set(file.keys())}
            details, others = file.metadata() or {}, set(file.keys()) - tensors.keys()
    except (SafetensorError, OSError):
        return None
    if others:
        return None
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        found = listing(f"{name} {tuple(one.shape)}" for name, one in tensors.items())
        raise DataError(f"{given}: no linear task head: {found or 'no tensors'}", hint=HEAD)
    return LinearTaskHead(str(given), weight, bias, details.get("normalise", "").lower() == "true")


@dataclass(frozen=True)
class LinearTaskHeadScorer(Scorer):
    """Scores the features of images or texts with a linear task head."""

    kind: str
    head: LinearTaskHead

    def logits(self, inputs: Mapping[str, Tensor], *, gradients: bool) -> Tensor:
        """Return one row for every example."""
        found = features(self.live, self.label, self.kind, inputs, gradients=gradients)
        width = self.head.weight.shape[1]
        if found.shape[1] != width:
            raise MismatchError(
                f"{self.head.label}: made for features of width {width}, and {name_of(self.live)} gives"
                f" {found.shape[1]}",
                hint="give the task head that was trained on features of this kind of model",
            )
        found = unit_length(found) if self.head.normalised else found
        bias = None if self.head.bias is None else self.head.bias.to(found)
        return nn.functional.linear(found, self.head.weight.to(found), bias)


# ── zero-shot ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ZeroShotScorer(Scorer):
    """Scores images by their similarity to the mean embedding of every class's prompts."""

    tokenizer: TextTokenizer
    prompts: Sequence[Tokens]
    """Class by class, template by template."""
    chunk: int = 64
    _embeddings: list[Tensor] = field(default_factory=list, repr=False, compare=False)
    """Those of the classes, for one pass over the images."""

    def ready(self) -> None:
        """Encode the prompts with the text tower as it is now."""
        self._embeddings[:] = [self.embeddings(gradients=False)]

    def logits(self, inputs: Mapping[str, Tensor], *, gradients: bool) -> Tensor:
        """Return one row for every image."""
        seen = features(self.live, self.label, IMAGE, inputs, gradients=gradients)
        parameters = self.live.module.named_parameters()
        learning = (one.requires_grad for name, one in parameters if not name.startswith(_IMAGE_PARTS))
        if gradients and any(learning):
            embeddings = self.embeddings(gradients=True)
        else:
            (embeddings,) = self._embeddings
        with torch.set_grad_enabled(gradients):
            scale = self.live.module.get_parameter("logit_scale").exp()
            return scale * unit_length(seen) @ embeddings.T

    def embeddings(self, *, gradients: bool = False) -> Tensor:
        """Return the embeddings (classes, width) of the classes."""
        parts = []
        for start in range(0, len(self.prompts), self.chunk):
            inputs = self.tokenizer.inputs(self.prompts[start : start + self.chunk])
            parts.append(unit_length(features(self.live, self.label, TEXT, inputs, gradients=gradients)))
        single = torch.cat(parts)  # (classes · templates, width)
        return unit_length(single.reshape(self.classes or 1, -1, single.shape[-1]).mean(1))
