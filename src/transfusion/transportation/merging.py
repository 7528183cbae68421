"""Merging: several fine-tunes, all in B's basis, combined into one change."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transfusion.alpha import Alpha
from transfusion.errors import SettingError
from transfusion.transportation.sources import Source


class How(StrEnum):
    """How changes are combined."""

    SUM = "sum"
    MEAN = "mean"
    TIES = "ties"
    """The largest of each; where they disagree in sign, the mean of those with the heavier sign."""
    DARE = "dare"
    """A random few of each, enlarged so that their expectation stays; then the sum."""


@dataclass
class Merging:
    """A way to combine changes; of a single change, the change itself."""

    how: How = How.SUM
    weights: tuple[float, ...] = ()
    """One for each fine-tune; without any, all count alike."""
    density: float = 0.2
    """The share of each change that ties keeps, and dare does not drop."""
    seed: int = 0
    alpha: Alpha = field(default_factory=Alpha)
    """On the combined change."""
    _least: tuple[float, ...] = ()
    """For ties: the smallest magnitude that is kept of each change."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise SettingError(f"density = {self.density}: a share is above 0 and at most 1")
        if not all(isfinite(weight) for weight in self.weights):
            raise SettingError(f"weights = {list(self.weights)}: a weight must be a number")
        if self.how is How.MEAN and self.weights and not sum(self.weights):
            raise SettingError("the weights of a mean cannot sum to 0", hint="choose --how sum")

    @property
    def passes(self) -> int:
        """How often every fine-tune is read."""
        return 3 if self.how is How.TIES else 1

    def as_json(self) -> dict[str, Any]:
        return {
            "how": str(self.how),
            "weights": list(self.weights),
            "density": self.density if self.how in (How.TIES, How.DARE) else None,
            "seed": self.seed if self.how is How.DARE else None,
            "alpha": self.alpha.as_json(),
        }

    def require_for(self, count: int) -> None:
        """Refuse weights that are not one for each fine-tune."""
        if self.weights and len(self.weights) != count:
            raise SettingError(
                f"{len(self.weights)} weight(s) for {count} fine-tune(s)", hint="give one for each, in order"
            )

    def prepare(self, sources: Sequence[Source], cuts: Mapping[str, Sequence[slice]]) -> None:
        """Find what ties keeps of each fine-tune: the largest share of all its numbers together.

        ``cuts`` are the rows of every tensor that can be had at a time.
        """
        if self.how is How.TIES and not self._least:
            self._least = tuple(self._smallest_kept(source, cuts) for source in sources)

    def _smallest_kept(self, source: Source, cuts: Mapping[str, Sequence[slice]]) -> float:
        """The magnitude that splits off the largest share, exact in float32.

        The bits of floats that are not negative are ordered as the floats are: counting first by the upper
        half of the bits, then by the lower half among those that have the right upper half, finds it.
        """
        total = 0
        upper = torch.zeros(2**16, dtype=torch.int64)
        for bits in _bits(source, cuts):
            total += bits.numel()
            upper += torch.bincount(bits >> 16, minlength=2**16)
        wanted = max(1, round(self.density * total))
        high, above = _from_the_top(upper, wanted)
        lower = torch.zeros(2**16, dtype=torch.int64)
        for bits in _bits(source, cuts):
            lower += torch.bincount(bits[bits >> 16 == high] & 0xFFFF, minlength=2**16)
        low, _ = _from_the_top(lower, wanted - above)
        return float(np.array(high << 16 | low, dtype=np.uint32).view(np.float32))

    def combine(self, sources: Sequence[Source], name: str, rows: slice) -> Tensor | None:
        """Some rows of the combined change, times α; None if no fine-tune changes this tensor."""
        changes = [
            (number, source.change(name, rows))
            for number, source in enumerate(sources)
            if source.changes(name)
        ]
        if not changes:
            return None
        weights = self._weights(len(sources))
        match self.how:
            case How.SUM | How.MEAN:
                combined = _sum([_times(weights[number], change) for number, change in changes])
            case How.DARE:
                combined = _sum(
                    [
                        _times(weights[number], self._thinned(change, (number, name, rows)))
                        for number, change in changes
                    ]
                )
            case How.TIES:
                combined = _agreed(
                    [_times(weights[number], self._trimmed(change, number)) for number, change in changes]
                )
        return _times(self.alpha.at(name), combined)

    def _weights(self, count: int) -> list[float]:
        weights = list(self.weights) or [1.0] * count
        total = sum(weights) if self.how is How.MEAN else 1.0
        return [weight / total for weight in weights]

    def _thinned(self, change: Tensor, place: tuple[int, str, slice]) -> Tensor:
        """A random share of the change: another for each tensor and fine-tune, the same in every run."""
        number, name, rows = place
        rng = np.random.default_rng([self.seed, number, zlib.crc32(name.encode()), rows.start])
        kept = torch.from_numpy(rng.random(tuple(change.shape), dtype=np.float32)) < self.density
        return change * kept / self.density

    def _trimmed(self, change: Tensor, number: int) -> Tensor:
        return change * (change.abs().float() >= self._least[number])


def _bits(source: Source, cuts: Mapping[str, Sequence[slice]]) -> Iterator[Tensor]:
    """The magnitudes of a whole change, as the bits of float32."""
    for name, blocks in cuts.items():
        if source.changes(name):
            for rows in blocks:
                yield source.change(name, rows).abs().float().flatten().view(torch.int32).long()


def _from_the_top(counts: Tensor, wanted: int) -> tuple[int, int]:
    """The bin that holds the wanted-th largest, and how many are in the bins above it."""
    from_top = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, wanted))
    return len(counts) - 1 - place, int(from_top[place - 1]) if place else 0


def _times(factor: float, change: Tensor) -> Tensor:
    return change if factor == 1 else factor * change


def _sum(changes: list[Tensor]) -> Tensor:
    total = changes[0]
    for change in changes[1:]:
        total = total + change
    return total


def _agreed(changes: list[Tensor]) -> Tensor:
    """For every number the mean of those that have the sign of the sum, and are not 0."""
    sign = _sum(changes).sign()
    agreeing = [change * (change.sign() == sign) for change in changes]
    count = _sum([(change != 0).to(change.dtype) for change in agreeing])
    return _sum(agreeing) / count.clamp(min=1)
