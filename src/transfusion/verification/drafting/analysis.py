"""Analysis of a model by trials: residual stream, inner axes, attention, fixed ends, unexplained tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from transfusion.errors import VerificationError, listing
from transfusion.verification.drafting.attention import Attention, find_attention, head_counts
from transfusion.verification.drafting.axes import AxisGroup, Join, is_folded
from transfusion.verification.drafting.trials import Kind, Part, Slot, Trials

OWN_BASIS = ("hidden", "pool")
"""Outputs with these words in their names lie on an internal axis, by the convention of libraries.

The analysis is for models without a table, so that only names can tell.
"""


@dataclass(eq=False)
class Stack:
    """A stack of equal blocks, found by name: ``layers.0``, ``layers.1``, …; and its residual stream."""

    prefix: str
    depth: int
    name: str = "layer"
    """Its name in the table."""
    stream: AxisGroup | None = None
    joins: list[Join] = field(default_factory=list)
    """The places of the stream where a branch of its blocks is added."""

    def number(self, name: str) -> int | None:
        """Return the block number of a name, or None outside its blocks."""
        found = re.match(rf"{re.escape(self.prefix)}\.(\d+)(?=\.|$)", name)
        return int(found[1]) if found else None

    def owns(self, join: Join) -> bool:
        """Whether a branch is written in its blocks."""
        return any(self.number(part.module) is not None for part in join.writers)

    @property
    def points(self) -> list[int]:
        """The points of the stream, from that before its first block to that after its last."""
        return [self.joins[0].source, *(join.target for join in self.joins)]


def find_stacks(names: Iterable[str]) -> list[Stack]:
    """Return the numbered modules with modules inside that have the most tensors, or over half as many."""
    found: dict[str, tuple[set[int], set[str]]] = {}
    for name in names:
        if match := re.match(r"(.*?)\.(\d+)\.(.*)", name):
            numbers, inside = found.setdefault(match[1], (set(), set()))
            numbers.add(int(match[2]))
            inside.add(match[3])
    if not found:
        raise VerificationError(
            "the names of the tensors have no numbered blocks",
            hint="a draft needs blocks with names such as layers.0, layers.1; write this table by hand",
        )
    found = {one: it for one, it in found.items() if any("." in name for name in it[1])} or found
    most = max(len(inside) for _, inside in found.values())
    stacks = [Stack(one, len(numbers)) for one, (numbers, inside) in found.items() if 2 * len(inside) > most]
    for number, stack in enumerate(stacks if len(stacks) > 1 else ()):
        others = {word for other in stacks if other is not stack for word in other.prefix.split(".")}
        words = (word for word in stack.prefix.split(".") if word.isidentifier() and word not in others)
        stack.name = next(words, f"stack_{number}")
    return stacks


class Analysis:
    """The axes of a model, found by permuting its tensors; a model without a residual stream is refused."""

    def __init__(self, trials: Trials, config: Mapping[str, Any]) -> None:
        self.trials = trials
        self.stacks = find_stacks(trials.parameters)
        self.streams: list[AxisGroup] = []
        self.inner: list[tuple[Part, AxisGroup]] = []
        """Free axes other than the stream, with the part that writes each."""
        self.folded: list[tuple[Part, Part]] = []
        """Projections whose two halves are combined elementwise, with the part that reads the result."""
        self.attentions: list[Attention] = []
        self.once: set[str] = set()
        """Tensors of one block that all blocks of the stack use."""
        self.ends: list[tuple[Slot, ...]] = []
        """Fixed dimensions at the ends of the model: token ids, labels, pixels."""
        self.lost: list[str] = []
        """Tensors whose layout was not found."""
        self.idle: list[str] = []
        """Tensors without an effect on the outputs."""
        self.taken: set[Slot] = set()
        self._find_streams()
        self._find_attentions(self._find_inner_axes(), config)
        self._find_ends()
        self.lost = list(dict.fromkeys(self.lost))

    def stack_of(self, name: str) -> Stack | None:
        """Return the stack that a name lies in, or None outside the blocks."""
        return next((stack for stack in self.stacks if stack.number(name) is not None), None)

    def block_of(self, name: str) -> str:
        """Return the beginning of all names of a block, such as ``layers.0.``, or "" outside the blocks."""
        stack = self.stack_of(name)
        return "" if stack is None else f"{stack.prefix}.{stack.number(name)}."

    def _find_streams(self) -> None:
        """Find the stream of every stack, from the first part that writes it; stacks may share one."""
        broken: list[AxisGroup] = []
        waiting = list(self.stacks)
        for part in self.trials.parts:
            done = self.stack_of(part.module) not in (None, *waiting) or self.taken & set(part.outputs)
            if done or part.kind in (Kind.BARE, Kind.ELEMENTWISE):
                continue
            group = AxisGroup(self.trials, part, self.taken)
            if not group.joins or group.broken is not None:
                broken.append(group)
                if group.joins:
                    break
                continue
            self.streams.append(group)
            self.taken |= group.slots.keys()
            for stack in waiting:
                stack.stream, stack.joins = group, [join for join in group.joins if stack.owns(join)]
            waiting = [stack for stack in waiting if not stack.joins]
            if not waiting:
                return
        _refuse_stream(self.trials, waiting, broken)

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
            group = AxisGroup(self.trials, part, self.taken, self.block_of(part.module), most=2)
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
        trials, block_of = self.trials, self.block_of
        norms = [p for p in trials.parts if p.kind is Kind.ELEMENTWISE and not self.taken & set(p.outputs)]
        tables = [part for part in unexplained if part.kind is Kind.EMBEDDING]
        others = [part for part in unexplained if part.kind is not Kind.EMBEDDING]
        waiting = sorted([*others, *norms], key=lambda part: trials.began[part.module])
        for reader in trials.parts:
            if reader.kind is not Kind.LINEAR or reader.inputs[0] in self.taken:
                continue
            before = [
                part
                for part in waiting
                if trials.began[part.module] < trials.began[reader.module]
                and block_of(part.module) == block_of(reader.module)
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
        waiting += [table for table in tables if not self._find_heads(table)]
        self.lost += [slot[0] for part in waiting for slot in part.outputs]

    def _find_heads(self, table: Part) -> bool:
        """Whether an embedding has a column for every head: of its own block, or of all blocks of a stack."""
        stack, block, heads = self.stack_of(table.module), self.block_of(table.module), table.outputs[0]
        every = [
            one
            for one in self.attentions
            if one.sizes.get("head") == self.trials.extent(heads) and "head" not in one.free
            if stack is None or self.stack_of(one.tensor) is stack
        ]
        for some in ([one for one in every if self.block_of(one.tensor) == block], every):
            layouts = {heads: "head"} | {slot: text for one in some for slot, text in one.layouts.items()}
            if some and replace(some[0], layouts=layouts).holds(self.trials, None, "head"):
                some[0].layouts[heads] = "head"
                self.taken.add(heads)
                self.once |= {heads[0]} if len(some) > 1 else set()
                for one in some:
                    one.free.add("head")
                    one.shares_heads = len(some) > 1
                return True
        return False

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


def _refuse_stream(trials: Trials, waiting: Iterable[Stack], broken: Iterable[AxisGroup]) -> NoReturn:
    """Say where the stream was lost, or that there is none."""
    best = max(broken, key=lambda one: len(one.joins), default=None)
    if best is not None and best.broken is not None:
        where = trials.original.calls[best.broken].module if isinstance(best.broken, int) else best.broken
        raise VerificationError(
            f"the residual stream is lost at {where}: the branch that is added there was not found",
            hint=f"{len(best.joins)} residual connections before it were found; write a table by hand,"
            " as docs/your-own.md shows",
        )
    raise VerificationError(
        f"no residual stream was found in {listing(stack.prefix for stack in waiting)}: no branch is added to"
        " the outputs of the layers before",
        hint="a draft needs blocks that add to a residual stream; write this table by hand",
    )
