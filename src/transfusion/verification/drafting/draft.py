"""Drafts: the rows, shortcuts and axes of a table, from the analysis of one model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transfusion.architecture.table import Axis, fixed
from transfusion.errors import VerificationError, listing
from transfusion.running.live_model import vector_effects
from transfusion.verification.certify import APART
from transfusion.verification.drafting.analysis import Analysis
from transfusion.verification.drafting.attention_layout import AttentionLayout, heads_in
from transfusion.verification.drafting.dependency_groups import find_shortcut
from transfusion.verification.drafting.probe_model import ModulePart, PartKind, Slot

LETTERS = ("x", "y", "z", "w")
GENERIC = {"dense", "linear", "proj", "projection", "out", "weight", "fc"}
WINDOW = ("channel", "row", "column", "depth")

ROTARY = "a permutation inside heads changes the outputs, as with rotary positions"
SLOPED = "a permutation of heads changes the outputs, as with one slope per head"
SELECTED = "ids select its rows"
WINDOWED = "the inputs have this order"
KNOWN_OUTSIDE = "users read the outputs in this order"


_BY_HAND = "a table repeats one block; write this table by hand"


class Labels:
    """An item of a layout for every dimension that was found, and the axes that the items use."""

    def __init__(self, found: Analysis, config: Mapping[str, Any], prefix: str) -> None:
        self.found, self.config, self.prefix = found, config, prefix
        self.blocks = found.blocks
        self.depth = self.blocks.depth
        self.each, rest = divmod(found.stream.last, self.depth)
        if rest or not 0 < self.each <= len(LETTERS):
            raise VerificationError(
                f"{found.stream.last} branches are added to the stream in {self.depth} blocks"
                f" ({self.blocks.prefix}.0, …): not the same number in each",
                hint=_BY_HAND,
            )
        self.items: dict[Slot, str] = {}
        self.axes: dict[str, Axis] = {}
        self.outer: dict[str, Axis] = {}
        self.sizes: dict[str, str] = {}
        """Sizes that do not follow from shapes, as expressions."""
        stream = found.stream
        self.outputs = {name: self.point(point, None) for name, point in stream.outputs.items()}
        """Outputs of the model that lie on a free axis."""
        for (name, dim), point in stream.slots.items():
            self.items[name, dim] = self.point(point, self.blocks.number(name))
        self._name_attentions()
        self._name_inner()
        self._name_ends()

    def point(self, point: int, block: int | None) -> str:
        """Return the name of a point of the stream in the rows of a block, or outside the blocks."""
        if block is None:
            ends = {0: "x@first", self.found.stream.last: "x@last"}
            if point not in ends:
                raise VerificationError(
                    f"point {point} of the stream is read outside the blocks",
                    hint="rows outside the blocks can only use the ends of the stream; write a table by hand",
                )
            return ends[point]
        step = point - block * self.each
        if not 0 <= step <= self.each:
            if point in (0, self.found.stream.last):
                return self.point(point, None)
            raise VerificationError(
                f"block {block} uses point {point} of the stream, which belongs to another block",
                hint=_BY_HAND,
            )
        return "x@next" if step == self.each else LETTERS[step]

    def _name_attentions(self) -> None:
        seen: dict[int | None, int] = defaultdict(int)
        for attention in self.found.attentions:
            block = self.blocks.number(next(iter(attention.layouts))[0])
            suffix = "" if seen[block] == 0 else str(seen[block] + 1)
            seen[block] += 1
            for slot, layout in attention.layouts.items():
                self.items[slot] = _suffixed(layout, attention.sizes, suffix)
            self._declare_attention(attention, suffix)

    def _declare_attention(self, attention: AttentionLayout, suffix: str) -> None:
        tied_tensors = attention.free >= {"qk", "vo"} and attention.sizes["qk"] == attention.sizes["vo"]
        for axis in sorted(attention.sizes, key=["head", "group", "rep", "rot", "qk", "vo"].index):
            name = axis + suffix
            if axis in attention.free:
                parent = attention.parents.get(axis)
                tied_with = "qk" + suffix if axis == "vo" and tied_tensors else None
                declared = Axis(name, within=parent and parent + suffix, tied_with=tied_with)
            else:
                why = SLOPED if axis in ("head", "group", "rep") else ROTARY
                declared = fixed(name, why, scope="layer")
            if self.axes.setdefault(name, declared) != declared:
                raise VerificationError(
                    f"the axis {name} is free in some blocks and fixed in others", hint=_BY_HAND
                )
        heads, groups = attention.heads.heads, attention.heads.groups
        if "rot" in attention.sizes:
            self.sizes["rot" + suffix] = str(attention.sizes["rot"])
        if "head" in attention.sizes:
            self.sizes["head" + suffix] = self._term(heads)
        else:
            self.sizes["group" + suffix] = self._term(groups)
            self.sizes["rep" + suffix] = f"{self._term(heads)} / {self._term(groups)}"

    def _name_inner(self) -> None:
        seen: dict[int | None, int] = defaultdict(int)
        for writer, reader in self.found.folded:
            block = self.blocks.number(writer.module)
            seen[block] += 1
            name = "ffn" if seen[block] == 1 else f"ffn{seen[block]}"
            self.axes[name] = Axis(name, scope="model" if block is None else "layer")
            self.items |= dict.fromkeys(writer.outputs, f"[{name}|{name}]")
            self.items[reader.inputs[0]] = name
        for part, dependency_group in self.found.inner:
            numbers = {self.blocks.number(name) for name, _ in dependency_group.slots}
            block = self.blocks.number(part.module)
            if block is not None and numbers == {block}:
                seen[block] += 1
                name = "ffn" if seen[block] == 1 else f"ffn{seen[block]}"
                self.axes[name] = Axis(name)
            else:
                name = self._new_name(part.module)
                self.outer[name] = Axis(name, scope="model")
            self.items |= dict.fromkeys(dependency_group.slots, name)
            self.outputs |= dict.fromkeys(dependency_group.outputs, name)

    def _name_ends(self) -> None:
        probe = self.found.probe
        parts = reversed(probe.parts)
        by_slot = {slot: part for part in parts for slot in (*part.rows, *part.inputs, *part.outputs)}
        rows = {slot for part in probe.parts if part.kind is PartKind.EMBEDDING for slot in part.rows}
        selected: dict[int, str] = {}
        for slots in sorted(self.found.ends, key=lambda slots: not rows & set(slots)):
            known = next((self.items[slot] for slot in slots if slot in self.items), None)
            size = probe.extent(slots[0])
            if size == 1:
                continue
            part = by_slot.get(slots[0])
            name = known or self._end_name(slots, part, selected)
            if rows & set(slots):
                selected.setdefault(size, name)
            if name not in self.outer:
                self.outer[name] = fixed(name, self._reason(slots, part, rows))
            self.items |= dict.fromkeys(slots, name)

    def _end_name(self, slots: tuple[Slot, ...], part: ModulePart | None, selected: Mapping[int, str]) -> str:
        (tensor, dim), size = slots[0], self.found.probe.extent(slots[0])
        if part and part.kind is PartKind.CONVOLUTION and dim > 0:
            return WINDOW[dim - 1]
        if part and part.kind is PartKind.EMBEDDING and size == self.config.get("vocab_size"):
            return "vocab"
        if part and part.kind is PartKind.LINEAR and size in selected:
            return selected[size]
        return self._new_name(part.module if part else tensor)

    def _reason(self, slots: tuple[Slot, ...], part: ModulePart | None, rows: set[Slot]) -> str:
        if rows & set(slots):
            return SELECTED
        if part is None or slots[0] in (*part.rows, *part.inputs):
            return WINDOWED
        return KNOWN_OUTSIDE

    def _new_name(self, module: str) -> str:
        words = [word for word in self.short(module).split(".") if not word.isdigit()]
        word = next((word for word in reversed(words) if word not in GENERIC), words[-1])
        word = re.sub(r"\W", "_", word)
        taken = {*self.axes, *self.outer, *LETTERS}
        return next(n for n in (word, *(f"{word}_{i}" for i in range(2, 99))) if n not in taken)

    def short(self, name: str) -> str:
        """Return a name without the library's prefix of the base model."""
        return name.removeprefix(self.prefix)

    def pattern(self, name: str) -> str:
        """Return the short name with ``{}`` for the block number."""
        return self.short(self.blocks.pattern(name))

    def _term(self, count: int) -> str:
        """Return the setting with this head count, or the number itself if there is none."""
        named = (key for key, value in heads_in(self.config).items() if value == count and key.isidentifier())
        return next(named, str(count))

    def depth_count(self) -> str:
        """Return the number of blocks as a setting, or as a number if no setting has it."""
        known = ((key, value) for key, value in self.config.items() if key.isidentifier())
        return next((k for k, v in known if counts_blocks(k, v) and v == self.depth), str(self.depth))


