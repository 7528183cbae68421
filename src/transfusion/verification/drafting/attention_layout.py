"""Layouts of attention: how the outputs of projections divide into heads and units, found by trial.

A layout is correct if permuting the units of v inside every head, in v and in the output projection together,
leaves the output of that projection unchanged. The other axes are then tested one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import torch
from torch import Tensor

from transfusion.architecture.layouts import Index, Item, index_map, parse, solve_sizes
from transfusion.errors import LayoutError
from transfusion.verification.drafting.probe_model import ModulePart, PartKind, ProbeModel, Slot, same

SEPARATE = {
    "head": ("(head qk)", "(head qk)", "(head vo)", "(head vo)"),
    "group": ("(group rep qk)", "(group qk)", "(group vo)", "(group rep vo)"),
    "one": ("(head qk)", "qk", "vo", "(head vo)"),
}
"""Layouts of q, k, v and o: one key per head, per group of heads, or for all heads."""
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
"""Layouts of a fused projection of q, k and v."""
HALF_FUSED = {
    "head": ("[(head qk)|(head vo)]", "(head [qk|vo])", "[(head vo)|(head qk)]", "(head [vo|qk])"),
    "group": ("[(group qk)|(group vo)]", "(group [qk|vo])", "[(group vo)|(group qk)]", "(group [vo|qk])"),
    "one": ("[qk|vo]", "[vo|qk]"),
}
"""Layouts of a fused projection of k and v, with a separate q."""


@dataclass(frozen=True)
class HeadLayout:
    """The number of heads, and the number of groups of keys and values."""

    heads: int
    groups: int

    @property
    def kind(self) -> str:
        """One key per head, per group, or for all heads: a key of the tables above."""
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
    """The layout of one attention: its dimensions, its sizes, and its free axes."""

    layouts: Mapping[Slot, str]
    sizes: Mapping[str, int]
    parents: Mapping[str, str]
    free: frozenset[str]
    heads: HeadLayout

    @property
    def rank(self) -> tuple[int, int]:
        """The order of layouts: more free axes first, then fewer heads. Half a head can look like a head."""
        return len(self.free), -self.heads.heads


@dataclass
class _Hypothesis:
    """One possible layout of the projections before an output projection."""

    probe: ProbeModel
    reader: ModulePart
    layouts: dict[Slot, str]
    sizes: dict[str, int]
    shared: bool = False
    """Whether all heads share one key and one value."""
    parents: dict[str, str] = field(default_factory=dict)

    def solved(self) -> bool:
        """Whether all shapes agree with the layouts; solves the unknown sizes."""
        try:
            for slot, text in self.layouts.items():
                self.sizes |= solve_sizes(parse(text), (self.probe.extent(slot),), self.sizes)
        except LayoutError:
            return False
        outer = "head" if "head" in self.sizes else "group"
        self.parents = {} if self.shared else {"qk": outer, "vo": outer, "rep": outer}
        return self.sizes.keys() >= {"qk", "vo"}

    def holds(self, *axes: str) -> bool:
        """Whether random permutations of these axes leave the output of the projection unchanged."""
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


def find_attention(
    probe: ProbeModel, reader: ModulePart, before: Sequence[ModulePart], counts: Sequence[HeadLayout]
) -> AttentionLayout | None:
    """Return the attention that ends in an output projection, or None if no layout is correct.

    ``before`` has the unexplained parts that ran before the projection, ``counts`` the head counts to try.
    """
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
    """Yield every assignment of the projections to q, k and v."""
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
    """Test each axis of a correct layout alone, and return the attention with its free axes."""
    for norm in norms:
        text = _of_norm(norm, found)
        if text is None:
            return None
        found.layouts |= dict.fromkeys(norm.outputs, text)
    if any(text == "qk" for text in found.layouts.values()):
        found.parents.pop("qk", None)  # one weight for all heads: one permutation for all heads
    free = {"vo"}
    free |= {axis for axis in ("head", "group", "rep") if axis in found.sizes and found.holds(axis)}
    if found.sizes["qk"] > 1 and found.holds("qk"):
        free.add("qk")
    elif (part := _partly_rotary(found)) is not None:
        found, free = part, free | {"qk"}
    parents = {axis: parent for axis, parent in found.parents.items() if axis in free}
    return AttentionLayout(found.layouts, found.sizes, parents, frozenset(free), heads)


def _of_norm(norm: ModulePart, found: _Hypothesis) -> str | None:
    """Return the layout of a norm between the projections and the heads, by its size."""
    size = found.probe.extent(norm.outputs[0])
    if size == found.sizes["qk"]:
        return "qk"
    for slot, text in found.layouts.items():
        if found.probe.extent(slot) == size and "vo" not in text:
            return text
    return None


def _partly_rotary(found: _Hypothesis) -> _Hypothesis | None:
    """Return the layout with the fewest first units of q and k fixed; None if all must be fixed."""
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
    """Return the layout with the units of q and k split into ``rot`` and ``qk``."""
    inside = text.replace("|qk", "|rot|qk").replace("[qk", "[rot|qk")
    for product in ("head qk", "group qk", "rep qk"):
        inside = inside.replace(product, product.replace("qk", "[rot|qk]"))
    return "[rot|qk]" if text == "qk" else inside


def _item(text: str) -> Item:
    (item,) = parse(text).items
    return item


def head_counts(numbers: Mapping[str, int], reader_size: int) -> list[HeadLayout]:
    """Return the head counts to try: those in the configuration, or else every divisor of the width."""
    named = [value for value in numbers.values() if value > 0 and reader_size % value == 0]
    if not named:
        return [HeadLayout(n, n) for n in range(2, reader_size) if reader_size % n == 0]
    most = sorted(set(named), reverse=True)
    pairs = {HeadLayout(heads, groups) for heads in most for groups in (*most, 1) if heads % groups == 0}
    return sorted(pairs, key=lambda one: (-one.heads, -one.groups))


def heads_in(config: Mapping[str, object]) -> dict[str, int]:
    """Return the settings that count heads, judged by their names."""
    return {
        key: value
        for key, value in config.items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and "head" in key.lower()
        and not any(word in key.lower() for word in ("dim", "size", "width"))
    }
