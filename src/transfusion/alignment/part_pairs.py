"""Which part of B comes from which part of A, if the two models have different shapes.

Blocks are joined by a path, and the parts of their tensors by their roles: the query of a block of A is the
query of its block of B, alone or as a part of a fused projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import Item, Layout, names_in
from transfusion.model.part_roles import Role, TensorPart, is_place, moves, tensor_parts

BlockPath: TypeAlias = tuple[tuple[int, int, float], ...]
"""The blocks of a stack that correspond: A's block, B's block, and the share of A's change that B's gets."""


def map_name(target: Item | str, source: Item | str) -> str:
    """Return the name of the map from a whole dimension of A to one of B."""
    return f"{target} <- {source}"


@dataclass(frozen=True)
class PartPair:
    """A part of B's tensors, and the part of A's whose change it gets."""

    target: TensorPart
    source: TensorPart
    share: float = 1.0
    """The share of the change, if it is divided among several blocks."""
    writes: str | None = None
    """The name of the map of the axis that it writes; None if the axis stays."""
    reads: str | None = None

    @classmethod
    def whole(cls, tensor: str, layout: Layout) -> PartPair:
        """Return the pair of a tensor that both models have."""
        part = TensorPart(tensor, layout, Role("", None, tensor))
        return cls(part, part)

    @property
    def maps(self) -> set[str]:
        """The names of the maps that it needs."""
        return {name for name in (self.writes, self.reads) if name is not None}


def part_pairs(a: Architecture, b: Architecture, paths: Mapping[str, BlockPath]) -> Iterator[PartPair]:
    """Yield the parts of B's tensors that have a counterpart in A."""
    parts_a = tensor_parts(a)

    def name_of(source: Item | None, target: Item | None) -> str | None:
        if source is None or target is None or not list(names_in(target)):
            return None
        return map_name(target, source) if moves(a, source) and moves(b, target) else None

    for role, target in tensor_parts(b).items():
        for block, share in _blocks_of(role, paths):
            source = parts_a.get(replace(role, block=block))
            if source is not None and _fits(source, target, a, b):
                writes, reads = name_of(source.output, target.output), name_of(source.input, target.input)
                yield PartPair(target, source, share, writes, reads)


def block_behind(paths: Mapping[str, BlockPath], stack: str, block: int | None) -> int | None:
    """Return B's number of the place behind A's last block; other numbers stay."""
    if path := paths.get(stack):
        last_a, last_b, _ = path[-1]
        return last_b + 1 if block == last_a + 1 else block
    return block


def _blocks_of(role: Role, paths: Mapping[str, BlockPath]) -> Iterator[tuple[int | None, float]]:
    """Yield A's blocks for a role in B, each with its share."""
    if role.block is None or role.stack not in paths:
        yield role.block, 1.0
        return
    path = paths[role.stack]
    last_a, last_b, _ = path[-1]
    if role.block == last_b + 1:  # behind the last block
        yield last_a + 1, 1.0
    yield from ((i, share) for i, j, share in path if j == role.block)


def _fits(source: TensorPart, target: TensorPart, a: Architecture, b: Architecture) -> bool:
    """Return whether all axes that stay have the same size in both, or can be resampled."""
    if len(source.layout.items) != len(target.layout.items):
        return False
    for ours, theirs in zip(source.layout.items, target.layout.items, strict=True):
        if moves(a, ours) and moves(b, theirs):
            continue
        sizes = [a.sizes[name] for name in names_in(ours)], [b.sizes[name] for name in names_in(theirs)]
        if sizes[0] != sizes[1] and not (is_place(ours) and is_place(theirs)):
            return False
    return True
