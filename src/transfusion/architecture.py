"""
Architectures: tables of tensors whose axes have names, and what follows from such a table.

A family of models (`Family`) turns a configuration into a `Table`: rows of text, one per tensor or
module, each with a layout. `bind` confronts a table with the shapes of a real checkpoint and gives
an `Architecture`: every tensor claimed by exactly one row, every axis an instance (`Space`) with a
size, a parent and the group of changes of basis that it admits exactly.

The residual stream is named by points. In a stack of n blocks with points x and y, block i reads
``x``, has ``y`` after its attention, and hands on ``x@next``; ``x@first`` and ``x@last`` are the two
ends. `Architecture.under` takes the quotient that a residual policy asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from transfusion.errors import ArchitectureError, listing
from transfusion.layouts import Layout, parse, solve_sizes

Shapes = Mapping[str, tuple[int, ...]]
Config = Mapping[str, Any]


class Group(StrEnum):
    """The changes of basis that an axis admits without changing the function."""

    FIXED = "fixed"
    PERMUTATION = "permutation"


class Residual(StrEnum):
    """What happens to the residual stream."""

    UNTIED = "untied"
    TIED = "tied"
    FIXED = "fixed"


class Inner(StrEnum):
    """Whether the units of q and k inside a head move apart from those of v and o, or together."""

    FREE = "free"
    TIED = "tied"


# ── what a table says ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Axis:
    """A declaration: the name of an axis, what it may do, and how many of it there are."""

    name: str
    group: Group = Group.PERMUTATION
    within: str | None = None
    scope: str = "layer"
    """One per ``layer``, per ``stack`` or per ``model``."""
    twin: str | None = None
    """An axis of the same size that `Inner.TIED` makes this one move with."""
    why: str = ""
    """For a fixed axis: what would break."""


def fixed(name: str, why: str, *, scope: str = "model", within: str | None = None) -> Axis:
    """An axis that cannot move, with the reason."""
    return Axis(name, Group.FIXED, within, scope, None, why)


@dataclass(frozen=True)
class Stack:
    """
    A column of equal blocks on one residual stream, with what stands before and after it.

    ``rows`` has one line per tensor, ``name  layout``; ``{}`` in a name is the number of the block.
    A name that ends in ``.*`` is a module with a weight and perhaps a bias: the bias has the
    output's axes if the layout has an arrow, and the weight's otherwise. ``?`` after a name: may
    be absent. ``shortcuts`` has one line per residual connection, ``entry  from -> to  branch``: the
    stream goes in at module *entry*, and the output of module *branch* is added to it.
    """

    name: str
    depth: int
    rows: str
    axes: tuple[Axis, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    shortcuts: str = ""
    points: tuple[str, ...] = ("x", "y")


@dataclass(frozen=True)
class Table:
    """Everything a family says about models of one configuration."""

    stacks: tuple[Stack, ...]
    axes: tuple[Axis, ...] = ()
    rows: str = ""
    """Rows outside the stacks; they say ``stack.x@last`` for a point of a stream."""
    heads: str = ""
    """Rows, all optional, that base models may lack and fine-tunes may have."""
    buffers: str = ""
    """Tensors that older releases of the library stored and nobody moves."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    unified: tuple[tuple[str, str], ...] = ()
    """Pairs of stream points that one shared tensor forces to be the same (tied embeddings)."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are another one by a second name: second name → first."""
    outputs: Mapping[str, str | None] = field(default_factory=dict)
    """Outputs of the live model whose last dimension is an axis that may move; None for an output
    that is in different spaces in different releases of the library, and is not compared."""


@dataclass(frozen=True)
class Family:
    """A family of architectures: how to recognise it, and its table."""

    name: str
    library: str
    table: Callable[[Config, frozenset[str]], Table]
    signature: tuple[str, ...]
    """Tensors that together give the family away when there is no configuration."""
    guess: Callable[[Shapes], tuple[dict[str, Any], str]]
    """A configuration read off the shapes, and the assumption that it rests on."""
    model_types: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    """What a live model is fed: ``image``, ``tokens``."""
    prefixes: tuple[str, ...] = ()
    """What libraries put before the names in front of a head, and drop without one."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Other names of modules or tensors, as pairs (other, ours), with ``{}`` for numbers."""
    known_keys: frozenset[str] = frozenset()
    """Configuration keys that the table takes into account, or that cannot matter to it."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Configuration keys that must have one of these values."""


