"""Architectures: the named axes of all tensors of one checkpoint.

An axis in one place is a `Space`: ``layer.3.head`` with a size, a parent and the group of changes of
basis that it admits exactly. The residual stream is named by points. In a stack of n blocks with points
x and y, block i reads ``x``, has ``y`` after its attention, and passes on ``x@next``; ``x@first`` and
``x@last`` are the two ends. `Architecture.under` joins the spaces that a policy ties.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from transfusion.architecture.table import Symmetry

if TYPE_CHECKING:
    from transfusion.architecture.layouts import Layout

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class Residual(StrEnum):
    """The maps of the residual stream: one for each point, one for all, or none."""

    UNTIED = "untied"
    TIED = "tied"
    FIXED = "fixed"


class InnerPolicy(StrEnum):
    """Whether the units of q and k inside a head move apart from those of v and o, or together."""

    FREE = "free"
    TIED = "tied"


class HeadPolicy(StrEnum):
    """The treatment of axes that enclose others in one dimension, such as heads."""

    MATCHED = "matched"
    NATURAL = "natural"
    """Heads keep their order; only the axes within them move."""
    FLAT = "flat"
    """Boundaries between heads are ignored, so units move from one head to another. Not a symmetry."""


@dataclass(frozen=True)
class Policy:
    """Restrictions of an architecture's axes beyond those of its table."""

    residual: Residual = Residual.UNTIED
    inner: InnerPolicy = InnerPolicy.FREE
    heads: HeadPolicy = HeadPolicy.MATCHED


@dataclass(frozen=True)
class Space:
    """An axis in one place: ``layer.3.head`` with its size, parent and group."""

    id: str
    axis: str
    size: int
    group: Symmetry
    parent: str | None = None
    stream: str | None = None
    """The stack of the residual stream, if this is a point of one."""
    tied_with: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Shortcut:
    """A residual connection: the stream enters at one module and returns behind another."""

    entry: str
    branch: str
    source: str
    target: str
    factor: float = 1.0
    """What the branch's output is multiplied by before it is added."""


