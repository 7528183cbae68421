"""Analysis of a model by trials: residual stream, inner axes, attention, fixed ends, unexplained tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from transfusion.errors import VerificationError, listing
from transfusion.verification.drafting.attention import Attention, find_attention, head_counts
from transfusion.verification.drafting.axes import AxisGroup, is_folded
from transfusion.verification.drafting.trials import Kind, Part, Slot, Trials

OWN_BASIS = ("hidden", "pool")
"""Outputs with these words in their names lie on an internal axis, by the convention of libraries.

The analysis is for models without a table, so that only names can tell.
"""


class Blocks:
    """The stack of equal blocks, found by name: ``layers.0``, ``layers.1``, …"""

    def __init__(self, names: Mapping[str, Any]) -> None:
        """Find the numbered modules with the most tensors."""
        counts = Counter(match[1] for name in names if (match := re.match(r"(.*?)\.\d+\.", name)))
        if not counts:
            raise VerificationError(
                "the names of the tensors have no numbered blocks",
                hint="a draft needs blocks with names such as layers.0, layers.1; write this table by hand",
            )
        (self.prefix, most), *others = counts.most_common()
        if rivals := [other for other, count in others if 2 * count > most]:
            raise VerificationError(
                f"several stacks of blocks: {listing([self.prefix, *rivals])}",
                hint="a draft has one stack; write this table by hand, as docs/your-own.md shows",
            )
        self.depth = len({self.number(name) for name in names} - {None})

    def number(self, name: str) -> int | None:
        """Return the block number of a name, or None outside the blocks."""
        found = re.match(rf"{re.escape(self.prefix)}\.(\d+)(?=\.|$)", name)
        return int(found[1]) if found else None

    def pattern(self, name: str) -> str:
        """Return the name with ``{}`` for its block number."""
        number = self.number(name)
        return name if number is None else self.prefix + ".{}" + name[len(f"{self.prefix}.{number}") :]


class Analysis:
    """The axes of a model, found by permuting its tensors; a model without a residual stream is refused."""

    def __init__(self, trials: Trials, config: Mapping[str, Any]) -> None:
        self.trials = trials
        self.blocks = Blocks(trials.parameters)
        self.stream = _find_stream(trials)
        self.inner: list[tuple[Part, AxisGroup]] = []
        """Free axes other than the stream, with the part that writes each."""
        self.folded: list[tuple[Part, Part]] = []
        """Projections whose two halves are combined elementwise, with the part that reads the result."""
        self.attentions: list[Attention] = []
        self.ends: list[tuple[Slot, ...]] = []
        """Fixed dimensions at the ends of the model: token ids, labels, pixels."""
        self.lost: list[str] = []
        """Tensors whose layout was not found."""
        self.idle: list[str] = []
        """Tensors without an effect on the outputs."""
        self.taken = set(self.stream.slots)
        self._find_attentions(self._find_inner_axes(), config)
        self._find_ends()
        self.lost = list(dict.fromkeys(self.lost))

    def _end(self, slots: tuple[Slot, ...]) -> None:
        self.ends.append(slots)
        self.taken |= set(slots)

    def _find_inner_axes(self) -> list[Part]:
        """Find the axis of every other part; return the parts whose outputs stay mixed at a call."""
        unexplained: list[Part] = []
        rows = {slot for part in self.trials.parts if part.kind is Kind.EMBEDDING for slot in part.rows}
        for part in self.trials.parts:
            if rows & set(part.outputs):  # tied to an embedding: token ids number its outputs
                self._end(part.outputs)
            if part.kind in (Kind.BARE, Kind.ELEMENTWISE) or self.taken & set(part.outputs):
                continue
            block = self.blocks.number(part.module)
            within = "" if block is None else f"{self.blocks.prefix}.{block}."
            group = AxisGroup(self.trials, part, self.taken, within, most=2)
            own = all(any(word in name for word in OWN_BASIS) for name in group.outputs)
            if isinstance(group.broken, int):
                unexplained.append(part)
            elif group.broken is None and own and (group.calls or group.outputs):
                self.inner.append((part, group))
                self.taken |= group.slots.keys()
            else:
                self._end(part.outputs)
        return unexplained

    def _find_attentions(self, unexplained: list[Part], config: Mapping[str, Any]) -> None:
        """Find what the other linear maps read: combined halves or heads of parts before, or raw inputs."""
        trials, number = self.trials, self.blocks.number
        norms = [p for p in trials.parts if p.kind is Kind.ELEMENTWISE and not self.taken & set(p.outputs)]
        waiting = sorted([*unexplained, *norms], key=lambda part: trials.began[part.module])
        for reader in trials.parts:
            if reader.kind is not Kind.LINEAR or reader.inputs[0] in self.taken:
                continue
            before = [
                part
                for part in waiting
                if trials.began[part.module] < trials.began[reader.module]
                and number(part.module) == number(reader.module)
            ]
            counts = head_counts(config, trials.extent(reader.inputs[0]))
            if len(before) == 1 and is_folded(trials, before[0], reader):
                self.folded.append((before[0], reader))
                self.taken |= {*before[0].outputs, *reader.inputs}
            elif before and (attention := find_attention(trials, reader, before, counts)):
                self.attentions.append(attention)
                self.taken |= attention.layouts.keys()
            elif not before and self._reads_raw(reader):
                self._end(reader.inputs)
            else:
                self.lost.append(reader.inputs[0][0])
                continue
            waiting = [part for part in waiting if part not in before]
        self.lost += [slot[0] for part in waiting for slot in part.outputs]

    def _reads_raw(self, reader: Part) -> bool:
        """Whether the input of a part depends on no parameter."""
        place = self.trials.first_call(reader)
        others = (call.module for call in self.trials.original.calls[:place])
        silent = self.trials.run(changed=dict.fromkeys(others, torch.zeros_like), until=place)
        return self.trials.is_same(place, silent)

    def _find_ends(self) -> None:
        """Mark the remaining dimensions as fixed: rows of embeddings, windows, bare parameters."""
        for part in self.trials.parts:
            rest = (*part.rows, *(part.inputs if part.kind is Kind.CONVOLUTION else ()))
            slots = [slot for slot in rest if self.trials.extent(slot) > 1]
            if part.kind is Kind.BARE and slots and not self.taken & set(slots):
                moved = any(self._changes(slot) for slot in slots)
                (self.lost if moved else self.idle).append(slots[0][0])
                continue
            for slot in slots:
                if slot not in self.taken:
                    self._end((slot,))

    def _changes(self, slot: Slot) -> bool:
        """Whether permuting only this dimension changes any output."""
        trace = self.trials.run({slot: self.trials.permutation(self.trials.extent(slot))})
        return not all(self.trials.is_same(name, trace) for name in trace.outputs)


def _find_stream(trials: Trials) -> AxisGroup:
    """Return the axis of the residual stream, from the first part that writes the stream."""
    broken: list[AxisGroup] = []
    for part in trials.parts:
        if part.kind in (Kind.BARE, Kind.ELEMENTWISE):
            continue
        group = AxisGroup(trials, part)
        if group.joins and group.broken is None:
            return group
        broken.append(group)
        if group.joins:
            break
    best = max(broken, key=lambda one: len(one.joins), default=None)
    if best is not None and best.broken is not None:
        where = trials.original.calls[best.broken].module if isinstance(best.broken, int) else best.broken
        raise VerificationError(
            f"the residual stream is lost at {where}: the branch that is added there was not found",
            hint=f"{len(best.joins)} residual connections before it were found; write a table by hand,"
            " as docs/your-own.md shows",
        )
    raise VerificationError(
        "no residual stream was found: no branch is added to the outputs of the first layers",
        hint="a draft needs blocks that add to a residual stream; write this table by hand",
    )
