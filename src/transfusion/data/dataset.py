"""Examples as tensors: a model's inputs by name, and labels."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import isfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from transfusion.errors import DataError, listing, reason_of

LABELS = "labels"
SPARE = 2**28
"""Bytes that an archive may unpack to, however small it is."""
_HOW = "a file of examples is a .safetensors or .npz with the model's inputs by name, and labels"


@dataclass(frozen=True)
class Dataset:
    """Inputs and labels; the first dimension of every tensor counts the examples."""

    label: str
    inputs: Mapping[str, Tensor]
    labels: Tensor | None

    @classmethod
    def load(cls, path: str | Path) -> Dataset:
        """Read a file of examples; refuse one that no model can be measured on."""
        tensors = read_tensors(Path(path))
        labels = tensors.pop(LABELS, None)
        return cls.of(str(path), tensors, labels)

    @classmethod
    def of(cls, label: str, inputs: Mapping[str, Tensor], labels: Tensor | None) -> Dataset:
        """Hold examples that are in memory, under the same rules as a file."""
        if not inputs:
            what = "labels and no inputs" if labels is not None else "nothing"
            raise DataError(f"{label}: the file holds {what}", hint=_HOW)
        tensors = inputs if labels is None else {**inputs, LABELS: labels}
        for name, tensor in tensors.items():
            if tensor.ndim == 0:
                raise DataError(f"{label}: {name} is a single number, not one per example", hint=_HOW)
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(lengths.values())) > 1:
            info = listing(f"{count} {name}" for name, count in lengths.items())
            raise DataError(
                f"{label}: not every example has everything: {info}",
                hint="the first dimension of every tensor must count the same examples",
            )
        if not all(tensor.numel() for tensor in tensors.values()):
            raise DataError(f"{label}: there are no examples in it", hint="give at least one example")
        for name, tensor in inputs.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise DataError(
                    f"{label}: {name} contains NaN or infinite values", hint="check how the file was made"
                )
        if labels is not None and (labels.is_floating_point() or labels.dtype is torch.bool):
            raise DataError(
                f"{label}: labels must be the numbers of classes, and these are"
                f" {str(labels.dtype).removeprefix('torch.')}",
                hint="store them as int64; targets that are not classes cannot be measured",
            )
        return cls(label, dict(inputs), None if labels is None else labels.long())

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def limited(self, count: int | None) -> Dataset:
        """Return the first ``count`` examples."""
        return self if count is None else self.chosen(range(min(count, len(self))))

    def chosen(self, indices: Sequence[int]) -> Dataset:
        """Return the examples with these indices."""
        index = torch.as_tensor(indices, dtype=torch.long)
        labels = None if self.labels is None else self.labels[index]
        return replace(self, inputs={name: t[index] for name, t in self.inputs.items()}, labels=labels)

    def require_for(
        self,
        model: str,
        *,
        takes: Collection[str],
        needs: str,
        image: tuple[int, ...] | None,
        vocabulary: int | None,
    ) -> None:
        """Refuse inputs that a model does not take, or not in this shape or type."""
        unknown = [name for name in self.inputs if name not in takes]
        if needs not in self.inputs or unknown:
            wrong = f"{listing(unknown)}, which {model} does not take" if unknown else f"no {needs}"
            raise DataError(
                f"{self.label}: the file has {wrong}", hint=f"{model} wants {needs}; name the tensors so"
            )
        pixels = self.inputs["pixel_values"] if image is not None else None
        if pixels is not None and tuple(pixels.shape[1:]) != image:
            raise DataError(
                f"{self.label}: the images have shape {tuple(pixels.shape[1:])}, and {model} wants {image}",
                hint="store them as (examples, channels, height, width), at the model's size",
            )
        if pixels is not None and not pixels.is_floating_point():
            raise DataError(
                f"{self.label}: the images hold whole numbers, and {model} wants them prepared",
                hint="store what the model's own image processor makes of them, as float32",
            )
        for name in (name for name in self.inputs if name.endswith("input_ids")):
            ids = self.inputs[name]
            if ids.is_floating_point():
                raise DataError(f"{self.label}: {name} are not whole numbers", hint="store them as int64")
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or (vocabulary is not None and high >= vocabulary):
                raise DataError(
                    f"{self.label}: {name} has token {low if low < 0 else high}, and {model} knows"
                    f" {vocabulary} tokens, counted from 0",
                    hint="encode the text with this model's own tokenizer",
                )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a file of examples."""
    if not isfile(path):
        raise DataError(f"{path}: no such file of examples", hint=f"give a path that exists; {_HOW}")
    if path.suffix not in (".safetensors", ".npz"):
        raise DataError(f"{path}: neither .safetensors nor .npz", hint=_HOW)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        _refuse_bombs(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as opened:
            return {name: torch.from_numpy(_signed(opened[name])) for name in opened.files}
    except Exception as error:  # the libraries raise many types for a damaged file
        raise DataError(f"{path}: cannot be read as examples ({reason_of(error)})", hint=_HOW) from error


def _refuse_bombs(path: Path) -> None:
    """Refuse an archive that unpacks to far more than its size: examples do not compress so well."""
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > SPARE + 200 * path.stat().st_size:
        raise ValueError(f"it would unpack to {size} bytes")


def _signed(array: np.ndarray) -> np.ndarray:
    """Return whole numbers as int64, which torch computes with."""
    return array.astype(np.int64) if array.dtype.kind in "iu" else array
