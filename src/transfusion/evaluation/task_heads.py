"""Task heads from elsewhere: that of a fine-tuned model on another encoder, or a linear one on features.

A task head is the part of a model that turns features into classes; it is no attention head.
"""

from __future__ import annotations

from dataclasses import dataclass
from os.path import expanduser, isfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transfusion.architecture.naming import Naming, without_part
from transfusion.errors import ArchitectureError, DataError, MismatchError, listing
from transfusion.files.checkpoint import CONFIGS
from transfusion.files.weight_files import weights_in
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.live_model import LiveModel

NORMALISE = "normalise"
"""The metadata key that is "true" if features are scaled to length 1 first."""
_HEAD = "a linear task head has weight (classes, width), and bias (classes) if it has one"


@dataclass(frozen=True)
class LinearTaskHead:
    """A linear map from features to classes."""

    label: str
    weight: Tensor
    bias: Tensor | None
    normalised: bool

    @classmethod
    def load(cls, path: Path) -> LinearTaskHead:
        """Read ``weight`` and, if there is one, ``bias``."""
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                details = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"{path}: cannot be read as a task head ({error})", hint="write it again"
            ) from error
        weight, bias = tensors.get("weight"), tensors.get("bias")
        if weight is None or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            found = listing(f"{name} {tuple(one.shape)}" for name, one in tensors.items())
            raise DataError(
                f"{path}: no linear task head: {found or 'no tensors'}",
                hint=_HEAD,
            )
        return cls(str(path), weight, bias, details.get(NORMALISE, "").lower() == "true")


def is_linear_task_head(given: object) -> bool:
    """Whether this is a file that holds a linear task head and nothing else."""
    path = Path(given) if isinstance(given, str | Path) else None
    if path is None or not isfile(path) or path.suffix != ".safetensors":
        return False
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys()) <= {"weight", "bias"}
    except (SafetensorError, OSError):
        return False


def open_task_head_donor(given: str | Path) -> Model:
    """Open the model whose task head is used; refuse a file that is neither a model nor a task head."""
    path = Path(expanduser(given))
    try:
        return Model.open(given)
    except ArchitectureError as error:
        if not isfile(path) or any((path.parent / name).exists() for name in CONFIGS):
            raise
        raise DataError(
            f"{path}: neither a linear task head nor a model: {listing(weights_in(path), 4)}", hint=_HEAD
        ) from error


def has_own_task_head(model: Model, other: Model) -> bool:
    """Whether a model has all tensors of the other's task head, with other values."""
    heads = model.architecture.heads
    if not heads or any(name not in model.names for name in other.architecture.heads):
        return False
    return any(
        name not in other.names or not torch.equal(model.read(name), other.read(name)) for name in heads
    )


def with_task_head_of(tuned: Model, model: Model, dtype: torch.dtype) -> LiveModel:
    """Build the fine-tuned model with the encoder of another model.

    The fine-tune keeps its task head, as its table defines it, and the tensors that the other model lacks.
    """
    if tuned.family.name != model.family.name:
        raise MismatchError(
            f"{model.label} is a {model.family.name} and {tuned.label}, whose task head was asked for, a"
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
            f"{model.label} has no {listing(lacking, 4)}, which is not in the task head of {tuned.label}",
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
        raise ArchitectureError(f"{tuned.label}: it has no task head", hint="give a classifier")
    module, naming = build(tuned, dtype), Naming(tuned.family, live=True)
    wanted = set(shared)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        ours, part = without_part(naming.canonical(name))
        if ours not in wanted:
            continue
        if part is not None:
            raise ArchitectureError(
                f"{type(module).__name__} keeps {ours} in parts, so no other encoder can be put into it",
                hint="save B with the fine-tune's class and its task head instead",
            )
        parameter.data = model.read(ours).to(dtype)
    return LiveModel(module, tuned.family, tuned.architecture, {}).drawn(tuned, dtype=dtype)