@dataclass(frozen=True)
class Architecture:
    """Tensors with layouts whose axes are spaces. Names are canonical: see `naming`."""

    family: str
    spaces: Mapping[str, Space]
    tensors: Mapping[str, Layout]
    task_heads: frozenset[str]
    unread: frozenset[str]
    """Tensors that files may have and the library leaves unread."""
    scales: frozenset[str]
    """Vectors that multiply units: the weights of norms, LayerScale."""
    buffers: frozenset[str]
    shortcuts: tuple[Shortcut, ...]
    outputs: Mapping[str, str | None]
    policy: Policy = field(default_factory=Policy)
    unrotated: str = ""
    """Why the stream may be permuted, but not rotated; empty if it may."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {space.id: space.size for space in self.spaces.values()}

    @cached_property
    def parents(self) -> dict[str, str]:
        return {space.id: space.parent for space in self.spaces.values() if space.parent}

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """Return the children of every parent that may be permuted."""
        result: dict[str, list[str]] = {}
        for space in self.free():
            if space.parent:
                result.setdefault(space.parent, []).append(space.id)
        return result

    @cached_property
    def occurrences(self) -> dict[str, list[str]]:
        """Return the tensors in which each space occurs."""
        result: dict[str, list[str]] = {id: [] for id in self.spaces}
        for tensor, layout in self.tensors.items():
            for name in layout.names():
                result[name].append(tensor)
        return result

    def free(self) -> list[Space]:
        """Return the spaces that may be permuted, in the order of the forward pass, parents first."""
        return [space for space in self.moving() if space.group is Symmetry.PERMUTATION]

    def moving(self) -> list[Space]:
        """Return the spaces that may be permuted or rotated, in the same order."""
        return [space for space in self.spaces.values() if space.group is not Symmetry.FIXED]

    def rotary_spaces(self) -> list[Space]:
        """Return the spaces whose units may be rotated in pairs, and not permuted."""
        return [space for space in self.moving() if space.group.rotates_pairs]

    def rows(self, id: str) -> int:
        """Return the number of maps of a space: one per element of its ancestors."""
        parent = self.spaces[id].parent
        return 1 if parent is None else self.rows(parent) * self.spaces[parent].size

    @cached_property
    def backbone(self) -> dict[str, Layout]:
        """The tensors that every model of this architecture has: no task heads, nothing that is unread."""
        others = self.task_heads | self.unread
        return {name: layout for name, layout in self.tensors.items() if name not in others}

    @cached_property
    def backbone_spaces(self) -> list[str]:
        """The spaces that occur in the backbone."""
        return sorted({id for layout in self.backbone.values() for id in layout.names()})

    @cached_property
    def token_axes(self) -> frozenset[str]:
        """The axes whose units are tokens: fixed ones of the whole model, from which an embedding leads on.

        There may be several, such as one for each language.
        """
        read = {
            name
            for layout in self.backbone.values()
            for dim in layout.inputs
            for name in layout.part([dim]).names()
        }
        spaces = (self.spaces[name] for name in read)
        return frozenset(one.id for one in spaces if one.id == one.axis and one.group is Symmetry.FIXED)

    def output_space(self, name: str) -> str | None:
        """Return the space of an output's last dimension: empty if it stays, None if it is not compared.

        ``{}`` in the table stands for any number.
        """
        return self.outputs.get(name, self.outputs.get(_NUMBER.sub(".{}", name), ""))

    def digest(self) -> str:
        """Return a hash of everything that decides what an alignment of this architecture means.

        Which vectors are scales is left out: the shapes and layouts that π refers to do not depend on it.
        """
        spaces = [self.spaces[id] for id in self.backbone_spaces]
        text = json.dumps(
            {
                "family": self.family,
                "spaces": [[s.id, s.size, s.group, s.parent] for s in spaces],
                "tensors": {name: str(layout) for name, layout in sorted(self.backbone.items())},
            }
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def resized(self, id: str, size: int) -> Architecture:
        """Return the architecture with another size of one space."""
        if id not in self.spaces or self.spaces[id].size == size:
            return self
        return replace(self, spaces={**self.spaces, id: replace(self.spaces[id], size=size)})

    def under(self, policy: Policy) -> Architecture:
        """Return the architecture under a policy: spaces that must move together become one."""
        return _tied(_without_heads(self, policy.heads), policy)


def _tied(architecture: Architecture, policy: Policy) -> Architecture:
    """Join the spaces of the stream, and axes that are tied with each other, where the policy says so."""

    def same(id: str) -> str:
        space = architecture.spaces[id]
        if space.stream and policy.residual is Residual.TIED:
            return f"{space.stream}.stream"
        other = architecture.spaces.get(space.tied_with or "")
        tied = policy.inner is InnerPolicy.TIED and other is not None and other.size == space.size
        if tied and other and {other.group, space.group} == {Symmetry.PERMUTATION}:
            return other.id
        return id

    spaces: dict[str, Space] = {}
    for space in architecture.spaces.values():
        id = same(space.id)
        frozen = space.stream is not None and policy.residual is Residual.FIXED
        merged = replace(
            space,
            id=id,
            parent=same(space.parent) if space.parent else None,
            group=Symmetry.FIXED if frozen else space.group,
            why="the residual stream was asked to stay" if frozen else space.why,
        )
        if id not in spaces:
            spaces[id] = merged
        elif merged.group is Symmetry.FIXED:  # what moves together with something fixed is fixed
            spaces[id] = replace(spaces[id], group=merged.group, why=merged.why)
    return replace(
        architecture,
        spaces=spaces,
        tensors={name: layout.rename(same) for name, layout in architecture.tensors.items()},
        shortcuts=tuple(
            replace(cut, source=same(cut.source), target=same(cut.target)) for cut in architecture.shortcuts
        ),
        outputs={name: same(id) if id else None for name, id in architecture.outputs.items()},
        policy=policy,
    )


def _without_heads(architecture: Architecture, heads: HeadPolicy) -> Architecture:
    """Fix the order of heads, unless they are matched. Flat heads lose their boundaries too, where a layout
    has them directly before the axis within them. Interleaved and grouped heads keep their boundaries.
    """
    if heads is HeadPolicy.MATCHED:
        return architecture
    spaces, parents = dict(architecture.spaces), architecture.parents
    layouts = architecture.tensors.values()
    enclosing = {name for layout in layouts for name in layout.enclosing(parents)}
    flat = {
        child: parent
        for child, parent in parents.items()
        if heads is HeadPolicy.FLAT
        and parent in enclosing
        and spaces[child].group is Symmetry.PERMUTATION
        and all(layout.pairs(parent, child) for layout in layouts if child in layout.names())
    }
    for child, parent in list(flat.items()):  # what else lies within the parent there still needs it
        around = (set(layout.names()) for layout in layouts if child in layout.names())
        if any(parents.get(other) == parent and other not in flat for names in around for other in names):
            del flat[child]
    for id in enclosing:
        spaces[id] = replace(spaces[id], group=Symmetry.FIXED, why="heads were asked to stay")
    for child, parent in flat.items():
        size = spaces[child].size * spaces[parent].size
        spaces[child] = replace(spaces[child], size=size, parent=spaces[parent].parent)
    tensors = {name: layout.flattened(flat) for name, layout in architecture.tensors.items()}
    return replace(architecture, spaces=spaces, tensors=tensors)