# ── what a table means for one checkpoint ────────────────────────────────────────────────────


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
                twin = self.spaces[space.twin]
                if twin.size == space.size and Group.FIXED not in (twin.group, space.group):
                    return twin.id
            return id

        spaces: dict[str, Space] = {}
        for space in self.spaces.values():
            frozen = space.stream is not None and residual is Residual.FIXED
            spaces.setdefault(
                same(space.id),
                replace(
                    space,
                    id=same(space.id),
                    parent=same(space.parent) if space.parent else None,
                    group=Group.FIXED if frozen else space.group,
                    why="the residual stream was asked to stay" if frozen else space.why,
                ),
            )
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


# ── binding ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Row:
    """One expected tensor: a row of the table, for one block."""

    name: str
    layout: Layout
    pattern: str
    optional: bool
    head: bool = False


def bind(table: Table, shapes: Shapes, family: str) -> Architecture:
    """Give every tensor its layout; refuse what is unclaimed, missing, claimed twice or misfit."""
    reader = _TableReader(table)
    rows: dict[str, _Row] = {}
    for row in reader.rows():
        if row.name in rows:
            raise ArchitectureError(
                f"{family}: {row.name} is claimed twice, by '{rows[row.name].pattern}' and by"
                f" '{row.pattern}'",
                hint="keep one of the two rows in the table",
            )
        rows[row.name] = row
    buffers = frozenset(reader.buffers()) & shapes.keys()
    _refuse_unclaimed(family, [name for name in shapes if name not in rows and name not in buffers])
    _refuse_missing(family, rows, shapes)
    tensors = {name: row.layout for name, row in rows.items() if name in shapes}
    sizes = _sizes(family, tensors, shapes, reader)
    spaces = {
        id: reader.space(id, sizes[id])
        for layout in tensors.values()
        for id in _parents_first(layout, reader)
    }
    return Architecture(
        family=family,
        spaces=spaces,
        tensors=tensors,
        heads=frozenset(name for name in tensors if rows[name].head),
        buffers=buffers,
        shortcuts=tuple(reader.shortcuts()),
        outputs={
            output: id
            for output, name in table.outputs.items()
            if (id := reader.point(name) if name else None) is None or id in spaces
        },
    )


def _refuse_unclaimed(family: str, unclaimed: list[str]) -> None:
    if unclaimed:
        raise ArchitectureError(
            f"{family}: {len(unclaimed)} tensor(s) that the table does not know: {listing(unclaimed)}",
            hint="the model has parts that this architecture's table does not describe, or config.json"
            " belongs to another model; nothing is moved that is not understood",
        )


def _refuse_missing(family: str, rows: Mapping[str, _Row], shapes: Shapes) -> None:
    present = {row.pattern for name, row in rows.items() if name in shapes}
    missing = [
        row.name
        for row in rows.values()
        if row.name not in shapes and (not row.optional or row.pattern in present)
    ]
    if missing:
        raise ArchitectureError(
            f"{family}: {len(missing)} tensor(s) missing from the checkpoint: {listing(missing)}",
            hint="the download may be incomplete, or config.json belongs to another model",
        )


def _sizes(
    family: str, tensors: Mapping[str, Layout], shapes: Shapes, reader: _TableReader
) -> dict[str, int]:
    sizes = {
        id: size
        for layout in tensors.values()
        for id in layout.names()
        if (size := reader.given_size(id)) is not None
    }
    waiting = dict(tensors)
    while waiting:
        undecided: dict[str, Layout] = {}
        for name, layout in waiting.items():
            sizes |= solve_sizes(layout, shapes[name], sizes, name)
            if not all(id in sizes for id in layout.names()):
                undecided[name] = layout
        if len(undecided) == len(waiting):
            name, layout = next(iter(undecided.items()))
            unknown = [id for id in layout.names() if id not in sizes]
            raise ArchitectureError(
                f"{family}: the sizes of {listing(unknown)} cannot be told from any shape"
                f" (for instance {name}: '{layout}', {shapes[name]})",
                hint="give one of them in the table's sizes",
            )
        waiting = undecided
    return sizes


def _parents_first(layout: Layout, reader: _TableReader) -> Iterator[str]:
    for id in layout.names():
        if parent := reader.spec(id).parent:
            yield parent
        yield id


