"""Drafts: the rows, shortcuts and axes of a table, from the analysis of one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transfusion.architecture.table import Axis
from transfusion.errors import VerificationError, listing
from transfusion.running.vector_effects import vector_effects
from transfusion.verification.certify import APART
from transfusion.verification.drafting.analysis import Analysis
from transfusion.verification.drafting.axis_labels import LETTERS, Count, Labels
from transfusion.verification.drafting.module_parts import PartKind
from transfusion.verification.drafting.shortcuts import find_shortcut


@dataclass
class Draft:
    """The parts of a table, for `draft_family` and `draft_source`."""

    rows: list[tuple[str, str]]
    heads: list[tuple[str, str]]
    shortcuts: list[tuple[str, str, str]]
    axes: list[Axis]
    outer_axes: list[Axis]
    points: tuple[str, ...]
    depth: Count
    sizes: dict[str, Count]
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
            axes=list(self.labels.axes.values()),
            outer_axes=list(self.labels.outer.values()),
            points=LETTERS[: self.labels.each],
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