def counts_blocks(key: str, value: object) -> bool:
    """Whether a setting may be the number of blocks, judged by its name."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return any(word in key for word in ("layer", "block", "depth"))


def _suffixed(layout: str, axes: Iterable[str], suffix: str) -> str:
    if not suffix:
        return layout
    return re.sub(r"\b(" + "|".join(axes) + r")\b", rf"\g<1>{suffix}", layout)


@dataclass
class Draft:
    """The parts of a table, for `draft_text`."""

    rows: list[tuple[str, str]]
    heads: list[tuple[str, str]]
    shortcuts: list[tuple[str, str, str]]
    axes: list[Axis]
    depth: str
    sizes: dict[str, str]
    unified: list[tuple[str, str]]
    outputs: dict[str, str]
    ties: dict[str, str]
    buffers: list[str]
    prefix: str
    extents: set[int]
    """All sizes: of dimensions, head counts, the number of blocks."""
    lost: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


def draft(found: Analysis, config: Mapping[str, Any], prefix: str) -> Draft:
    """Return the draft of an analysis; ``prefix`` is the library's prefix of the base model."""
    return _Drafter(found, Labels(found, config, prefix)).draft()


class _Drafter:
    def __init__(self, found: Analysis, labels: Labels) -> None:
        self.found, self.labels = found, labels
        self.blocks, self.depth = found.blocks, found.blocks.depth
        self.effects = vector_effects(found.probe.module, found.probe.run)

    def draft(self) -> Draft:
        found, labels, probe = self.found, self.labels, self.found.probe
        rows = list(self._rows())
        return Draft(
            rows=[(name, layout) for name, layout, head in rows if not head],
            heads=[(name, layout) for name, layout, head in rows if head],
            shortcuts=list(self._shortcuts()),
            axes=[*self.labels.axes.values(), *self.labels.outer.values()],
            depth=labels.depth_count(),
            sizes=self.labels.sizes,
            unified=[
                (self.labels.point(a, None), self.labels.point(b, None))
                for a, b in sorted(found.stream.unified)
            ],
            outputs=labels.outputs,
            ties={
                self.labels.short(n): self.labels.short(first)
                for n, first in probe.names.items()
                if n != first
            },
            buffers=sorted(
                {self.labels.pattern(name) for name in probe.module.state_dict() if name not in probe.names}
            ),
            prefix=self.labels.prefix,
            extents=self._extents(),
            lost=found.lost,
            idle=found.idle,
        )

    def _rows(self) -> Iterator[tuple[str, str, bool]]:
        """Yield the name, the layout, and whether it belongs to a head, once for all blocks."""
        texts: dict[str, dict[int | None, str]] = {}
        heads: dict[str, bool] = {}
        for name in self._in_order():
            pattern = self.labels.pattern(name)
            texts.setdefault(pattern, {})[self.blocks.number(name)] = self._layout(name)
            heads[pattern] = bool(self.labels.prefix) and not name.startswith(self.labels.prefix)
        odd = [
            pattern
            for pattern, one in texts.items()
            if None not in one and (len(set(one.values())) > 1 or set(one) != set(range(self.depth)))
        ]
        if odd:
            raise VerificationError(
                f"the blocks differ from each other in {listing(odd)}",
                hint="a table repeats one block; write this table by hand",
            )
        info = {pattern: next(iter(one.values())) for pattern, one in texts.items()}
        for pattern, layout in _merged(info):
            yield pattern, layout, heads.get(pattern, heads.get(pattern.removesuffix("*") + "weight", False))

    def _in_order(self) -> list[str]:
        """Return the tensors in the order of execution, with the tensors of a block together."""
        probe = self.found.probe
        met: dict[str, int] = {}
        for part in probe.parts:
            slots = (*part.inputs, *part.outputs, *part.rows)
            for name in (part.parameter,) if part.parameter else (slot[0] for slot in slots):
                met[name] = min(met.get(name, 1 << 30), probe.began.get(part.module, 1 << 30))
        inside = [met[name] for name in met if self.blocks.number(name) is not None]
        first = min(inside)

        def key(name: str) -> tuple[int, int, int]:
            number = self.blocks.number(name)
            return (first, number + 1, met[name]) if number is not None else (met[name], 0, 0)

        return sorted(probe.parameters, key=key)

    def _layout(self, name: str) -> str:
        probe = self.found.probe
        dims = [self.labels.items.get((name, dim), "_") for dim in range(probe.parameters[name].ndim)]
        owner = next(
            (part for part in probe.parts if (name, 0) in (*part.rows, *part.inputs, *part.outputs)), None
        )
        if len(dims) == 1 and dims != ["_"] and self.effects.get(name, 0.0) > APART:
            return f"scale {dims[0]}"
        if len(dims) < 2 or owner is None or owner.kind in (PartKind.BARE, PartKind.ELEMENTWISE):
            return " ".join(dims)
        backwards = (name, 0) in owner.outputs
        return f"{dims[0]} {'<-' if backwards else '->'} {' '.join(dims[1:])}"

    def _shortcuts(self) -> Iterator[tuple[str, str, str]]:
        stream = self.found.stream
        info: dict[int, set[tuple[str, str, str]]] = {step: set() for step in range(self.labels.each)}
        for join in stream.joins:
            found = find_shortcut(self.found.probe, join, stream.size)
            if found is None:  # after the last block the stream may be averaged; another block will do
                continue
            block, step = divmod(join.source, self.labels.each)
            way = f"{self.labels.point(join.source, block)} -> {self.labels.point(join.target, block)}"
            entry, branch = map(self.labels.pattern, found)
            info[step].add((entry, way, branch))
        for step, ways in info.items():
            if not ways:
                writers = listing(part.module for part in stream.joins[step].writers)
                raise VerificationError(
                    f"the shortcut around {writers} was not found",
                    hint="no module's input equals the stream that the branch is added to; write a table by"
                    " hand, as docs/your-own.md shows",
                )
            if len(ways) > 1:
                raise VerificationError(
                    f"the blocks differ in their shortcuts: {listing(entry for entry, _, _ in ways)}",
                    hint="a table repeats one block; write this table by hand",
                )
            yield from ways

    def _extents(self) -> set[int]:
        shapes = {extent for one in self.found.probe.parameters.values() for extent in one.shape}
        heads = {n for one in self.found.attentions for n in (one.heads.heads, one.heads.groups)}
        return (
            shapes | heads | {n for one in self.found.attentions for n in one.sizes.values()} | {self.depth}
        )


def _merged(rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield one row for a weight and its bias if the bias has the weight's output axes."""
    for name, layout in rows.items():
        module, _, last = name.rpartition(".")
        weight = rows.get(f"{module}.weight")
        if last == "bias" and weight is not None and layout == _bias_of(weight):
            continue
        if last == "weight" and rows.get(f"{module}.bias") == _bias_of(layout):
            yield f"{module}.*", layout
        else:
            yield name, layout


def _bias_of(layout: str) -> str:
    before, arrow, after = layout.removeprefix("scale ").partition(" -> ")
    return after if arrow else before.partition(" <- ")[0]