class _TableReader:
    """Expands the text of a table: names of blocks filled in, axes turned into ids of spaces."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.stacks = {stack.name: stack for stack in table.stacks}
        self.specs: dict[str, Space] = {}
        self.same_point: dict[str, str] = {}
        self.same_point = {self.point(later): self.point(first) for first, later in table.unified}

    def rows(self) -> Iterator[_Row]:
        for stack in self.table.stacks:
            yield from self._expand(stack.rows, stack)
        yield from self._expand(self.table.rows, None)
        for row in self._expand(self.table.heads, None):
            yield replace(row, optional=True, head=True)

    def buffers(self) -> Iterator[str]:
        deepest = max(stack.depth for stack in self.table.stacks)
        for pattern in self.table.buffers.split():
            yield from (pattern.replace("{}", str(i)) for i in range(deepest))

    def shortcuts(self) -> Iterator[Shortcut]:
        for stack in self.table.stacks:
            for line in stack.shortcuts.strip().splitlines():
                entry, source, _, target, branch = line.split()
                for i in range(stack.depth):
                    yield Shortcut(
                        entry.replace("{}", str(i)),
                        branch.replace("{}", str(i)),
                        self._resolve(source, stack, i),
                        self._resolve(target, stack, i),
                    )

    def _expand(self, text: str, stack: Stack | None) -> Iterator[_Row]:
        """The rows of a text; lines about blocks repeat block by block, in the order written."""
        block: list[tuple[str, str]] = []
        for line in [*text.strip().splitlines(), ""]:
            pattern, _, layout = line.strip().partition(" ")
            if "{}" in pattern:
                block.append((pattern, layout))
                continue
            for i in range(stack.depth if stack else 0):
                for one, its_layout in block:
                    yield from self._row(one, its_layout, stack, i)
            block = []
            if pattern and not pattern.startswith("#"):
                yield from self._row(pattern, layout, stack, 0)

    def _row(self, pattern: str, text: str, stack: Stack | None, i: int) -> Iterator[_Row]:
        layout = parse(text.strip()).rename(lambda name: self._resolve(name, stack, i))
        optional = pattern.endswith("?")
        name = pattern.removesuffix("?").replace("{}", str(i))
        if not name.endswith(".*"):
            yield _Row(name, layout, pattern, optional)
            return
        bias = layout.part(layout.outputs) if layout.arrow else layout
        module = name.removesuffix("*")
        yield _Row(f"{module}weight", layout, f"{pattern} (weight)", optional)
        yield _Row(f"{module}bias", bias, f"{pattern} (bias)", optional=True)

    def point(self, name: str) -> str:
        """The id of an axis named from outside any stack, as ``vision.x@last`` or ``pool``."""
        return self._resolve(name, None, 0)

    def _resolve(self, name: str, stack: Stack | None, i: int) -> str:
        """The id of the space that a name means in block i of a stack."""
        base, _, at = name.partition("@")
        if "." in base:
            stack_name, base = base.split(".", 1)
            stack = self.stacks[stack_name]
        elif stack is None and len(self.stacks) == 1:
            (stack,) = self.stacks.values()
        if stack is not None and base in stack.points:
            block = {"": i, "next": i + 1, "first": 0, "last": stack.depth}[at]
            id = f"{stack.name}.{block}.{base}"
            self._note(Space(id, base, 0, Group.PERMUTATION, stream=stack.name))
            return self.same_point.get(id, id)
        axis = self._declaration(base, stack)
        prefix = {
            "layer": f"{stack.name}.{i}." if stack else "",
            "stack": f"{stack.name}." if stack else "",
            "model": "",
        }[axis.scope]
        self._note(
            Space(
                prefix + base,
                base,
                0,
                axis.group,
                parent=prefix + axis.within if axis.within else None,
                twin=prefix + axis.twin if axis.twin else None,
                why=axis.why,
            )
        )
        return prefix + base

    def _declaration(self, name: str, stack: Stack | None) -> Axis:
        for axis in (*(stack.axes if stack else ()), *self.table.axes):
            if axis.name == name:
                return axis
        raise ArchitectureError(
            f"the table uses an axis {name!r} that it does not declare",
            hint=f"add Axis({name!r}) to the table's axes, or correct the name",
        )

    def _note(self, spec: Space) -> None:
        self.specs.setdefault(spec.id, spec)

    def spec(self, id: str) -> Space:
        return self.specs[id]

    def space(self, id: str, size: int) -> Space:
        return replace(self.specs[id], size=size)

    def given_size(self, id: str) -> int | None:
        """A size that the configuration gives; shapes must agree with it."""
        stack = self.stacks.get(id.split(".", maxsplit=1)[0])
        axis = self.specs[id].axis
        if stack and axis in stack.sizes:
            return stack.sizes[axis]
        return self.table.sizes.get(axis)
