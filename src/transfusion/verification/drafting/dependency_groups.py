"""Closures: everything that must move when the outputs of one part move.

A permutation is put on the outputs of a part, and the model is run. A part whose input comes out permuted
reads the axis, and moves along. An input that comes out mixed is a sum, or a product, with something that
has not moved yet: the parts that make it whole are searched for, by trying.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from transfusion.verification.drafting.module_parts import ModuleCall, ModulePart, PartKind, Slot
from transfusion.verification.drafting.probe_model import ProbeModel, Trace, permuted, same

RECENT = 8
"""How many parts before a mixed input are suspected."""


@dataclass(frozen=True)
class AxisJoin:
    """A place where the axis is met by a branch: which parts write it, who reads the sum first."""

    reader: int | str
    """A call, or the name of an output."""
    writers: tuple[ModulePart, ...]
    source: int
    target: int


@dataclass
class DependencyGroup:
    """The dimensions that move together, with the point of the axis at which each is written or read."""

    size: int
    slots: dict[Slot, int] = field(default_factory=dict)
    joins: list[AxisJoin] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    """Outputs of the model that lie on this axis."""
    unified: set[tuple[int, int]] = field(default_factory=set)
    """Points that one tensor forces to be the same."""
    calls: dict[int, int] = field(default_factory=dict)
    """Calls that read the axis, and at which point."""
    last: int = 0
    broken: int | str | None = None
    """The call or output whose input could not be made whole, if any."""


def dependency_group(
    probe: ProbeModel, start: ModulePart, taken: Collection[Slot] = (), *, within: str = "", most: int = 3
) -> DependencyGroup:
    """The closure of a part's outputs; ``broken`` says where it failed, if it did.

    ``taken`` belongs to other axes. Parts outside ``within`` are not suspected, nor ever more than ``most``.
    """
    group = DependencyGroup(probe.extent(start.outputs[0]), dict.fromkeys(start.outputs, 0))
    return _Search(probe, group, frozenset(taken), within, most).finish()


class _Search:
    def __init__(
        self,
        probe: ProbeModel,
        group: DependencyGroup,
        taken: frozenset[Slot],
        within: str,
        most: int,
    ) -> None:
        self.probe, self.group, self.taken, self.within, self.most = (
            probe,
            group,
            taken,
            within,
            most,
        )
        self.index = probe.permutation(group.size)

    def finish(self) -> DependencyGroup:
        again = True
        while again:
            again, trouble = self._walk()
            if trouble is not None:
                again = self._mend(trouble)
                self.group.broken = None if again else trouble
        return self.group

    def _trial(self, more: Collection[Slot] = (), until: int | None = None) -> Trace:
        return self.probe.run(dict.fromkeys((*self.group.slots, *more), self.index), until=until)

    def _state(self, place: int, now: ModuleCall) -> str:
        """How the input of a call compares with the original: same, moved or mixed."""
        original = self.probe.original.calls[place].input
        if permuted(original, now.input, self.index, self.probe.part(now.module).channel):
            return "moved"
        return "same" if same(original, now.input) else "mixed"

    def _walk(self) -> tuple[bool, int | str | None]:
        """One run that takes in new readers: whether another is needed, and what stands in its way."""
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
        """The point that a call reads: where its very input was seen before, or else the latest."""
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

    # ── mending ──────────────────────────────────────────────────────────────────────────────

    def _mend(self, trouble: int | str) -> bool:
        """Find the parts whose outputs must move too for this input, or output, to become whole."""
        suspects = list(self._suspects(trouble))[-RECENT:]
        for count in range(1, min(self.most, len(suspects)) + 1):
            for some in combinations(reversed(suspects), count):
                if self._is_whole(trouble, [slot for _, slots in some for slot in slots]):
                    self._take(trouble, some)
                    return True
        return False

    def _suspects(self, trouble: int | str) -> Iterator[tuple[ModulePart, tuple[Slot, ...]]]:
        """Parts that ran before, with dimensions of the right size that have not moved."""
        probe, size = self.probe, self.group.size
        end = trouble if isinstance(trouble, int) else len(probe.original.calls)
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

    def _is_whole(self, trouble: int | str, more: list[Slot]) -> bool:
        trace = self._trial(more, until=trouble if isinstance(trouble, int) else None)
        if isinstance(trouble, str):
            original = self.probe.original.outputs[trouble]
            return permuted(original, trace.outputs[trouble], self.index, -1)
        return self._state(trouble, trace.calls[trouble]) == "moved"

    def _take(self, trouble: int | str, some: tuple[tuple[ModulePart, tuple[Slot, ...]], ...]) -> None:
        group = self.group
        point = group.last
        reader = (
            self.probe.part(self.probe.original.calls[trouble].module) if isinstance(trouble, int) else None
        )
        tied = [group.slots[slot] for slot in (reader.inputs if reader else ()) if slot in group.slots]
        if tied:
            point = tied[0]
            group.calls[int(trouble)] = point
        elif point in group.calls.values():
            writers = tuple(part for part, _ in some)
            group.joins.append(AxisJoin(trouble, writers, point, point + 1))
            group.last = point = point + 1
        for _, slots in some:
            group.slots |= dict.fromkeys(slots, point)


def is_folded(probe: ProbeModel, writer: ModulePart, reader: ModulePart) -> bool:
    """Whether the two halves of what a part writes meet element by element in what another reads."""
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
