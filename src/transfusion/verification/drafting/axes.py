"""Axes: all dimensions that must be permuted together with the outputs of one part.

The outputs of a part are permuted, and the model is run. A part whose input is now the permuted original
reads the axis and joins the group. An input that is neither the original nor permuted is a sum or a product
with the output of another part: candidates are tried until the input is the permuted original.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from transfusion.verification.drafting.trials import CLOSE, Kind, Part, Place, Slot, Trace, Trials, same

RECENT = 8
"""The number of candidate parts before a mixed input."""


@dataclass(frozen=True)
class Join:
    """A place where a branch is added to the stream."""

    reader: Place
    """The first reader of the sum."""
    writers: tuple[Part, ...]
    """The parts that write the branch."""
    source: int
    """The point of the stream before it."""
    target: int
    """The point of the stream after it."""
    entry: str | None
    """The first module that reads the stream before it, if there is one."""


class AxisGroup:
    """The dimensions that are permuted together, with the point of the axis where each is written or read.

    ``taken`` are dimensions of other axes, ``within`` begins the names of all candidates, and ``most`` is the
    largest number of parts that are added at once.
    """

    def __init__(
        self, trials: Trials, start: Part, taken: Collection[Slot] = (), within: str = "", most: int = 3
    ) -> None:
        self.trials, self.taken, self.within, self.most = trials, taken, within, most
        self.size = trials.extent(start.outputs[0])
        self.index = trials.permutation(self.size)
        self.slots: dict[Slot, int] = dict.fromkeys(start.outputs, 0)
        self.joins: list[Join] = []
        self.outputs: dict[str, int] = {}
        """Outputs of the model that lie on this axis."""
        self.unified: set[tuple[int, int]] = set()
        """Pairs of points that a shared tensor makes equal."""
        self.calls: dict[int, int] = {}
        """The calls that read the axis, with their points."""
        self.reached: dict[int, set[Place]] = {}
        """For every point after a join, the calls and outputs that depend on the branch."""
        self.broken: Place | None = None
        """The call or output that stayed mixed, if any."""
        while (mixed := self._walk()) is not None:
            if not self._complete(mixed):
                self.broken = mixed
                break

    def _trial(self, more: Collection[Slot] = (), until: Place | None = None) -> Trace:
        return self.trials.run(dict.fromkeys((*self.slots, *more), self.index), until=until)

    def _walk(self) -> Place | None:
        """Run and add readers, until there are no new ones; return the first place that is mixed."""
        while True:
            trace, news = self._trial(), False
            for place, call in enumerate(trace.calls):
                part = self.trials.part[call.module]
                if part.kind is Kind.EMBEDDING:  # it reads ids, or only the shape of its input
                    continue
                moved = self.trials.is_permuted(place, trace, self.index)
                reads = any(slot in self.slots for slot in part.inputs)
                if not moved and (reads or not self.trials.is_same(place, trace)):
                    if not news:
                        return place
                    break
                if moved and place not in self.calls:
                    self.calls[place] = point = self._point_of_call(place, part)
                    for slot in part.inputs:
                        if slot in self.taken:
                            return place
                        if (there := self.slots.setdefault(slot, point)) != point:
                            self.unified.add((min(there, point), max(there, point)))
                    news = news or not reads
            else:
                if not news:
                    return self._mixed_output(trace)

    def _mixed_output(self, trace: Trace) -> str | None:
        for name in trace.outputs:
            if self.trials.is_permuted(name, trace, self.index):
                self.outputs.setdefault(name, self._latest(name))
            elif not self.trials.is_same(name, trace):
                return name
        return None

    def _point_of_call(self, place: int, part: Part) -> int:
        """Return the point that a call reads: that of an earlier call with the same input, or the latest."""
        if part.kind is Kind.ELEMENTWISE and part.inputs[0] in self.slots:
            return self.slots[part.inputs[0]]
        calls = self.trials.original.calls
        for earlier, point in self.calls.items():
            seen = [calls[earlier].input]
            if self.trials.part[calls[earlier].module].kind is Kind.ELEMENTWISE:
                seen.append(calls[earlier].output)
            if any(torch.equal(calls[place].input, value) for value in seen):
                return point
        return self._latest(place)

    def _latest(self, place: Place) -> int:
        """Return the last point with a branch that a call or an output depends on."""
        return max((point for point, places in self.reached.items() if place in places), default=0)

    # ── mixed inputs ─────────────────────────────────────────────────────────────────────────

    def _complete(self, mixed: Place) -> bool:
        """Add the parts whose outputs must be permuted too for this input, or output, to be permuted."""
        end = mixed if isinstance(mixed, int) else len(self.trials.original.calls)
        began, ended = self.trials.began, self.trials.ended
        candidates = sorted(
            self._candidates(end), key=lambda one: (min(end, ended[one[0].module]), began[one[0].module])
        )
        candidates = candidates[-RECENT:]
        for count in range(1, min(self.most, len(candidates)) + 1):
            for some in combinations(reversed(candidates), count):
                more = [slot for _, slots in some for slot in slots]
                if self.trials.is_permuted(mixed, self._trial(more, until=mixed), self.index):
                    self._add(mixed, tuple(part for part, _ in some), more)
                    return True
        return False

    def _candidates(self, end: int) -> Iterator[tuple[Part, tuple[Slot, ...]]]:
        """Yield the parts that ran before a call, with dimensions of the right size outside the group."""
        for part in self.trials.parts:
            bare = part.kind is Kind.BARE
            began = self.trials.began.get(part.module)
            if began is None or not part.module.startswith(self.within):
                continue
            if began > end or (began == end and not bare):
                continue
            for slots in [(slot,) for slot in part.rows] if bare else [part.outputs]:
                new = not any(slot in self.slots or slot in self.taken for slot in slots)
                if new and self.trials.extent(slots[0]) == self.size:
                    yield part, slots

    def _add(self, mixed: Place, writers: tuple[Part, ...], more: Collection[Slot]) -> None:
        point = self._latest(mixed)
        calls, parts = self.trials.original.calls, self.trials.part
        read = parts[calls[mixed].module].inputs if isinstance(mixed, int) else ()
        tied = [self.slots[slot] for slot in read if slot in self.slots]
        linear = any(part.kind not in (Kind.BARE, Kind.EMBEDDING) for part in writers)
        if tied and isinstance(mixed, int):
            self.calls[mixed] = point = tied[0]
        elif linear and point in self.calls.values():
            point = self._join(mixed, writers)
        self.slots |= dict.fromkeys(more, point)

    def _join(self, mixed: Place, writers: tuple[Part, ...]) -> int:
        """Add the point after a branch; without the branch, the sum is what an earlier call read."""
        calls, target = self.trials.original.calls, len(self.joins) + 1
        branch = [part.module for part in writers if part.kind is not Kind.BARE]
        silent = self.trials.run(changed=dict.fromkeys(branch, torch.zeros_like))
        straight = silent.at(mixed)
        entry = next((place for place, call in enumerate(calls) if _holds(call.input, straight)), len(calls))
        source = self.calls.get(entry, self._latest(mixed))
        module = calls[entry].module if entry < len(calls) else None
        self.joins.append(Join(mixed, writers, source, target, module))
        places: list[Place] = [*range(len(calls)), *silent.outputs]
        self.reached[target] = {place for place in places if not self.trials.is_same(place, silent)}
        return target


def is_folded(trials: Trials, writer: Part, reader: Part) -> bool:
    """Whether the two halves of a part's output are combined elementwise into another part's input."""
    size = trials.extent(reader.inputs[0])
    if trials.extent(writer.outputs[0]) != 2 * size:
        return False
    index, place = trials.permutation(size), trials.first_call(reader)
    moves = dict.fromkeys(writer.outputs, torch.cat([index, index + size]))
    return trials.is_permuted(place, trials.run(moves, until=place), index)


# ── the modules of residual connections ─────────────────────────────────────────────────────


def find_branch(trials: Trials, join: Join, size: int) -> str | None:
    """Return the module whose output is added to the stream, or None if it is not found."""
    called = [part.module for part in join.writers if part.kind is not Kind.BARE]
    owners = [part.module for part in join.writers if part.kind is Kind.BARE]
    extra = torch.randn(size, generator=trials.generator, dtype=torch.float64)
    total = trials.original.at(join.reader) + extra
    for branch in (*sorted(called, key=lambda name: -trials.began[name]), *owners):
        trace = trials.run(changed={branch: lambda output: output + extra}, until=join.reader)
        if same(total, trace.at(join.reader)):
            return branch
    return None


def _holds(given: Tensor, straight: Tensor) -> bool:
    """Whether all positions of the stream are among the positions of a module's input."""
    if not given.is_floating_point() or given.shape[-1] != straight.shape[-1]:
        return False
    if given.numel() == straight.numel():
        return same(given.reshape(straight.shape), straight)
    rows, wanted = given.reshape(-1, given.shape[-1]), straight.reshape(-1, straight.shape[-1])
    apart = (wanted[:, None] - rows[None]).abs().amax(-1).amin(-1)
    return len(wanted) < len(rows) and bool(apart.max() <= CLOSE * (1 + straight.abs().max()))
