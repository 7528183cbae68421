"""Shortcuts: between which modules the stream passes a branch by, found by intervening.

With the writers of a branch silenced, what arrives behind it is the stream itself: the module that was
given the same before is the entry. Something added to the branch arrives unchanged behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transfusion.verification.drafting.dependency_groups import AxisJoin
from transfusion.verification.drafting.module_parts import PartKind
from transfusion.verification.drafting.probe_model import CLOSE, ProbeModel, Trace, same


@dataclass(frozen=True)
class StreamShortcut:
    """A residual connection: where the stream goes in, and behind which module it returns."""

    entry: str
    branch: str
    source: int
    target: int


def find_shortcut(probe: ProbeModel, join: AxisJoin, size: int) -> StreamShortcut | None:
    """The modules between which a branch leaves the stream and joins it; None if they cannot be told."""
    entry = _entry(probe, join)
    branch = _branch(probe, join, size)
    return StreamShortcut(entry, branch, join.source, join.target) if entry and branch else None


def _entry(probe: ProbeModel, join: AxisJoin) -> str | None:
    silenced = frozenset(part.module for part in join.writers if part.kind is not PartKind.BARE)
    straight = _arrives(join, probe.run(silenced=silenced, until=_place(join)))
    return next((call.module for call in probe.original.calls if _holds(call.input, straight)), None)


def _holds(given: Tensor, straight: Tensor) -> bool:
    """Whether all places of the stream that arrive are among those that a module was given."""
    if not given.is_floating_point() or given.shape[-1] != straight.shape[-1]:
        return False
    if given.numel() == straight.numel():
        return same(given.reshape(straight.shape), straight)
    rows, wanted = given.reshape(-1, given.shape[-1]), straight.reshape(-1, straight.shape[-1])
    apart = (wanted[:, None] - rows[None]).abs().amax(-1).amin(-1)
    return len(wanted) < len(rows) and bool(apart.max() <= CLOSE * (1 + straight.abs().max()))


def _branch(probe: ProbeModel, join: AxisJoin, size: int) -> str | None:
    called = [part.module for part in join.writers if part.kind is not PartKind.BARE]
    owners = [part.module for part in join.writers if part.kind is PartKind.BARE]
    extra = torch.randn(size, generator=probe.generator, dtype=torch.float64)
    before = _arrives(join, probe.original)
    for module in (*sorted(called, key=lambda name: -probe.began[name]), *owners):
        trace = probe.run(added={module: extra}, until=_place(join))
        if same(before + extra, _arrives(join, trace)):
            return module
    return None


def _place(join: AxisJoin) -> int | None:
    return join.reader if isinstance(join.reader, int) else None


def _arrives(join: AxisJoin, trace: Trace) -> Tensor:
    """The sum behind the branch."""
    if isinstance(join.reader, int):
        return trace.calls[join.reader].input
    return trace.outputs[join.reader]
