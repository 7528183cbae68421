"""Drafting: a survey of one model, told as the rows, shortcuts and axes of a table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transfusion.errors import VerificationError, listing
from transfusion.proposal.attention import Attention, heads_in
from transfusion.proposal.parts import Kind, Part, Slot
from transfusion.proposal.shortcuts import find_passage
from transfusion.proposal.survey import Survey
from transfusion.tables import Axis, fixed

LETTERS = ("x", "y", "z", "w")
GENERIC = {"dense", "linear", "proj", "projection", "out", "weight", "fc"}
WINDOW = ("channel", "row", "column", "depth")

TURNED = "moving it inside heads changes the outputs, as rotary positions would make it"
SLOPED = "moving heads changes the outputs, as a slope for each head would make it"
SELECTED = "ids select its rows"
WINDOWED = "what comes in has this order"
KNOWN_OUTSIDE = "outsiders know what comes out in this order"


@dataclass
class Draft:
    """The parts of a table, as text and declarations, before they are written into a file."""

    rows: list[tuple[str, str]]
    heads: list[tuple[str, str]]
    shortcuts: list[tuple[str, str, str]]
    axes: list[Axis]
    outer_axes: list[Axis]
    points: tuple[str, ...]
    depth: str
    sizes: dict[str, str]
    unified: list[tuple[str, str]]
    outputs: dict[str, str]
    ties: dict[str, str]
    buffers: list[str]
    prefix: str
    extents: set[int]
    """All sizes that occur: of dimensions, counts of heads, the number of blocks."""
    lost: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


def draft(found: Survey, config: Mapping[str, Any], prefix: str) -> Draft:
    """Tell a survey as a table; ``prefix`` is what the library puts before the names of the base."""
    return _Drafter(found, config, prefix).draft()


class _Drafter:
    def __init__(self, found: Survey, config: Mapping[str, Any], prefix: str) -> None:
        self.found, self.config, self.prefix = found, config, prefix
        self.blocks = found.blocks
        self.depth = self.blocks.depth
        self.each, rest = divmod(found.stream.last, self.depth)
        if rest or not 0 < self.each <= len(LETTERS):
            raise VerificationError(
                f"{found.stream.last} branches join the stream, and there are {self.depth} blocks"
                f" ({self.blocks.prefix}.0, …): not the same number in each",
                hint="a table repeats one block; write this one by hand",
            )
        self.items: dict[Slot, str] = {}
        self.axes: dict[str, Axis] = {}
        self.outer: dict[str, Axis] = {}
        self.sizes: dict[str, str] = {}

    def draft(self) -> Draft:
        found, stream = self.found, self.found.stream
        outputs = {name: self._point(point, None) for name, point in stream.outputs.items()}
        for (name, dim), point in stream.slots.items():
            self.items[name, dim] = self._point(point, self.blocks.number(name))
        self._name_attentions()
        outputs |= self._name_inner()
        self._name_ends()
        rows = list(self._rows())
        lab = found.lab
        return Draft(
            rows=[(name, layout) for name, layout, head in rows if not head],
            heads=[(name, layout) for name, layout, head in rows if head],
            shortcuts=list(self._shortcuts()),
            axes=list(self.axes.values()),
            outer_axes=list(self.outer.values()),
            points=LETTERS[: self.each],
            depth=self._depth_key(),
            sizes=self.sizes,
            unified=[(self._point(a, None), self._point(b, None)) for a, b in sorted(stream.unified)],
            outputs=outputs,
            ties={self._short(n): self._short(first) for n, first in lab.names.items() if n != first},
            buffers=sorted(
                {self._pattern(name) for name in lab.module.state_dict() if name not in lab.names}
            ),
            prefix=self.prefix,
            extents=self._extents(),
            lost=found.lost,
            idle=found.idle,
        )

    # ── naming axes ──────────────────────────────────────────────────────────────────────────

    def _point(self, point: int, block: int | None) -> str:
        """What a tensor of a block, or outside all blocks, calls a point of the stream."""
        if block is None:
            ends = {0: "x@first", self.found.stream.last: "x@last"}
            if point not in ends:
                raise VerificationError(
                    f"point {point} of the stream is read outside the blocks",
                    hint="a table's other rows can only use the two ends of the stream; write it by hand",
                )
            return ends[point]
        step = point - block * self.each
        if not 0 <= step <= self.each:
            if point in (0, self.found.stream.last):
                return self._point(point, None)
            raise VerificationError(
                f"block {block} uses point {point} of the stream, which belongs to another block",
                hint="a table repeats one block; write this one by hand",
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

    def _declare_attention(self, attention: Attention, suffix: str) -> None:
        twins = attention.free >= {"qk", "vo"} and attention.sizes["qk"] == attention.sizes["vo"]
        for axis in sorted(attention.sizes, key=["head", "group", "rep", "rot", "qk", "vo"].index):
            name = axis + suffix
            if axis in attention.free:
                parent = attention.parents.get(axis)
                twin = "qk" + suffix if axis == "vo" and twins else None
                declared = Axis(name, within=parent and parent + suffix, twin=twin)
            else:
                why = SLOPED if axis in ("head", "group", "rep") else TURNED
                declared = fixed(name, why, scope="layer")
            if self.axes.setdefault(name, declared) != declared:
                raise VerificationError(
                    f"the axis {name} may move in some blocks and not in others",
                    hint="a table repeats one block; write this one by hand",
                )
        heads, groups = attention.heads.heads, attention.heads.groups
        if "rot" in attention.sizes:
            self.sizes["rot" + suffix] = str(attention.sizes["rot"])
        if "head" in attention.sizes:
            self.sizes["head" + suffix] = self._key(heads)
        else:
            self.sizes["group" + suffix] = self._key(groups)
            self.sizes["rep" + suffix] = f"{self._key(heads)} // {self._key(groups)}"

    def _name_inner(self) -> dict[str, str]:
        """Name the axes beside the stream; gives the outputs that lie on one."""
        outputs: dict[str, str] = {}
        seen: dict[int | None, int] = defaultdict(int)
        for writer, reader in self.found.folded:
            block = self.blocks.number(writer.module)
            seen[block] += 1
            name = "ffn" if seen[block] == 1 else f"ffn{seen[block]}"
            self.axes[name] = Axis(name, scope="model" if block is None else "layer")
            self.items |= dict.fromkeys(writer.outputs, f"[{name}|{name}]")
            self.items[reader.inputs[0]] = name
        for part, closure in self.found.inner:
            numbers = {self.blocks.number(name) for name, _ in closure.slots}
            block = self.blocks.number(part.module)
            if block is not None and numbers == {block}:
                seen[block] += 1
                name = "ffn" if seen[block] == 1 else f"ffn{seen[block]}"
                self.axes[name] = Axis(name)
            else:
                name = self._new_name(part.module)
                self.outer[name] = Axis(name, scope="model")
            self.items |= dict.fromkeys(closure.slots, name)
            outputs |= dict.fromkeys(closure.outputs, name)
        return outputs

    def _name_ends(self) -> None:
        lab = self.found.lab
        parts = reversed(lab.parts)
        by_slot = {slot: part for part in parts for slot in (*part.rows, *part.inputs, *part.outputs)}
        rows = {slot for part in lab.parts if part.kind is Kind.EMBEDDING for slot in part.rows}
        selected: dict[int, str] = {}
        for slots in sorted(self.found.ends, key=lambda slots: not rows & set(slots)):
            known = next((self.items[slot] for slot in slots if slot in self.items), None)
            size = lab.extent(slots[0])
            if size == 1:
                continue
            part = by_slot.get(slots[0])
            name = known or self._end_name(slots, part, selected)
            if rows & set(slots):
                selected.setdefault(size, name)
            if name not in self.outer:
                self.outer[name] = fixed(name, self._reason(slots, part, rows))
            self.items |= dict.fromkeys(slots, name)

    def _end_name(self, slots: tuple[Slot, ...], part: Part | None, selected: Mapping[int, str]) -> str:
        (tensor, dim), size = slots[0], self.found.lab.extent(slots[0])
        if part and part.kind is Kind.CONVOLUTION and dim > 0:
            return WINDOW[dim - 1]
        if part and part.kind is Kind.EMBEDDING and size == self.config.get("vocab_size"):
            return "vocab"
        if part and part.kind is Kind.LINEAR and size in selected:
            return selected[size]
        return self._new_name(part.module if part else tensor)

    def _reason(self, slots: tuple[Slot, ...], part: Part | None, rows: set[Slot]) -> str:
        if rows & set(slots):
            return SELECTED
        if part is None or slots[0] in (*part.rows, *part.inputs):
            return WINDOWED
        return KNOWN_OUTSIDE

    def _new_name(self, module: str) -> str:
        words = [word for word in self._short(module).split(".") if not word.isdigit()]
        word = next((word for word in reversed(words) if word not in GENERIC), words[-1])
        word = re.sub(r"\W", "_", word)
        taken = {*self.axes, *self.outer, *LETTERS}
        return next(n for n in (word, *(f"{word}_{i}" for i in range(2, 99))) if n not in taken)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────

    def _rows(self) -> Iterator[tuple[str, str, bool]]:
        """A row for every tensor, blocks told once; the third says whether it is outside the base."""
        texts: dict[str, dict[int | None, str]] = {}
        heads: dict[str, bool] = {}
        for name in self._in_order():
            pattern = self._pattern(name)
            texts.setdefault(pattern, {})[self.blocks.number(name)] = self._layout(name)
            heads[pattern] = bool(self.prefix) and not name.startswith(self.prefix)
        odd = [
            pattern
            for pattern, one in texts.items()
            if None not in one and (len(set(one.values())) > 1 or set(one) != set(range(self.depth)))
        ]
        if odd:
            raise VerificationError(
                f"the blocks differ from each other in {listing(odd)}",
                hint="a table repeats one block; write this one by hand",
            )
        told = {pattern: next(iter(one.values())) for pattern, one in texts.items()}
        for pattern, layout in _merged(told):
            yield pattern, layout, heads.get(pattern, heads.get(pattern.removesuffix("*") + "weight", False))

    def _in_order(self) -> list[str]:
        """The tensors in the order in which a signal meets them, each block in one piece."""
        lab = self.found.lab
        met: dict[str, int] = {}
        for part in lab.parts:
            slots = (*part.inputs, *part.outputs, *part.rows)
            for name in (part.parameter,) if part.parameter else (slot[0] for slot in slots):
                met[name] = min(met.get(name, 1 << 30), lab.began.get(part.module, 1 << 30))
        inside = [met[name] for name in met if self.blocks.number(name) is not None]
        first = min(inside)

        def key(name: str) -> tuple[int, int, int]:
            number = self.blocks.number(name)
            return (first, number + 1, met[name]) if number is not None else (met[name], 0, 0)

        return sorted(lab.parameters, key=key)

    def _layout(self, name: str) -> str:
        lab = self.found.lab
        dims = [self.items.get((name, dim), "_") for dim in range(lab.parameters[name].ndim)]
        owner = next(
            (part for part in lab.parts if (name, 0) in (*part.rows, *part.inputs, *part.outputs)), None
        )
        if len(dims) < 2 or owner is None or owner.kind in (Kind.BARE, Kind.ELEMENTWISE):
            return " ".join(dims)
        backwards = (name, 0) in owner.outputs
        return f"{dims[0]} {'<-' if backwards else '->'} {' '.join(dims[1:])}"

    def _shortcuts(self) -> Iterator[tuple[str, str, str]]:
        stream = self.found.stream
        told: dict[int, set[tuple[str, str, str]]] = {step: set() for step in range(self.each)}
        for join in stream.joins:
            passage = find_passage(self.found.lab, join, stream.size)
            if passage is None:  # the stream may be read as a mean behind the last block: others will tell
                continue
            block, step = divmod(join.source, self.each)
            way = f"{self._point(join.source, block)} -> {self._point(join.target, block)}"
            told[step].add((self._pattern(passage.entry), way, self._pattern(passage.branch)))
        for step, ways in told.items():
            if not ways:
                writers = listing(part.module for part in stream.joins[step].writers)
                raise VerificationError(
                    f"where the stream passes {writers} by could not be told",
                    hint="no module is given exactly what the branch is added to; write a table by hand, as"
                    " docs/your-own.md shows",
                )
            if len(ways) > 1:
                raise VerificationError(
                    f"the blocks differ in their shortcuts: {listing(entry for entry, _, _ in ways)}",
                    hint="a table repeats one block; write this one by hand",
                )
            yield from ways

    # ── names ────────────────────────────────────────────────────────────────────────────────

    def _short(self, name: str) -> str:
        return name.removeprefix(self.prefix)

    def _pattern(self, name: str) -> str:
        return self._short(self.blocks.pattern(name))

    def _key(self, count: int) -> str:
        """A head count as the configuration gives it; a number where it does not."""
        keys = [key for key, value in heads_in(self.config).items() if value == count]
        return f'config["{keys[0]}"]' if keys else str(count)

    def _extents(self) -> set[int]:
        shapes = {extent for one in self.found.lab.parameters.values() for extent in one.shape}
        heads = {n for one in self.found.attentions for n in (one.heads.heads, one.heads.groups)}
        return (
            shapes | heads | {n for one in self.found.attentions for n in one.sizes.values()} | {self.depth}
        )

    def _depth_key(self) -> str:
        keys = (k for k, value in self.config.items() if counts_blocks(k, value) and value == self.depth)
        key = next(keys, None)
        return f'config["{key}"]' if key else str(self.depth)


def counts_blocks(key: str, value: object) -> bool:
    """Whether a setting may be the number of blocks, by its name."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return any(word in key for word in ("layer", "block", "depth"))


def _suffixed(layout: str, axes: Iterable[str], suffix: str) -> str:
    if not suffix:
        return layout
    return re.sub(r"\b(" + "|".join(axes) + r")\b", rf"\g<1>{suffix}", layout)


def _merged(rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Rows of a weight and its bias as one, where the bias has the axes that it would be given."""
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
    before, arrow, after = layout.partition(" -> ")
    return after if arrow else before.partition(" <- ")[0]
