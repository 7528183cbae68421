"""Counting: how large the numbers of a change are, before it is merged; here, or by workers elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transfusion.runtime.engines import Engine
from transfusion.transportation.merge_rules import magnitude_histogram

if TYPE_CHECKING:
    from transfusion.transportation.dense_transport import DenseTransport

PARTS = 64
"""In how many parts workers elsewhere look at a change: the counts of each are half a megabyte."""


def count_magnitudes(output: DenseTransport, engine: Engine | None, number: int, high: int | None) -> Tensor:
    """The magnitudes of one fine-tune's change, counted as `counted` does."""
    changed = output.changed_by(number)
    if engine is None or engine.shares_memory or not changed:
        return count_some(output, (number, changed, high))
    items = [(number, changed[start::PARTS], high) for start in range(min(PARTS, len(changed)))]
    return torch.stack(engine.each(output, count_some, items)).sum(0)


def count_some(output: DenseTransport, item: tuple[int, Collection[str], int | None]) -> Tensor:
    """The same in some tensors only."""
    number, names, high = item
    return magnitude_histogram(_changes(output, number, frozenset(names)), high)


def _changes(output: DenseTransport, number: int, names: Collection[str]) -> Iterator[Tensor]:
    """What a fine-tune changes in B's own rows, some rows at a time."""
    for entry in output.entries:
        if entry.name in names:
            for rows in list(output.cuts(entry))[: -1 if entry.added else None]:
                yield output.sources[number].change(entry.name, rows)
