"""Histograms of the magnitudes of a change, for TIES; computed here or by workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transfusion.runtime.engines import Engine
from transfusion.transport.merge_rules import magnitude_histogram

if TYPE_CHECKING:
    from transfusion.transport.dense_transport import DenseTransport

PARTS = 64
"""The number of parts that a change is split into for workers. The counts of each part take 512 kB."""


def count_magnitudes(output: DenseTransport, engine: Engine | None, number: int, high: int | None) -> Tensor:
    """Count the magnitudes of one fine-tune's change, as `magnitude_histogram` does."""
    changed = output.changed_by(number)
    if engine is None or not changed:
        return count_some(output, (number, changed, high))
    items = [(number, changed[start::PARTS], high) for start in range(min(PARTS, len(changed)))]
    return torch.stack(engine.each(output, count_some, items)).sum(0)


def count_some(output: DenseTransport, item: tuple[int, Collection[str], int | None]) -> Tensor:
    """Count the magnitudes in some of the tensors."""
    number, names, high = item
    return magnitude_histogram(_changes(output, number, frozenset(names)), high)


def _changes(output: DenseTransport, number: int, names: Collection[str]) -> Iterator[Tensor]:
    """Yield the change of B's own rows (new tokens excluded), block by block."""
    for entry in output.entries:
        if entry.name in names:
            for rows in list(output.cuts(entry))[: -1 if entry.added else None]:
                yield output.sources[number].change(entry.name, rows)
