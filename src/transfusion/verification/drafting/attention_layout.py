"""Attention: how the outputs of projections fall into heads and units, found by trying layouts.

A layout is right if permuting the units of v inside every head, in v and in the reader of the heads
together, leaves that reader's output as it was. What else may move is then tried axis by axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import torch
from torch import Tensor

from transfusion.errors import LayoutError
from transfusion.layouts import Index, Item, index_map, parse, solve_sizes
from transfusion.verification.drafting.module_parts import ModulePart, PartKind, Slot
from transfusion.verification.drafting.probe_model import ProbeModel, same

SEPARATE = {
    "head": ("(head qk)", "(head qk)", "(head vo)", "(head vo)"),
    "group": ("(group rep qk)", "(group qk)", "(group vo)", "(group rep vo)"),
    "one": ("(head qk)", "qk", "vo", "(head vo)"),
}
"""Layouts of q, k, v and of their reader: a key per head, per group of heads, or one for all."""
FUSED = {
    "head": (
        "[(head qk)|(head qk)|(head vo)]",
        "(head [qk|qk|vo])",
        "[(head vo)|(head qk)|(head qk)]",
        "(head [vo|qk|qk])",
        "[(head qk)|(head vo)|(head qk)]",
        "(head [qk|vo|qk])",
    ),
    "group": (
        "[(group rep qk)|(group qk)|(group vo)]",
        "(group [(rep qk)|qk|vo])",
        "[(group rep qk)|(group vo)|(group qk)]",
    ),
    "one": ("[(head qk)|qk|vo]", "[(head qk)|vo|qk]", "[vo|(head qk)|qk]"),
}
"""Layouts of one projection for q, k and v."""
HALF_FUSED = {
    "head": ("[(head qk)|(head vo)]", "(head [qk|vo])", "[(head vo)|(head qk)]", "(head [vo|qk])"),
    "group": ("[(group qk)|(group vo)]", "(group [qk|vo])", "[(group vo)|(group qk)]", "(group [vo|qk])"),
    "one": ("[qk|vo]", "[vo|qk]"),
}
"""Layouts of one projection for k and v, beside one for q."""


@dataclass(frozen=True)
class HeadLayout:
    """How many heads there are and, if fewer, how many groups of keys and values."""

    heads: int
    groups: int

    @property
    def kind(self) -> str:
        """A key per head, per group of heads, or one for all: a word of the tables above."""
        if self.groups == self.heads:
            return "head"
        return "one" if self.groups == 1 else "group"

    @property
    def sizes(self) -> dict[str, int]:
        if self.kind != "group":
            return {"head": self.heads}
        return {"group": self.groups, "rep": self.heads // self.groups}


@dataclass(frozen=True)
class AttentionLayout:
    """An attention that was understood: layouts for its dimensions, sizes, and what may move."""

    layouts: Mapping[Slot, str]
    sizes: Mapping[str, int]
    parents: Mapping[str, str]
    free: frozenset[str]
    heads: HeadLayout

    @property
    def rank(self) -> tuple[int, int]:
        """The more may move the better; halves of heads pass for heads where heads must stay."""
        return len(self.free), -self.heads.heads


@dataclass
class _Hypothesis:
    """One way to read the projections before a reader of heads."""

    probe: ProbeModel
    reader: ModulePart
    layouts: dict[Slot, str]
    sizes: dict[str, int]
    shared: bool = False
    """Whether all heads have one key and one value."""
    parents: dict[str, str] = field(default_factory=dict)

    def solved(self) -> bool:
        """Whether all shapes agree with the layouts; the sizes of units follow."""
        try:
            for slot, text in self.layouts.items():
                self.sizes |= solve_sizes(parse(text), (self.probe.extent(slot),), self.sizes)
        except LayoutError:
            return False
        outer = "head" if "head" in self.sizes else "group"
        self.parents = {} if self.shared else {"qk": outer, "vo": outer, "rep": outer}
        return self.sizes.keys() >= {"qk", "vo"}

    def holds(self, *axes: str) -> bool:
        """Whether the reader's output stays as it was when these axes are permuted at random."""
        probe = self.probe
        drawn = {axis: self._draw(axis) for axis in axes}
        moves = {}
        for slot, text in self.layouts.items():
            index = index_map(_item(text), self.sizes, drawn, self.parents)
            if index is not None:
                moves[slot] = torch.from_numpy(index)
        place = next(i for i, call in enumerate(probe.original.calls) if call.module == self.reader.module)
        trace = probe.run(moves, until=place)
        return same(probe.original.calls[place].output, trace.calls[place].output)

    def _draw(self, axis: str) -> Index:
        parent = self.parents.get(axis)
        rows = self.sizes[parent] if parent else 1
        drawn: list[Tensor] = [self.probe.permutation(self.sizes[axis]) for _ in range(rows)]
        return torch.stack(drawn).numpy()


