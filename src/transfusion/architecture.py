"""Architectures: tensors whose axes have names, and what follows from that for one checkpoint.

An axis in one place is a `Space`: ``layer.3.head`` with a size, a parent and the group of changes of
basis that it admits exactly. The residual stream is named by points. In a stack of n blocks with points
x and y, block i reads ``x``, has ``y`` after its attention, and hands on ``x@next``; ``x@first`` and
``x@last`` are the two ends. `Architecture.under` takes the quotient that a residual policy asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from transfusion.layouts import Layout
from transfusion.tables import Group


class Residual(StrEnum):
    """What happens to the residual stream."""

    UNTIED = "untied"
    TIED = "tied"
    FIXED = "fixed"


class Inner(StrEnum):
    """Whether the units of q and k inside a head move apart from those of v and o, or together."""

    FREE = "free"
    TIED = "tied"


@dataclass(frozen=True)
class Space:
    """An axis in one place: ``layer.3.head`` with its size, parent and group."""

    id: str
    axis: str
    size: int
    group: Group
    parent: str | None = None
    stream: str | None = None
    """The stack whose residual stream this is a point of."""
    twin: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Shortcut:
    """A residual connection: the stream enters at one module and returns behind another."""

    entry: str
    branch: str
    source: str
    target: str


@dataclass(frozen=True)
class Architecture:
    """Tensors with layouts whose axes are spaces. Names are canonical: see `naming`."""

    family: str
    spaces: Mapping[str, Space]
    tensors: Mapping[str, Layout]
    heads: frozenset[str]
    buffers: frozenset[str]
    shortcuts: tuple[Shortcut, ...]
    outputs: Mapping[str, str | None]
    residual: Residual = Residual.UNTIED
    inner: Inner = Inner.FREE

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {space.id: space.size for space in self.spaces.values()}

    @cached_property
    def parents(self) -> dict[str, str]:
        return {space.id: space.parent for space in self.spaces.values() if space.parent}

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """For every parent, its children that may move."""
        result: dict[str, list[str]] = {}
        for space in self.spaces.values():
            if space.parent and space.group is not Group.FIXED:
                result.setdefault(space.parent, []).append(space.id)
        return result

    @cached_property
    def occurrences(self) -> dict[str, list[str]]:
        """For every space, the tensors in which it occurs."""
        result: dict[str, list[str]] = {id: [] for id in self.spaces}
        for tensor, layout in self.tensors.items():
            for name in layout.names():
                result[name].append(tensor)
        return result

    def free(self) -> list[Space]:
        """The spaces that may move, in the order in which a signal meets them, parents first."""
        return [space for space in self.spaces.values() if space.group is not Group.FIXED]

    def rows(self, id: str) -> int:
        """How many maps a space has: one per element of its ancestors."""
        parent = self.spaces[id].parent
        return 1 if parent is None else self.rows(parent) * self.spaces[parent].size

    @cached_property
    def trunk(self) -> dict[str, Layout]:
        """The tensors that every model of this architecture has, without heads."""
        return {name: layout for name, layout in self.tensors.items() if name not in self.heads}

    @cached_property
    def trunk_spaces(self) -> list[str]:
        """The spaces that occur in the trunk."""
        return sorted({id for layout in self.trunk.values() for id in layout.names()})

    def digest(self) -> str:
        """A hash of everything that decides what an alignment of this architecture means."""
        spaces = [self.spaces[id] for id in self.trunk_spaces]
        text = json.dumps(
            {
                "family": self.family,
                "spaces": [[s.id, s.size, s.group, s.parent] for s in spaces],
                "tensors": {name: str(layout) for name, layout in sorted(self.trunk.items())},
            }
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def under(self, residual: Residual, inner: Inner = Inner.FREE) -> Architecture:
        """The quotient that a policy asks for: spaces that must move together become one."""

        def same(id: str) -> str:
            space = self.spaces[id]
            if space.stream and residual is Residual.TIED:
                return f"{space.stream}.stream"
            if space.twin and inner is Inner.TIED:
                twin = self.spaces.get(space.twin)
                if twin and twin.size == space.size and Group.FIXED not in (twin.group, space.group):
                    return twin.id
            return id

        spaces: dict[str, Space] = {}
        for space in self.spaces.values():
            id = same(space.id)
            frozen = space.stream is not None and residual is Residual.FIXED
            merged = replace(
                space,
                id=id,
                parent=same(space.parent) if space.parent else None,
                group=Group.FIXED if frozen else space.group,
                why="the residual stream was asked to stay" if frozen else space.why,
            )
            if id not in spaces:
                spaces[id] = merged
            elif merged.group is Group.FIXED:  # what moves together with something fixed is fixed
                spaces[id] = replace(spaces[id], group=merged.group, why=merged.why)
        return replace(
            self,
            spaces=spaces,
            tensors={name: layout.rename(same) for name, layout in self.tensors.items()},
            shortcuts=tuple(
                replace(cut, source=same(cut.source), target=same(cut.target)) for cut in self.shortcuts
            ),
            outputs={name: same(id) if id else None for name, id in self.outputs.items()},
            residual=residual,
            inner=inner,
        )
