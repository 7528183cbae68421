"""Gains that do not fit into memory, in temporary files that are read some rows at a time.

Only gains that are solved among candidates anyway are written to files: the result does not depend on memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from torch import Tensor

from transfusion.errors import OutputError
from transfusion.matching.solvers.assignment import HUGE
from transfusion.matching.weights.gain_products import BLOCK
from transfusion.matching.weights.gains import GainHistory, Gains
from transfusion.matching.weights.weight_pair import WeightPair

PER_UNIT = 16_000
"""Bytes that each unit takes when a gain is solved among candidates: 206 MB were measured for 14336."""


def rows_at_a_time(weights: WeightPair, id: str, room: int | None) -> int | None:
    """Return how many places of B to compute at a time, if the gain and its solution exceed ``room`` bytes.

    None means that they fit, or that the axis has too few units for a file.
    """
    size, rows = weights.architecture.sizes[id], weights.architecture.rows(id)
    per_place: int = rows * size * weights.place["dtype"].itemsize
    if room is None or size < HUGE or per_place * size + solving_bytes(rows, size) <= room // 2:
        return None
    return max(BLOCK, room // 4 // per_place // BLOCK * BLOCK)


def solving_bytes(rows: int, size: int) -> int:
    """Return the bytes that solving a large gain takes beside it."""
    return rows * size * PER_UNIT


@dataclass(frozen=True)
class DiskGain:
    """One row of a gain, in a file."""

    file: IO[bytes]
    offset: int
    size: int
    dtype: torch.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the gains of some places of B with all units of A."""
        per_row = self.size * self.dtype.itemsize
        buffer = torch.empty(stop - start, self.size, dtype=self.dtype)
        self.file.seek(self.offset + start * per_row)
        self.file.readinto(buffer.numpy().view(np.uint8).data.cast("B"))  # type: ignore[attr-defined]
        return buffer


@contextmanager
def gain_on_disk(gains: Gains, id: str, history: GainHistory, step: int) -> Iterator[list[DiskGain]]:
    """Compute a gain into a temporary file, ``step`` places at a time; yield a part for each of its rows."""
    size, rows = gains.weights.architecture.sizes[id], gains.weights.architecture.rows(id)
    dtype: torch.dtype = gains.weights.place["dtype"]
    whole = size * size * dtype.itemsize
    step = max(BLOCK, step // BLOCK * BLOCK)
    with tempfile.TemporaryFile(prefix="transfusion-") as file:
        try:
            for start in range(0, size, step):
                some = range(start, min(start + step, size))
                for row, part in enumerate(gains.of(id, history, some, keep=False)):
                    file.seek(row * whole + start * size * dtype.itemsize)
                    file.write(part.cpu().numpy().data.cast("B"))
        except OSError as error:
            raise OutputError(
                f"the gain of {id} ({rows * whole / 1e9:.1f} GB) could not be written to"
                f" {tempfile.gettempdir()} ({error.strerror or error})",
                hint="set TMPDIR to a folder on a larger disk, or give more `memory`",
            ) from error
        yield [DiskGain(file, row * whole, size, dtype) for row in range(rows)]
