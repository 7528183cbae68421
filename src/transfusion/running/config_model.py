"""Models without weights: everything that headers say, from a configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from transfusion.errors import ArchitectureError
from transfusion.files.checkpoint import CONFIGS, Checkpoint
from transfusion.files.references import PICKLES, resolve
from transfusion.files.tensor_files import TensorInfo
from transfusion.files.weight_files import WEIGHTS
from transfusion.model.model import Model
from transfusion.model.recognition import declared_family
from transfusion.running.meta_models import meta_tensors
from transfusion.runtime.untrusted_files import read_json

DEFAULT_DTYPE = torch.bfloat16
"""The type of weights where a configuration names none, as large models are stored today."""


def open_headers(reference: str | Path | Model) -> Model:
    """Open a model whose shapes and types are needed, not its weights.

    The reference may also be a configuration, or a folder with nothing but one. Its shapes are then those of
    the module that its library makes of the configuration, and none of its tensors can be read.
    """
    if isinstance(reference, Model):
        return reference
    file = _lone_configuration(resolve(reference))
    return Model.open(reference) if file is None else _from_configuration(str(reference), file)


def _lone_configuration(root: Path) -> Path | None:
    """Return the configuration, if there are no weights beside it."""
    if root.is_file():
        return root if root.suffix == ".json" else None
    weights = PICKLES | {".safetensors"}
    if any(path.suffix in weights or path.name.endswith(".index.json") for path in root.iterdir()):
        return None
    return next((root / name for name in CONFIGS if (root / name).exists()), None)


def _from_configuration(label: str, file: Path) -> Model:
    config = read_json(file)
    checkpoint = Checkpoint(label, file.parent, {}, (), config, file.name)
    family, _ = declared_family(checkpoint)
    dtype, missing = _dtype(label, config), file.parent / WEIGHTS[0]
    checkpoint.tensors = {
        name: TensorInfo(name, tuple(one.shape), dtype if one.is_floating_point() else one.dtype, missing)
        for name, one in meta_tensors(family, config, label).items()
    }
    return Model.of(checkpoint)


def _dtype(label: str, config: dict[str, Any]) -> torch.dtype:
    """Return the type of the weights that a configuration, or one of its sections, names."""
    sections = [config, *(part for part in config.values() if isinstance(part, dict))]
    name = next((part[key] for part in sections for key in ("dtype", "torch_dtype") if part.get(key)), None)
    if name is None:
        return DEFAULT_DTYPE
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArchitectureError(
            f"{label}: dtype {name!r} in the configuration is not a type of weights",
            hint="give bfloat16, float16 or float32",
        )
    return found