def understand(
    probe: ProbeModel, reader: ModulePart, before: Sequence[ModulePart], counts: Sequence[HeadLayout]
) -> AttentionLayout | None:
    """The attention that ends in a reader of heads, from the parts before it that nothing else explains."""
    projections = [part for part in before if part.kind is PartKind.LINEAR]
    norms = [part for part in before if part.kind is PartKind.ELEMENTWISE]
    best: AttentionLayout | None = None
    for heads in counts:
        for layouts in _readings(projections, reader, heads):
            found = _Hypothesis(probe, reader, layouts, dict(heads.sizes), heads.kind == "one")
            if not (found.solved() and found.sizes["vo"] > 1 and found.holds("vo")):
                continue
            attention = _explored(found, norms, heads)
            if attention and (best is None or attention.rank > best.rank):
                best = attention
    return best


def _readings(
    projections: Sequence[ModulePart], reader: ModulePart, heads: HeadLayout
) -> Iterator[dict[Slot, str]]:
    """Every way to read the projections as q, k and v."""
    q, k, v, o = SEPARATE[heads.kind]
    ways: list[tuple[tuple[ModulePart, str], ...]]
    if len(projections) == 1:
        ways = [((projections[0], text),) for text in FUSED[heads.kind]]
    elif len(projections) == 2:
        ways = [((a, q), (b, text)) for a, b in permutations(projections) for text in HALF_FUSED[heads.kind]]
    elif len(projections) == 3:
        ways = [tuple(zip(order, (q, k, v), strict=True)) for order in permutations(projections)]
    else:
        ways = []
    for way in ways:
        layouts = {slot: text for part, text in way for slot in part.outputs}
        yield {reader.inputs[0]: o, **layouts}


def _explored(found: _Hypothesis, norms: Sequence[ModulePart], heads: HeadLayout) -> AttentionLayout | None:
    """Which axes of a right layout may move, each tried alone."""
    for norm in norms:
        text = _of_norm(norm, found)
        if text is None:
            return None
        found.layouts |= dict.fromkeys(norm.outputs, text)
    if any(text == "qk" for text in found.layouts.values()):
        found.parents.pop("qk", None)  # one weight for all heads: their units move alike, or not at all
    free = {"vo"}
    free |= {axis for axis in ("head", "group", "rep") if axis in found.sizes and found.holds(axis)}
    if found.sizes["qk"] > 1 and found.holds("qk"):
        free.add("qk")
    elif (part := _partly_turned(found)) is not None:
        found, free = part, free | {"qk"}
    parents = {axis: parent for axis, parent in found.parents.items() if axis in free}
    return AttentionLayout(found.layouts, found.sizes, parents, frozenset(free), heads)


def _of_norm(norm: ModulePart, found: _Hypothesis) -> str | None:
    """The layout of a norm between the projections and the heads, by its size."""
    size = found.probe.extent(norm.outputs[0])
    if size == found.sizes["qk"]:
        return "qk"
    for slot, text in found.layouts.items():
        if found.probe.extent(slot) == size and "vo" not in text:
            return text
    return None


def _partly_turned(found: _Hypothesis) -> _Hypothesis | None:
    """The same with the first units of q and k fixed, as few as will do; None if no unit may move."""
    size = found.sizes["qk"]

    def with_fixed(rotated: int) -> _Hypothesis:
        layouts = {slot: _split(text) for slot, text in found.layouts.items()}
        sizes = {**found.sizes, "rot": rotated, "qk": size - rotated}
        return _Hypothesis(found.probe, found.reader, layouts, sizes, found.shared, found.parents)

    fewest, most = 1, size - 2
    if most < 1 or not with_fixed(most).holds("qk"):
        return None
    while fewest < most:
        middle = (fewest + most) // 2
        if all(with_fixed(middle).holds("qk") for _ in range(3)):
            most = middle
        else:
            fewest = middle + 1
    return with_fixed(most)


def _split(text: str) -> str:
    """The layout with the units of q and k in two."""
    inside = text.replace("|qk", "|rot|qk").replace("[qk", "[rot|qk")
    for product in ("head qk", "group qk", "rep qk"):
        inside = inside.replace(product, product.replace("qk", "[rot|qk]"))
    return "[rot|qk]" if text == "qk" else inside


def _item(text: str) -> Item:
    (item,) = parse(text).items
    return item


def head_counts(numbers: Mapping[str, int], reader_size: int) -> list[HeadLayout]:
    """The head counts to try: those that the configuration names, or else every divisor, coarsest first."""
    named = [value for value in numbers.values() if value > 0 and reader_size % value == 0]
    if not named:
        return [HeadLayout(n, n) for n in range(2, reader_size) if reader_size % n == 0]
    most = sorted(set(named), reverse=True)
    pairs = {HeadLayout(heads, groups) for heads in most for groups in (*most, 1) if heads % groups == 0}
    return sorted(pairs, key=lambda one: (-one.heads, -one.groups))


def heads_in(config: Mapping[str, object]) -> dict[str, int]:
    """The settings that count heads, by their name."""
    return {
        key: value
        for key, value in config.items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and "head" in key.lower()
        and not any(word in key.lower() for word in ("dim", "size", "width"))
    }
