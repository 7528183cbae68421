"""Heads from elsewhere: a fine-tuned model's on another encoder, or a linear one on features."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import expanduser, isfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transfusion.architecture.naming import Naming, without_part
from transfusion.checkpoint.checkpoint import CONFIGS
from transfusion.checkpoint.weight_files import weights_in
from transfusion.errors import ArchitectureError, DataError, MismatchError, listing
from transfusion.evaluation.batches import Batch, Scorer
from transfusion.evaluation.features import features, normal
from transfusion.live.building import build
from transfusion.live.live_model import LiveModel
from transfusion.model.model import Model

NORMALISE = "normalise"
"""The key of the file's metadata that says "true" where features are brought to length 1 first."""

_HEAD = "a head has weight (classes, width), and bias (classes) if it has one"


@dataclass(frozen=True)
class LinearHead:
    """A matrix (classes, width) on features, and what is added."""

    label: str
    weight: Tensor
    bias: Tensor | None
    normalised: bool

    @classmethod
    def load(cls, path: Path) -> LinearHead:
        """Read ``weight`` and perhaps ``bias``."""
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                details = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: cannot be read as a head ({error})", hint="write it again") from error
        weight, bias = tensors.get("weight"), tensors.get("bias")
        if weight is None or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            told_of = listing(f"{name} {tuple(one.shape)}" for name, one in tensors.items())
            raise DataError(
                f"{path}: no linear head: {told_of or 'nothing in it'}",
                hint=_HEAD,
            )
        return cls(str(path), weight, bias, details.get(NORMALISE, "").lower() == "true")


def is_linear_head(given: object) -> bool:
    """Whether this is a file with nothing but a linear head."""
    path = Path(given) if isinstance(given, str | Path) else None
    if path is None or not isfile(path) or path.suffix != ".safetensors":
        return False
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys()) <= {"weight", "bias"}
    except (SafetensorError, OSError):
        return False


@dataclass(frozen=True)
class LinearHeadScorer(Scorer):
    """What a linear head says of the features of images or texts."""

    live: LiveModel
    dtype: torch.dtype
    label: str
    kind: str
    head: LinearHead

    @property
    def question(self) -> str:  # type: ignore[override]
        return f"class of every {self.kind}, by a linear head on its features"

    @property
    def classes(self) -> int:  # type: ignore[override]
        return len(self.head.weight)

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """One row for every example."""
        found = features(self.live, self.kind, batch.inputs, self.dtype, self.label, gradients=gradients)
        width = self.head.weight.shape[1]
        if found.shape[1] != width:
            raise MismatchError(
                f"{self.head.label}: made for features of width {width}, and"
                f" {type(self.live.module).__name__} gives {found.shape[1]}",
                hint="give the head that was trained on features of this kind of model",
            )
        found = normal(found) if self.head.normalised else found
        logits = found @ self.head.weight.to(found).T
        if self.head.bias is not None:
            logits = logits + self.head.bias.to(found)
        return logits, batch.targets.to(logits.device)


def head_donor_of(given: str | Path) -> Model:
    """The model that a head is borrowed from; a file that is neither one nor a head is refused."""
    path = Path(expanduser(given))
    try:
        return Model.open(given)
    except ArchitectureError as error:
        if not isfile(path) or any((path.parent / name).exists() for name in CONFIGS):
            raise
        raise DataError(
            f"{path}: neither a linear head nor a model: {listing(weights_in(path), 4)}", hint=_HEAD
        ) from error


def has_own_head(model: Model, other: Model) -> bool:
    """Whether a model has a head that is not the other's: every tensor of one, with other values."""
    heads = model.architecture.heads
    if not heads or any(name not in model.names for name in other.architecture.heads):
        return False
    return any(name not in other.names or model.digest_of(name) != other.digest_of(name) for name in heads)


def with_head_of(tuned: Model, model: Model, dtype: torch.dtype) -> LiveModel:
    """The fine-tuned model with every tensor of another model's encoder; its own are what that one lacks
    and what its table calls heads.
    """
    if tuned.family.name != model.family.name:
        raise MismatchError(
            f"{model.label} is a {model.family.name} and {tuned.label}, whose head was asked for, a"
            f" {tuned.family.name}",
            hint="give a fine-tune of the same architecture",
        )
    shared = [
        name
        for name in tuned.architecture.tensors
        if name in model.names and name not in tuned.architecture.heads
    ]
    lacking = [name for name in tuned.architecture.backbone if name not in model.names]
    if lacking:
        raise MismatchError(
            f"{model.label} has no {listing(lacking, 4)}, which is no head of {tuned.label}",
            hint="give a fine-tune of the same architecture and depth",
        )
    for name in shared:
        one, other = model.info(name).shape, tuned.info(name).shape
        if one != other:
            raise MismatchError(
                f"{name} has shape {one} in {model.label} and {other} in {tuned.label}",
                hint="give a fine-tune of the same architecture and size",
            )
    if not tuned.architecture.heads:
        raise ArchitectureError(f"{tuned.label}: it has no head to borrow", hint="give a classifier")
    module, naming = build(tuned, dtype), Naming(tuned.family, live=True)
    wanted = set(shared)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        ours, part = without_part(naming.canonical(name))
        if ours not in wanted:
            continue
        if part is not None:
            raise ArchitectureError(
                f"{type(module).__name__} keeps {ours} in parts, so no other encoder can be put into it",
                hint="save B with the fine-tune's class and its head instead",
            )
        parameter.data = model.read(ours).to(dtype)
    return LiveModel(module, tuned.family, tuned.architecture, {}).drawn(tuned, dtype=dtype)
