"""Dependency groups: all dimensions that must be permuted together with the outputs of one part.

The outputs of a part are permuted, and the model is run. A part whose input is now the permuted original
reads the axis and joins the group. An input that is neither the original nor permuted is a sum or a product
with the output of another part: candidates are tried until the input is the permuted original.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from transfusion.verification.drafting.probe_model import (
    CLOSE,
    ModuleCall,
    ModulePart,
    PartKind,
    ProbeModel,
    Slot,
    Trace,
    permuted,
    same,
)

RECENT = 8
"""The number of candidate parts before a mixed input."""


@dataclass(frozen=True)
class AxisJoin:
    """A place where a branch is added: the parts that write the branch, and the first reader of the sum."""

    reader: int | str
    """The index of a call, or the name of an output."""
    writers: tuple[ModulePart, ...]
    source: int
    target: int


@dataclass
class DependencyGroup:
    """The dimensions that are permuted together, with the point of the axis where each is written or read."""

    size: int
    slots: dict[Slot, int] = field(default_factory=dict)
    joins: list[AxisJoin] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    """Outputs of the model that lie on this axis."""
    unified: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of points that a shared tensor makes equal."""
    calls: dict[int, int] = field(default_factory=dict)
    """The calls that read the axis, with their points."""
    last: int = 0
    broken: int | str | None = None
    """The call or output that stayed mixed, if any."""


def dependency_group(
    probe: ProbeModel, start: ModulePart, taken: Collection[Slot] = (), *, within: str = "", most: int = 3
) -> DependencyGroup:
    """Return the dependency group of a part's outputs.

    Args:
        taken: Dimensions that belong to other axes.
        within: Only parts whose names start with this are candidates.
        most: The largest number of parts to add at once.
    """
    size = probe.extent(start.outputs[0])
    group = DependencyGroup(size, dict.fromkeys(start.outputs, 0))
    return _Search(probe, group, frozenset(taken), within, most, probe.permutation(size)).finish()


