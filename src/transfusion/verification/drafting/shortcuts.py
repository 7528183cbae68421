"""Residual connections: their entry and branch modules, found by intervention.

With the writers of a branch silenced, the sum after the branch is the stream itself: the entry is the first
module with that input. The branch is the module to whose output a tensor can be added that arrives in the
sum unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transfusion.verification.drafting.dependency_groups import AxisJoin
from transfusion.verification.drafting.module_parts import PartKind
from transfusion.verification.drafting.probe_model import CLOSE, ProbeModel, Trace, same


def find_shortcut(probe: ProbeModel, join: AxisJoin, size: int) -> tuple[str, str] | None:
    """Return the entry and the branch module of a residual connection, or None if they are not found."""
    entry = _entry(probe, join)
    branch = _branch(probe, join, size)
    return (entry, branch) if entry and branch else None


def _entry(probe: ProbeModel, join: AxisJoin) -> str | None:
    silenced = frozenset(part.module for part in join.writers if part.kind is not PartKind.BARE)
    straight = _sum_in(probe.run(silenced=silenced, until=_place(join)), join)
    return next((call.module for call in probe.original.calls if _holds(call.input, straight)), None)


def _holds(given: Tensor, straight: Tensor) -> bool:
    """Whether all positions of the stream are among the positions of a module's input."""
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
    before = _sum_in(probe.original, join)
    for module in (*sorted(called, key=lambda name: -probe.began[name]), *owners):
        trace = probe.run(added={module: extra}, until=_place(join))
        if same(before + extra, _sum_in(trace, join)):
            return module
    return None


def _place(join: AxisJoin) -> int | None:
    return join.reader if isinstance(join.reader, int) else None


def _sum_in(trace: Trace, join: AxisJoin) -> Tensor:
    """Return the sum after the branch."""
    if isinstance(join.reader, int):
        return trace.calls[join.reader].input
    return trace.outputs[join.reader]
