"""Which parts of tensors correspond in two models of different shapes, by their roles alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from transfusion.alignment.alignment import NormFold
from transfusion.alignment.rectangular import PartPair, map_name
from transfusion.architecture.layouts import Item, names_in
from transfusion.errors import MismatchError
from transfusion.model.model import Model
from transfusion.model.part_roles import Role, TensorPart, is_place, moves, place_of, tensor_parts

BlockPair: TypeAlias = tuple[int, int, float]
"""A block of A, a block of B, and the share of the change of A's block that B's gets."""
EXPERT = "expert"
"""The axis of experts, in all tables."""
FoldOf: TypeAlias = Callable[[TensorPart], NormFold | None]


def _unfolded(part: TensorPart) -> NormFold | None:
    return None


@dataclass(frozen=True)
class PartMatching:
    """The parts of the tensors of two models."""

    a: Model
    b: Model

    @cached_property
    def parts_a(self) -> dict[Role, TensorPart]:
        return tensor_parts(self.a.architecture)

    @cached_property
    def parts_b(self) -> dict[Role, TensorPart]:
        return tensor_parts(self.b.architecture)

    def stacks(self) -> list[str]:
        """Return the stacks of blocks that both have; refuse models that have none in common, and experts."""
        for model in (self.a, self.b):
            if any(place_of(id)[2] == EXPERT for id in model.architecture.spaces):
                raise MismatchError(
                    f"{model.label} is a mixture of experts, which moves between models of one shape only",
                    hint="choose a base of the same shape",
                )
        of_a, of_b = (
            {role.stack for role in parts if role.block is not None} for parts in (self.parts_a, self.parts_b)
        )
        if not of_a & of_b:
            raise MismatchError(
                f"{self.a.label} is a {self.a.family.name} and {self.b.label} a {self.b.family.name}: they"
                " have no blocks that correspond",
                hint="choose a base of the same kind",
            )
        return sorted(of_a & of_b)

    def depths(self, stack: str) -> tuple[int, int]:
        """Return the number of blocks of A and of B."""
        depths = [
            1 + max(role.block or 0 for role, part in parts.items() if role.stack == stack and part.is_weight)
            for parts in (self.parts_a, self.parts_b)
        ]
        return depths[0], depths[1]

    def even_paths(self) -> dict[str, list[BlockPair]]:
        """Return paths that divide both depths evenly; they are assumed before the models were run."""
        return {stack: self._even_path(stack) for stack in self.stacks()}

    def _even_path(self, stack: str) -> list[BlockPair]:
        ours, theirs = self.depths(stack)
        steps = max(ours, theirs)
        cells = [(step * ours // steps, step * theirs // steps) for step in range(steps)]
        return [(i, j, 1 / sum(at == i for at, _ in cells)) for i, j in cells]

    def pairs(
        self,
        paths: Mapping[str, list[BlockPair]],
        fold_a: FoldOf = _unfolded,
        fold_b: FoldOf = _unfolded,
    ) -> Iterator[PartPair]:
        """Yield the parts that correspond, with the names of the maps that they need."""
        for role, target in self.parts_b.items():
            for block, share in self._blocks_of(role, paths):
                source = self.parts_a.get(replace(role, block=block))
                if source is None or not self._fits(source, target):
                    continue
                yield PartPair(
                    role,
                    source.role,
                    share,
                    self._key(source.output, target.output),
                    self._key(source.input, target.input),
                    fold_a(source),
                    fold_b(target),
                )

    def count_axes(self) -> int:
        """Return the number of maps that are needed if both depths are divided evenly."""
        pairs = self.pairs(self.even_paths())
        return len({name for pair in pairs for name in (pair.writes, pair.reads) if name is not None})

    @staticmethod
    def _blocks_of(role: Role, paths: Mapping[str, list[BlockPair]]) -> Iterator[tuple[int | None, float]]:
        """Yield A's blocks for a role in B, each with its share."""
        if role.block is None or role.stack not in paths:
            yield role.block, 1.0
            return
        path = paths[role.stack]
        ends = (1 + max(i for i, _, _ in path), 1 + max(j for _, j, _ in path))
        if role.block == ends[1]:  # behind the last block
            yield ends[0], 1.0
        yield from ((i, share) for i, j, share in path if j == role.block)

    def _fits(self, source: TensorPart, target: TensorPart) -> bool:
        """Return whether all axes that stay have the same size in both, or can be resampled."""
        if len(source.layout.items) != len(target.layout.items):
            return False
        for ours, theirs in zip(source.layout.items, target.layout.items, strict=True):
            if moves(self.a.architecture, ours) and moves(self.b.architecture, theirs):
                continue
            sizes = [
                [architecture.sizes[name] for name in names_in(item)]
                for architecture, item in ((self.a.architecture, ours), (self.b.architecture, theirs))
            ]
            if sizes[0] != sizes[1] and not (is_place(ours) and is_place(theirs)):
                return False
        return True

    def _key(self, source: Item | None, target: Item | None) -> str | None:
        if source is None or target is None or not list(names_in(target)):
            return None
        if not moves(self.a.architecture, source) or not moves(self.b.architecture, target):
            return None
        return map_name(str(target), str(source))
