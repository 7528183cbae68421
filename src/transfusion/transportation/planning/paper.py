"""Paper models: everything that a model's headers say, from its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from transfusion.checkpoint.checkpoint import CONFIGS, Checkpoint
from transfusion.checkpoint.references import PICKLES, resolve
from transfusion.checkpoint.tensor_files import TensorInfo
from transfusion.checkpoint.weight_files import WEIGHTS
from transfusion.errors import ArchitectureError
from transfusion.live.meta_models import meta_tensors
from transfusion.model.model import Model
from transfusion.model.recognition import declared_family
from transfusion.runtime.untrusted_files import read_json

DEFAULT_DTYPE = torch.bfloat16
"""What weights are stored in, where a configuration does not say: as large models are today."""


def sketch(reference: str | Path | Model) -> Model:
    """A model to be talked about. Of a folder without weights, or of a configuration by itself, the shapes
    are those of the module that its library would make; nothing of it can be read.
    """
    if isinstance(reference, Model):
        return reference
    root = resolve(reference)
    file = _configuration(root)
    return Model.open(reference) if file is None else _by_configuration(str(reference), file)


def _configuration(root: Path) -> Path | None:
    """The configuration to go by, if there are no weights."""
    if root.is_file():
        return root if root.suffix == ".json" else None
    weights = PICKLES | {".safetensors"}
    if any(path.suffix in weights or path.name.endswith(".index.json") for path in root.iterdir()):
        return None
    return next((root / name for name in CONFIGS if (root / name).exists()), None)


def _by_configuration(label: str, file: Path) -> Model:
    config = read_json(file)
    checkpoint = Checkpoint(label, file.parent, {}, (), config, file.name)
    family, _ = declared_family(checkpoint)
    dtype, nowhere = _dtype(label, config), file.parent / WEIGHTS[0]
    checkpoint.tensors = {
        name: TensorInfo(name, tuple(one.shape), dtype if one.is_floating_point() else one.dtype, nowhere)
        for name, one in meta_tensors(family, config, label).items()
    }
    return Model.of(checkpoint)


def _dtype(label: str, config: dict[str, Any]) -> torch.dtype:
    """The type that weights are stored in, by the configuration or by one of its sections."""
    sections = [config, *(part for part in config.values() if isinstance(part, dict))]
    info = next((part[key] for part in sections for key in ("dtype", "torch_dtype") if part.get(key)), None)
    if info is None:
        return DEFAULT_DTYPE
    found = getattr(torch, str(info).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArchitectureError(
            f"{label}: the configuration says dtype {info!r}, which is no type of weights",
            hint="say bfloat16, float16 or float32",
        )
    return found