@dataclass
class _Search:
    probe: ProbeModel
    group: DependencyGroup
    taken: frozenset[Slot]
    within: str
    most: int
    index: Tensor
    """The permutation."""

    def finish(self) -> DependencyGroup:
        again = True
        while again:
            again, mixed = self._walk()
            if mixed is not None:
                again = self._complete(mixed)
                self.group.broken = None if again else mixed
        return self.group

    def _trial(self, more: Collection[Slot] = (), until: int | None = None) -> Trace:
        return self.probe.run(dict.fromkeys((*self.group.slots, *more), self.index), until=until)

    def _state(self, place: int, now: ModuleCall) -> str:
        """Compare the input of a call with the original: same, moved or mixed."""
        original = self.probe.original.calls[place].input
        if permuted(original, now.input, self.index, self.probe.part(now.module).channel):
            return "moved"
        return "same" if same(original, now.input) else "mixed"

    def _walk(self) -> tuple[bool, int | str | None]:
        """Run once and add new readers. Return whether another run is needed, and the first mixed input."""
        group = self.group
        trace = self._trial()
        news = False
        for place, call in enumerate(trace.calls):
            part = self.probe.part(call.module)
            state = self._state(place, call)
            reads = any(slot in group.slots for slot in part.inputs)
            if state == "mixed" or (state == "same" and reads):
                return (True, None) if news else (False, place)
            if state == "moved" and place not in group.calls:
                point = self._point(place, part)
                group.calls[place] = point
                for slot in part.inputs:
                    if slot in self.taken:
                        return False, place
                    if (there := group.slots.setdefault(slot, point)) != point:
                        group.unified.add((min(there, point), max(there, point)))
                news = news or not reads
        if news:
            return True, None
        for name, original in self.probe.original.outputs.items():
            if permuted(original, trace.outputs[name], self.index, -1):
                group.outputs.setdefault(name, group.last)
            elif not same(original, trace.outputs[name]):
                return False, name
        return False, None

    def _point(self, place: int, part: ModulePart) -> int:
        """Return the point that a call reads: that of an earlier call with the same input, or the latest."""
        if part.kind is PartKind.ELEMENTWISE and part.inputs[0] in self.group.slots:
            return self.group.slots[part.inputs[0]]
        calls = self.probe.original.calls
        for earlier, point in self.group.calls.items():
            seen = [calls[earlier].input]
            if self.probe.part(calls[earlier].module).kind is PartKind.ELEMENTWISE:
                seen.append(calls[earlier].output)
            if any(_equal(calls[place].input, value) for value in seen):
                return point
        return self.group.last

    # ── mixed inputs ─────────────────────────────────────────────────────────────────────────

    def _complete(self, mixed: int | str) -> bool:
        """Add the parts whose outputs must be permuted too for this input, or output, to be permuted."""
        candidates = list(self._candidates(mixed))[-RECENT:]
        for count in range(1, min(self.most, len(candidates)) + 1):
            for some in combinations(reversed(candidates), count):
                if self._is_permuted(mixed, [slot for _, slots in some for slot in slots]):
                    self._add(mixed, some)
                    return True
        return False

    def _candidates(self, mixed: int | str) -> Iterator[tuple[ModulePart, tuple[Slot, ...]]]:
        """Yield the parts that ran before, with dimensions of the right size outside the group."""
        probe, size = self.probe, self.group.size
        end = mixed if isinstance(mixed, int) else len(probe.original.calls)
        found: list[tuple[int, ModulePart, tuple[Slot, ...]]] = []
        for part in probe.parts:
            began = probe.began.get(part.module)
            if began is None or not part.module.startswith(self.within):
                continue
            if began > end or (part.is_called and began == end):
                continue
            if part.is_called:
                options = [part.outputs]
            else:
                shape = probe.parameters[part.parameter].shape
                options = [((part.parameter, dim),) for dim, extent in enumerate(shape) if extent == size]
            for slots in options:
                new = not any(slot in self.group.slots or slot in self.taken for slot in slots)
                if new and probe.extent(slots[0]) == size:
                    found.append((began, part, slots))
        yield from ((part, slots) for _, part, slots in sorted(found, key=lambda one: one[0]))

    def _is_permuted(self, mixed: int | str, more: list[Slot]) -> bool:
        trace = self._trial(more, until=mixed if isinstance(mixed, int) else None)
        if isinstance(mixed, str):
            original = self.probe.original.outputs[mixed]
            return permuted(original, trace.outputs[mixed], self.index, -1)
        return self._state(mixed, trace.calls[mixed]) == "moved"

    def _add(self, mixed: int | str, some: tuple[tuple[ModulePart, tuple[Slot, ...]], ...]) -> None:
        group = self.group
        point = group.last
        reader = self.probe.part(self.probe.original.calls[mixed].module) if isinstance(mixed, int) else None
        tied = [group.slots[slot] for slot in (reader.inputs if reader else ()) if slot in group.slots]
        if tied:
            point = tied[0]
            group.calls[int(mixed)] = point
        elif point in group.calls.values():
            writers = tuple(part for part, _ in some)
            group.joins.append(AxisJoin(mixed, writers, point, point + 1))
            group.last = point = point + 1
        for _, slots in some:
            group.slots |= dict.fromkeys(slots, point)


def is_folded(probe: ProbeModel, writer: ModulePart, reader: ModulePart) -> bool:
    """Whether the two halves of a part's output are combined elementwise into another part's input."""
    size = probe.extent(reader.inputs[0])
    if probe.extent(writer.outputs[0]) != 2 * size:
        return False
    index = probe.permutation(size)
    moves = dict.fromkeys(writer.outputs, torch.cat([index, index + size]))
    place = next(i for i, call in enumerate(probe.original.calls) if call.module == reader.module)
    now = probe.run(moves, until=place).calls[place].input
    return permuted(probe.original.calls[place].input, now, index, -1)


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


# ── the modules of residual connections ─────────────────────────────────────────────────────


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
