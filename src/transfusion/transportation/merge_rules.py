"""Merging: several fine-tunes, all in B's basis, combined into one change."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from transfusion.errors import SettingError
from transfusion.transportation.alpha import Alpha

Counts: TypeAlias = Callable[[int | None], Tensor]
"""The magnitudes of a change, counted as `counted` does."""


class MergeMethod(StrEnum):
    """How changes are combined."""

    SUM = "sum"
    MEAN = "mean"
    TIES = "ties"
    """The largest of each; where they disagree in sign, the mean of those with the heavier sign."""
    DARE = "dare"
    """A random few of each, enlarged so that their expectation stays; then the sum."""

    @classmethod
    def named(cls, name: str) -> MergeMethod:
        """The way of combining that has this name."""
        try:
            return cls(name)
        except ValueError as error:
            raise SettingError(
                f"how = {name} is not a choice", hint=f"choose one of {', '.join(cls)}"
            ) from error


@dataclass
class MergeRule:
    """A way to combine changes; of a single change, the change itself."""

    how: MergeMethod = MergeMethod.SUM
    weights: tuple[float, ...] = ()
    """One for each fine-tune; without any, all count alike."""
    density: float = 0.2
    """The share of each change that ties keeps, and dare does not drop."""
    seed: int = 0
    alpha: Alpha = field(default_factory=Alpha)
    """On the combined change."""
    _least: tuple[float, ...] = ()
    """For ties: the smallest magnitude that is kept of each change."""

    @classmethod
    def asked(
        cls,
        how: MergeMethod | str,
        weights: Sequence[float] = (),
        density: float | None = None,
        seed: int = 0,
        alpha: Alpha | None = None,
    ) -> MergeRule:
        """As people ask for it; what would have no effect is refused."""
        chosen = MergeMethod.named(how)
        if density is not None and chosen not in (MergeMethod.TIES, MergeMethod.DARE):
            raise SettingError(
                f"density = {density}: {chosen} keeps everything", hint="leave it out, or choose ties or dare"
            )
        return cls(chosen, tuple(weights), 0.2 if density is None else density, seed, alpha or Alpha())

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise SettingError(
                f"density = {self.density}: a share is above 0 and at most 1", hint="give 0.2, for instance"
            )
        if not all(isfinite(weight) for weight in self.weights):
            raise SettingError(f"weights = {list(self.weights)}: a weight must be a number")
        if self.how is MergeMethod.MEAN and self.weights and not sum(self.weights):
            raise SettingError("the weights of a mean cannot sum to 0", hint="choose --how sum")

    @property
    def passes(self) -> int:
        """How often every fine-tune is read."""
        return 3 if self.how is MergeMethod.TIES else 1

    def as_json(self) -> dict[str, Any]:
        return {
            "how": str(self.how),
            "weights": list(self.weights),
            "density": self.density if self.how in (MergeMethod.TIES, MergeMethod.DARE) else None,
            "seed": self.seed if self.how is MergeMethod.DARE else None,
            "alpha": self.alpha.as_json(),
        }

    def require_for(self, count: int) -> None:
        """Refuse weights that are not one for each fine-tune."""
        if self.weights and len(self.weights) != count:
            raise SettingError(
                f"{len(self.weights)} weight(s) for {count} fine-tune(s)", hint="give one for each, in order"
            )

    def prepare(self, changes: Sequence[Counts]) -> None:
        """Find what ties keeps of each change: the largest share of all its numbers together."""
        if self.how is MergeMethod.TIES and not self._least:
            self._least = tuple(_smallest_of_the_largest(self.density, counts) for counts in changes)

    def combine(self, changes: Mapping[int, Tensor], count: int, name: str, start: int = 0) -> Tensor | None:
        """Changes of one tensor, by the number of the fine-tune, as one change, times α.

        ``count`` is the number of all fine-tunes, and ``start`` the first row; None if nothing changes.
        """
        if not changes:
            return None
        shares, place = self.shares(count), (zlib.crc32(name.encode()), start)
        chosen = [_times(shares[number], self._chosen(one, number, place)) for number, one in changes.items()]
        combined = _agreed(chosen) if self.how is MergeMethod.TIES else _sum(chosen)
        return _times(self.alpha.at(name), combined)

    def shares(self, count: int) -> list[float]:
        """What each of so many fine-tunes is multiplied by."""
        weights = list(self.weights) or [1.0] * count
        total = sum(weights) if self.how is MergeMethod.MEAN else 1.0
        return [weight / total for weight in weights]

    def _chosen(self, change: Tensor, number: int, place: tuple[int, int]) -> Tensor:
        match self.how:
            case MergeMethod.TIES:
                return change * (change.abs().float() >= self._least[number])
            case MergeMethod.DARE:
                return self._thinned(change, number, place)
        return change

    def _thinned(self, change: Tensor, number: int, place: tuple[int, int]) -> Tensor:
        """A random share of the change: another for each tensor and fine-tune, the same in every run."""
        rng = np.random.default_rng([self.seed, number, *place])
        kept = torch.from_numpy(rng.random(tuple(change.shape), dtype=np.float32)) < self.density
        return change * kept / self.density


def _smallest_of_the_largest(share: float, counts: Counts) -> float:
    """The magnitude that splits off the largest share of a change, exact in float32.

    The bits of floats that are not negative are ordered as the floats are: counting first by the upper half
    of the bits, then by the lower half among those that have the right upper half, finds it.
    """
    upper = counts(None)
    wanted = max(1, round(share * int(upper.sum())))
    high, above = _from_the_top(upper, wanted)
    low, _ = _from_the_top(counts(high), wanted - above)
    return float(np.array(high << 16 | low, dtype=np.uint32).view(np.float32))


def magnitude_histogram(change: Iterable[Tensor], high: int | None) -> Tensor:
    """How many magnitudes of a change have each upper half of bits; or, among those with the upper half
    ``high``, each lower half. Counts of parts of a change sum to those of the whole.
    """
    counts = torch.zeros(2**16, dtype=torch.int64)
    for bits in map(_bits, change):
        half = bits >> 16 if high is None else bits[bits >> 16 == high] & 0xFFFF
        counts += torch.bincount(half, minlength=2**16)
    return counts


def _bits(change: Tensor) -> Tensor:
    """Magnitudes, as the bits of float32."""
    return change.abs().float().flatten().view(torch.int32).long()


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
