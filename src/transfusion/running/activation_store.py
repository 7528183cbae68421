"""Samples of activations, on disk: what the modules of a model are given and put out on probes.

The two models are never in memory together. Samples, not sums of products, are kept: units can be paired
again after heads have been matched. `activation_recorder` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"
HELD_OUT = 5
"""One batch in this number is held out: the last ones."""
EXACT = 512
"""Axes of at most so many units are compared and solved in float64, others in float32."""


def precision(units: int) -> torch.dtype:
    """Return the type in which an axis of so many units is compared.

    The axis decides, not the tensor that it was cut from: a fused projection is wider than its parts.
    """
    return torch.float64 if units <= EXACT else torch.float32


def comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples of an axis of A and of B, (samples, units), in one type: that of the larger axis."""
    exact = precision(max(a.shape[1], b.shape[1]))
    return a.to(exact), b.to(exact)


class Segment(NamedTuple):
    """Some samples in a file."""

    batch: int
    start: int
    """In numbers, from the beginning of the file."""
    rows: int
    units: int


@dataclass(frozen=True)
class ActivationStore:
    """Samples of activations on disk, by module and side, and which norm fed which module."""

    folder: Path
    segments: Mapping[str, Sequence[Segment]]
    """By key; every key has a file of its own."""
    batches: int
    fed_by: Mapping[str, str] = field(default_factory=dict)
    """For every module whose input is the output of a norm, the norm."""
    same: Mapping[str, str] = field(default_factory=dict)
    """For inputs that are outputs of a norm, the key of those outputs: they are kept once."""
    shown: frozenset[str] = frozenset()
    """The norms whose outputs are outputs of the model."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """The outputs that gradients were sent back from, and their sizes; empty without gradients."""
    held_out: bool = False
    """Whether `samples` returns the held-out samples."""

    @property
    def others(self) -> ActivationStore:
        """The same store with the held-out samples."""
        return replace(self, held_out=True)

    def has(self, module: str, side: str) -> bool:
        """Return whether this side of a module was recorded."""
        return self._stored(f"{module}/{side}") is not None

    def samples(self, module: str, side: str) -> Tensor | None:
        """Return the inputs or outputs of a module, or the gradients of its outputs: (samples, units), in
        float32 as they were recorded.

        Of a module that the library has in parts: the outputs of all parts, and the input of the first.
        """
        names = (f"{module}/{side}", f"{module}[0]/{side}")
        keys = [key for name in names if (key := self._stored(name)) is not None][:1]
        while side in (OUTPUT, GRADIENT) and keys:
            key = self._stored(f"{module}[{len(keys)}]/{side}")
            if key is None:
                break
            keys.append(key)
        if not keys:
            return None
        parts = [self._read(key) for key in keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _stored(self, key: str) -> str | None:
        key = self.same.get(key, key)
        return key if key in self.segments else None

    def _read(self, key: str) -> Tensor:
        file, chosen = file_of(self.folder, key), self._selected
        found = sorted(one for one in self.segments[key] if one.batch in chosen)
        values, row = np.empty((sum(one.rows for one in found), found[0].units), np.float32), 0
        with file.open("rb") as opened:
            for one in found:
                opened.seek(values.itemsize * one.start)
                wanted = values[row : row + one.rows]
                if opened.readinto(wanted.data.cast("B")) != wanted.nbytes:
                    raise OSError(f"{file}: the file ends too early")
                row += one.rows
        return torch.from_numpy(values)

    @property
    def _selected(self) -> range:
        """The batches to learn from, or the held-out ones; all, where there are too few to divide."""
        split = self.batches - self.batches // HELD_OUT
        return range(split % self.batches, self.batches) if self.held_out else range(split)


def file_of(folder: Path, key: str) -> Path:
    """Return the file of a key; module names contain no slashes, and may be long."""
    return folder / f"{key.replace('/', '-')}.f32"
