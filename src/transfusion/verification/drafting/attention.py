"""Layouts of attention: how the outputs of projections divide into heads and units, found by trial.

A layout is correct if permuting the units of v inside every head, in v and in the output projection together,
leaves the output of that projection unchanged. The other axes are then tested one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

import torch

from transfusion.architecture.layouts import index_map, parse, solve_sizes
from transfusion.errors import LayoutError
from transfusion.verification.drafting.trials import Kind, Part, Slot, Trials, same

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


@dataclass
class Attention:
    """One attention: the layouts of its dimensions, sizes of axes, parents of axes, and the free axes."""

    heads: int
    groups: int
    """The number of groups of heads with one key and one value each."""
    layouts: dict[Slot, str]
    sizes: dict[str, int]
    parents: dict[str, str] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)
    shares_heads: bool = False
    """Whether one table of distances binds its heads to those of the other blocks."""

    @property
    def tensor(self) -> str:
        """The name of one of its tensors."""
        return next(iter(self.layouts))[0]

    @property
    def rank(self) -> tuple[int, int]:
        """The order of layouts: more free axes first, then fewer heads. Half a head can look like a head."""
        return len(self.free), -self.heads

    def solved(self, trials: Trials) -> bool:
        """Whether all shapes agree with the layouts; solves the unknown sizes."""
        try:
            for slot, text in self.layouts.items():
                self.sizes |= solve_sizes(parse(text), (trials.extent(slot),), self.sizes)
        except LayoutError:
            return False
        return self.sizes.keys() >= {"qk", "vo"}

    def holds(self, trials: Trials, reader: Part | None, axis: str) -> bool:
        """Whether permutations of an axis leave the output of the output projection unchanged.

        Without a ``reader``: those of the model.
        """
        rows = self.sizes[self.parents[axis]] if axis in self.parents else 1
        index = torch.stack([trials.permutation(self.sizes[axis]) for _ in range(rows)])  # (parents, units)
        moves = {}
        for slot, text in self.layouts.items():
            (item,) = parse(text).items
            if (moved := index_map(item, self.sizes, {axis: index.numpy()}, self.parents)) is not None:
                moves[slot] = torch.from_numpy(moved)
        if reader is None:
            trace = trials.run(moves)
            return all(trials.is_same(name, trace) for name in trace.outputs)
        place = trials.first_call(reader)
        after = trials.run(moves, until=place).calls[place].output
        return same(trials.original.calls[place].output, after)


def find_attention(
    trials: Trials, reader: Part, before: Sequence[Part], counts: Sequence[tuple[int, int]]
) -> Attention | None:
    """Return the attention that ends in an output projection, or None if no layout is correct.

    ``before`` has the unexplained parts that ran before the projection, ``counts`` the numbers of heads and
    groups to try.
    """
    projections = [part for part in before if part.kind is Kind.LINEAR]
    norms = [part for part in before if part.kind is Kind.ELEMENTWISE]
    best: Attention | None = None
    for heads, groups in counts:
        kind = "head" if groups == heads else "one" if groups == 1 else "group"
        sizes = {"group": groups, "rep": heads // groups} if kind == "group" else {"head": heads}
        outer = next(iter(sizes))
        for layouts in _readings(projections, reader, kind):
            parents = {} if kind == "one" else {"qk": outer, "vo": outer, "rep": outer}
            found = Attention(heads, groups, layouts, dict(sizes), parents)
            if not (found.solved(trials) and found.sizes["vo"] > 1 and found.holds(trials, reader, "vo")):
                continue
            explored = _explored(trials, reader, found, norms)
            if explored and (best is None or explored.rank > best.rank):
                best = explored
    return best


def _readings(projections: Sequence[Part], reader: Part, kind: str) -> Iterator[dict[Slot, str]]:
    """Yield every assignment of the projections to q, k and v."""
    q, k, v, o = SEPARATE[kind]
    texts: list[tuple[str, ...]] = []  # of the projections, in one order
    if len(projections) == 1:
        texts = [(text,) for text in FUSED[kind]]
    elif len(projections) == 2:
        texts = [(q, text) for text in HALF_FUSED[kind]]
    elif len(projections) == 3:
        texts = [(q, k, v)]
    for order in permutations(projections):
        for some in texts:
            ways = zip(order, some, strict=True)
            yield {reader.inputs[0]: o, **{slot: text for part, text in ways for slot in part.outputs}}


def _explored(trials: Trials, reader: Part, found: Attention, norms: Sequence[Part]) -> Attention | None:
    """Test each axis of a correct layout alone, and return the attention with its free axes."""
    for norm in norms:
        text = _of_norm(trials, norm, found)
        if text is None:
            return None
        found.layouts |= dict.fromkeys(norm.outputs, text)
    if "qk" in found.layouts.values():
        found.parents.pop("qk", None)  # one weight for all heads: one permutation for all heads
    outer = [axis for axis in ("head", "group", "rep") if axis in found.sizes]
    found.free = {"vo", *(axis for axis in outer if found.holds(trials, reader, axis))}
    if found.sizes["qk"] > 1 and found.holds(trials, reader, "qk"):
        found.free.add("qk")
    elif (part := _partly_rotary(trials, reader, found)) is not None:
        found = replace(part, free=found.free | {"qk"})
    found.parents = {axis: parent for axis, parent in found.parents.items() if axis in found.free}
    return found


def _of_norm(trials: Trials, norm: Part, found: Attention) -> str | None:
    """Return the layout of a norm between the projections and the heads, by its size."""
    size = trials.extent(norm.outputs[0])
    if size == found.sizes["qk"]:
        return "qk"
    fitting = (text for slot, text in found.layouts.items() if trials.extent(slot) == size)
    return next((text for text in fitting if "vo" not in text), None)


def _partly_rotary(trials: Trials, reader: Part, found: Attention) -> Attention | None:
    """Return the layout with the fewest first units of q and k fixed; None if all must be fixed."""
    size = found.sizes["qk"]
    layouts = {slot: _split(text) for slot, text in found.layouts.items()}

    def with_fixed(rotated: int) -> Attention:
        return replace(found, layouts=layouts, sizes={**found.sizes, "rot": rotated, "qk": size - rotated})

    fewest, most = 1, size - 2
    if most < 1 or not with_fixed(most).holds(trials, reader, "qk"):
        return None
    while fewest < most:
        middle = (fewest + most) // 2
        if all(with_fixed(middle).holds(trials, reader, "qk") for _ in range(3)):
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


def head_counts(config: Mapping[str, object], width: int) -> list[tuple[int, int]]:
    """Return the numbers of heads and groups to try: the configuration's, or else the width's divisors."""
    named = {value for value in heads_in(config).values() if value > 0 and width % value == 0}
    if not named:
        return [(count, count) for count in range(2, width) if width % count == 0]
    pairs = {(heads, groups) for heads in named for groups in (*named, 1) if heads % groups == 0}
    return sorted(pairs, reverse=True)


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
