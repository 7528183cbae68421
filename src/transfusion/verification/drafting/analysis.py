"""Analysis of a model by trials: residual stream, inner axes, attention, fixed ends, unexplained tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transfusion.errors import VerificationError, listing
from transfusion.verification.drafting.attention_layout import (
    AttentionLayout,
    find_attention,
    head_counts,
    heads_in,
)
from transfusion.verification.drafting.dependency_groups import DependencyGroup, dependency_group, is_folded
from transfusion.verification.drafting.probe_model import ModulePart, PartKind, ProbeModel, Slot, same

OWN_BASIS = ("hidden", "pool")
"""Outputs with these words in their names lie on an internal axis, by the convention of libraries.

The analysis is for models without a table, so that only names can tell.
"""


@dataclass(frozen=True)
class BlockNames:
    """The stack of equal blocks, found by name: ``layers.0``, ``layers.1``, …"""

    prefix: str
    depth: int

    def number(self, name: str) -> int | None:
        """Return the block number of a name, or None outside the blocks."""
        found = re.match(rf"{re.escape(self.prefix)}\.(\d+)(?=\.|$)", name)
        return int(found[1]) if found else None

    def pattern(self, name: str) -> str:
        """Return the name with ``{}`` for its block number."""
        number = self.number(name)
        return name if number is None else self.prefix + ".{}" + name[len(f"{self.prefix}.{number}") :]

    def inside(self, number: int | None) -> str:
        """Return the prefix of the names in a block."""
        return "" if number is None else f"{self.prefix}.{number}."


@dataclass
class Analysis:
    """The axes of a model."""

    probe: ProbeModel
    blocks: BlockNames
    stream: DependencyGroup
    inner: list[tuple[ModulePart, DependencyGroup]] = field(default_factory=list)
    """Free axes other than the stream, with the part that writes each."""
    folded: list[tuple[ModulePart, ModulePart]] = field(default_factory=list)
    """Projections whose two halves are combined elementwise, with the part that reads the result."""
    attentions: list[AttentionLayout] = field(default_factory=list)
    ends: list[tuple[Slot, ...]] = field(default_factory=list)
    """Fixed dimensions at the ends of the model: token ids, labels, pixels."""
    lost: list[str] = field(default_factory=list)
    """Tensors whose layout was not found."""
    idle: list[str] = field(default_factory=list)
    """Tensors without an effect on the outputs."""
    taken: set[Slot] = field(default_factory=set)


def analyse(probe: ProbeModel, config: Mapping[str, Any]) -> Analysis:
    """Find the axes of a model by permuting its tensors; refuse a model without a residual stream."""
    blocks = find_blocks(probe)
    found = Analysis(probe, blocks, _stream(probe))
    found.taken |= found.stream.slots.keys()
    unexplained = _inner_axes(found)
    _attentions(found, unexplained, config)
    _ends(found)
    return found


def find_blocks(probe: ProbeModel) -> BlockNames:
    """Return the numbered modules with the most tensors."""
    matches = (re.match(r"(.*?)\.(\d+)\.", name) for name in probe.parameters)
    counts = Counter(match[1] for match in matches if match)
    if not counts:
        raise VerificationError(
            "the names of the tensors have no numbered blocks",
            hint="a draft needs blocks with names such as layers.0, layers.1; write this table by hand",
        )
    (prefix, most), *others = counts.most_common()
    if rivals := [other for other, count in others if 2 * count > most]:
        raise VerificationError(
            f"several stacks of blocks: {listing([prefix, *rivals])}",
            hint="a draft has one stack; write this table by hand, as docs/your-own.md shows",
        )
    numbered = re.compile(rf"{re.escape(prefix)}\.(\d+)\.")
    numbers = {int(match[1]) for name in probe.parameters if (match := numbered.match(name))}
    return BlockNames(prefix, len(numbers))


def _stream(probe: ProbeModel) -> DependencyGroup:
    """Return the dependency group of the residual stream, from the first part that writes the stream."""
    broken: list[DependencyGroup] = []
    for part in probe.parts:
        if part.kind in (PartKind.BARE, PartKind.ELEMENTWISE):
            continue
        group = dependency_group(probe, part)
        if group.joins and group.broken is None:
            return group
        broken.append(group)
        if group.joins:
            break
    best = max(broken, key=lambda one: len(one.joins), default=None)
    if best is not None and best.broken is not None:
        where = probe.original.calls[best.broken].module if isinstance(best.broken, int) else best.broken
        raise VerificationError(
            f"the residual stream is lost at {where}: the branch that is added there was not found",
            hint=f"{len(best.joins)} residual connections before it were found; write a table by hand,"
            " as docs/your-own.md shows",
        )
    raise VerificationError(
        "no residual stream was found: no branch is added to the outputs of the first layers",
        hint="a draft needs blocks that add to a residual stream; write this table by hand",
    )


def _inner_axes(found: Analysis) -> list[ModulePart]:
    """Find the dependency group of every other part; return the parts whose group is broken."""
    probe = found.probe
    unexplained: list[ModulePart] = []
    rows = {slot for part in probe.parts if part.kind is PartKind.EMBEDDING for slot in part.rows}
    for part in probe.parts:
        if rows & set(part.outputs):  # tied to an embedding: token ids number its outputs
            found.ends.append(part.outputs)
            found.taken |= set(part.outputs)
        if part.kind in (PartKind.BARE, PartKind.ELEMENTWISE) or found.taken & set(part.outputs):
            continue
        inside = found.blocks.inside(found.blocks.number(part.module))
        group = dependency_group(probe, part, found.taken, within=inside, most=2)
        if isinstance(group.broken, int):
            unexplained.append(part)
            continue
        own = all(any(word in name for word in OWN_BASIS) for name in group.outputs)
        if group.broken is None and own and (group.calls or group.outputs):
            found.inner.append((part, group))
            found.taken |= group.slots.keys()
        else:
            found.ends.append(part.outputs)
            found.taken |= set(part.outputs)
    return unexplained


def _attentions(found: Analysis, unexplained: list[ModulePart], config: Mapping[str, Any]) -> None:
    """Find the layouts of the linear maps that read heads, from the parts that ran before in their block."""
    probe, counts = found.probe, heads_in(config)
    norms = [p for p in probe.parts if p.kind is PartKind.ELEMENTWISE and not found.taken & set(p.outputs)]
    waiting = sorted([*unexplained, *norms], key=lambda part: probe.began[part.module])
    for reader in probe.parts:
        if reader.kind is not PartKind.LINEAR or reader.inputs[0] in found.taken:
            continue
        block = found.blocks.number(reader.module)
        before = [
            part
            for part in waiting
            if probe.began[part.module] < probe.began[reader.module]
            and found.blocks.number(part.module) == block
        ]
        size = probe.extent(reader.inputs[0])
        if len(before) == 1 and is_folded(probe, before[0], reader):
            found.folded.append((before[0], reader))
            found.taken |= {*before[0].outputs, *reader.inputs}
            waiting.remove(before[0])
            continue
        attention = find_attention(probe, reader, before, head_counts(counts, size)) if before else None
        if attention is not None:
            found.attentions.append(attention)
            found.taken |= attention.layouts.keys()
            waiting = [part for part in waiting if part not in before]
        elif not before and _reads_raw(probe, reader):
            found.ends.append(reader.inputs)
            found.taken |= set(reader.inputs)
        else:
            found.lost.append(reader.inputs[0][0])
    found.lost += [slot[0] for part in waiting for slot in part.outputs]


def _reads_raw(probe: ProbeModel, reader: ModulePart) -> bool:
    """Whether the input of a part depends on no parameter."""
    place = next(i for i, call in enumerate(probe.original.calls) if call.module == reader.module)
    others = frozenset(call.module for call in probe.original.calls[:place])
    trace = probe.run(until=place, silenced=others)
    return same(probe.original.calls[place].input, trace.calls[place].input)


def _ends(found: Analysis) -> None:
    """Mark the remaining dimensions as fixed: rows of embeddings, convolution windows, bare parameters."""
    probe = found.probe
    for part in probe.parts:
        if part.kind is PartKind.BARE:
            _bare_ends(found, part.parameter)
            continue
        rest = (*part.rows, *(part.inputs if part.kind is PartKind.CONVOLUTION else ()))
        for slot in rest:
            if slot not in found.taken and probe.extent(slot) > 1:
                found.ends.append((slot,))
                found.taken.add(slot)
    found.lost = list(dict.fromkeys(found.lost))


def _bare_ends(found: Analysis, name: str) -> None:
    probe = found.probe
    slots = [(name, dim) for dim, extent in enumerate(probe.parameters[name].shape) if extent > 1]
    known = [slot for slot in slots if slot in found.taken]
    if slots and not known:
        moved = any(probe.changes([slot]) for slot in slots)
        (found.lost if moved else found.idle).append(name)
        return
    for slot in slots:
        if slot not in found.taken:
            found.ends.append((slot,))
            found.taken.add(slot)
