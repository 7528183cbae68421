"""Merge rules: several task vectors in B's basis, combined into one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isfinite
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from transfusion.errors import SettingError
from transfusion.transport.alpha import Alpha

Counts: TypeAlias = Callable[[int | None], Tensor]
"""A function that counts the magnitudes of a change, as `magnitude_histogram` does."""


class MergeMethod(StrEnum):
    """How task vectors are combined."""

    SUM = "sum"
    MEAN = "mean"
    TIES = "ties"
    """Trim each to its largest magnitudes, elect a sign per entry, average the entries with that sign."""
    DARE = "dare"
    """Drop random entries of each, rescale the rest to keep the expectation, and sum."""

    @classmethod
    def named(cls, name: str) -> MergeMethod:
        """Return the method of this name, or refuse the name."""
        try:
            return cls(name)
        except ValueError as error:
            raise SettingError(
                f"how = {name} is not a choice", hint=f"choose one of {', '.join(cls)}"
            ) from error


@dataclass
class MergeRule:
    """A merge method with its settings. A single change stays as it is."""

    how: MergeMethod = MergeMethod.SUM
    weights: tuple[float, ...] = ()
    """One weight per fine-tune. Empty: all are 1."""
    density: float = 0.2
    """The share of the entries of each change that TIES or DARE keeps."""
    seed: int = 0
    alpha: Alpha = field(default_factory=Alpha)
    """The factor on the combined change."""
    _thresholds: tuple[float, ...] = ()
    """TIES: for each change, the smallest magnitude that is kept."""

    @classmethod
    def asked(
        cls,
        how: MergeMethod | str,
        weights: Sequence[float] = (),
        density: float | None = None,
        seed: int = 0,
        alpha: Alpha | None = None,
    ) -> MergeRule:
        """Return the rule for a user's options; refuse options that would have no effect."""
        chosen = MergeMethod.named(how)
        if density is not None and chosen not in (MergeMethod.TIES, MergeMethod.DARE):
            raise SettingError(
                f"density = {density}: {chosen} drops nothing", hint="leave it out, or choose ties or dare"
            )
        return cls(chosen, tuple(weights), 0.2 if density is None else density, seed, alpha or Alpha())

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise SettingError(
                f"density = {self.density}: it must be above 0 and at most 1", hint="for example 0.2"
            )
        if not all(isfinite(weight) for weight in self.weights):
            raise SettingError(f"weights = {list(self.weights)}: a weight must be a number")
        odd = min(self.weights, default=1) < 0 or not 0 < sum(self.weights or (1,)) < inf
        if self.how is MergeMethod.MEAN and odd:
            raise SettingError(
                f"weights = {list(self.weights)}: those of a mean must not be negative, nor all 0",
                hint='choose `how="sum"`, which adds each change times its weight',
            )

    def as_json(self) -> dict[str, Any]:
        return {
            "how": str(self.how),
            "weights": list(self.weights),
            "density": self.density if self.how in (MergeMethod.TIES, MergeMethod.DARE) else None,
            "seed": self.seed if self.how is MergeMethod.DARE else None,
            "alpha": self.alpha.as_json(),
        }

    def require_for(self, count: int) -> None:
        """Refuse a number of weights other than the number of fine-tunes."""
        if self.weights and len(self.weights) != count:
            raise SettingError(
                f"{len(self.weights)} weight(s) for {count} fine-tune(s)",
                hint="give one weight per fine-tune, in the same order",
            )

    def prepare(self, changes: Sequence[Counts]) -> None:
        """Find the TIES threshold of each change: one magnitude for all its tensors together."""
        if self.how is MergeMethod.TIES and not self._thresholds:
            self._thresholds = tuple(_threshold(self.density, counts) for counts in changes)

    def combine(self, changes: Mapping[int, Tensor], count: int, name: str, start: int = 0) -> Tensor | None:
        """Return α times the combined change of one tensor, or None if no fine-tune changes the tensor.

        ``changes`` has the changes by the index of the fine-tune, ``count`` is the number of all fine-tunes,
        ``start`` the first row.
        """
        if not changes:
            return None
        shares, place = self.shares(count), (zlib.crc32(name.encode()), start)
        kept = [_times(shares[number], self._trimmed(one, number, place)) for number, one in changes.items()]
        combined = _elected_mean(kept) if self.how is MergeMethod.TIES else _sum(kept)
        return _times(self.alpha.at(name), combined)

    def shares(self, count: int) -> list[float]:
        """Return the factor on each of ``count`` fine-tunes."""
        weights = list(self.weights) or [1.0] * count
        total = sum(weights) if self.how is MergeMethod.MEAN else 1.0
        return [weight / total for weight in weights]

    def _trimmed(self, change: Tensor, number: int, place: tuple[int, int]) -> Tensor:
        """Keep what TIES or DARE keeps. DARE draws per tensor and fine-tune, the same in every run."""
        if self.how is MergeMethod.TIES:
            return change * (change.abs().float() >= self._thresholds[number])
        if self.how is MergeMethod.DARE:
            rng = np.random.default_rng([self.seed, number, *place])
            kept = torch.from_numpy(rng.random(tuple(change.shape), dtype=np.float32)) < self.density
            return change * kept / self.density
        return change


def _threshold(share: float, counts: Counts) -> float:
    """Return the smallest magnitude among the largest ``share`` of a change, exact in float32.

    Non-negative floats are ordered as their bits are. One count by the upper 16 bits finds the bin of the
    threshold; a second count by the lower 16 bits within that bin finds the threshold itself.
    """
    upper = counts(None)
    wanted = max(1, round(share * int(upper.sum())))
    high, above = _from_the_top(upper, wanted)
    low, _ = _from_the_top(counts(high), wanted - above)
    return float(np.array(high << 16 | low, dtype=np.uint32).view(np.float32))


def magnitude_histogram(change: Iterable[Tensor], high: int | None) -> Tensor:
    """Count the magnitudes of a change by the upper 16 bits of their float32; or, with ``high``, those with
    these upper bits by their lower 16 bits. The counts of parts add up to the counts of the whole.
    """
    counts = torch.zeros(2**16, dtype=torch.int64)
    for bits in map(_bits, change):
        half = bits >> 16 if high is None else bits[bits >> 16 == high] & 0xFFFF
        counts += torch.bincount(half, minlength=2**16)
    return counts


def _bits(change: Tensor) -> Tensor:
    """Return the magnitudes as the bits of float32."""
    return change.abs().float().flatten().view(torch.int32)


def _from_the_top(counts: Tensor, wanted: int) -> tuple[int, int]:
    """Return the bin that holds the ``wanted``-th largest, and the total of the bins above it."""
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


def _elected_mean(changes: list[Tensor]) -> Tensor:
    """Elect the sign of the sum for every entry, and average the non-zero entries with that sign."""
    sign = _sum(changes).sign()  # γ of TIES: the elected sign of every entry
    total, count = torch.zeros_like(sign), torch.zeros_like(sign)
    for change in changes:
        agreeing = (change * sign).clamp_(min=0)
        total += agreeing
        count += agreeing > 0
    return total.mul_(sign).div_(count.clamp_(min=1))
