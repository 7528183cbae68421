"""Binding: match a table with the shapes of a checkpoint, and give every tensor its layout.

Every tensor must be claimed by exactly one row, every row that is not optional must find its tensor, and
all shapes must agree about the size of every axis. Whatever does not fit is refused, by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace

from transfusion.architecture.architecture import Architecture, Shortcut, Space
from transfusion.architecture.layouts import Layout, parse, solve_sizes
from transfusion.architecture.table import UNREAD, WRONG_FILE, Axis, Rows, Shapes, Stack, Symmetry, Table
from transfusion.errors import ArchitectureError, listing

_BLOCK = re.compile(r"\{(?:(?P<first>\d+)\+|(?P<kind>[a-z]\w*))?\}")
"""``{}``, the number of a block; ``{1+}``, the same from block 1 on; ``{kind}``, that of one kind."""


@dataclass(frozen=True)
class _Row:
    """One expected tensor: a row of the table, for one block."""

    name: str
    layout: Layout
    pattern: str
    optional: bool
    scale: bool = False
    head: bool = False
    unread: bool = False


def bind(table: Table, shapes: Shapes, family: str) -> Architecture:
    """Give every tensor its layout; refuse tensors that no row or two rows describe, and missing ones."""
    _refuse_nonsense(family, table, len(shapes))
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
    _refuse_misfits(family, rows, shapes, buffers)
    tensors = {name: row.layout for name, row in rows.items() if name in shapes}
    sizes = _sizes(family, tensors, shapes, reader)
    used = [id for layout in tensors.values() for id in _parents_first(layout, reader)]
    if absent := [id for id in dict.fromkeys(used) if id not in sizes]:
        raise ArchitectureError(
            f"{family}: {listing(absent)} has axes within it, and occurs in no tensor itself",
            hint="write it before those axes in the layouts, or declare them without 'in'",
        )
    spaces = {id: replace(reader.specs[id], size=sizes[id]) for id in used}
    return Architecture(
        family=family,
        spaces=spaces,
        tensors=tensors,
        task_heads=frozenset(name for name in tensors if rows[name].head),
        unread=frozenset(name for name in tensors if rows[name].unread),
        scales=frozenset(name for name in tensors if rows[name].scale),
        buffers=buffers,
        shortcuts=tuple(reader.shortcuts()),
        outputs={
            output: id
            for output, name in table.outputs.items()
            if (id := reader.point(name) if name else None) is None or id in spaces
        },
        unrotated=table.unrotated,
    )


def names_in(table: Table) -> frozenset[str]:
    """Return the names of all tensors that a table has a row for, whether or not a model has them."""
    return frozenset(row.name for row in _TableReader(table).rows())


def blocks_of(pattern: str, stack: Stack) -> frozenset[int]:
    """Return the numbers of the blocks that a row or a shortcut of a stack is about."""
    found = _BLOCK.search(pattern)
    if found is None or not (kind := found["kind"]):
        return frozenset(range(int(found["first"] or 0) if found else 0, stack.depth))
    if kind not in stack.kinds:
        raise ArchitectureError(
            f"the row {pattern} is about a kind of blocks that the stack {stack.name!r} does not have",
            hint=f"add {kind!r} to the stack's kinds, or correct the name",
        )
    return frozenset(stack.kinds[kind]) & frozenset(range(stack.depth))


def _refuse_nonsense(family: str, table: Table, tensors: int) -> None:
    """Refuse impossible sizes: below 1, or more blocks than tensors."""
    for stack in table.stacks:
        for name, size in {"the number of blocks": stack.depth, **stack.sizes, **table.sizes}.items():
            if not isinstance(size, int) or size < 1:
                raise ArchitectureError(
                    f"{family}: the configuration gives an impossible value: {name} = {size!r}",
                    hint=WRONG_FILE,
                )
        if stack.depth > tensors:
            raise ArchitectureError(
                f"{family}: the configuration has {stack.depth} blocks in '{stack.name}', but there are only"
                f" {tensors} tensor(s)",
                hint=WRONG_FILE,
            )


def _refuse_misfits(family: str, rows: Mapping[str, _Row], shapes: Shapes, buffers: Set[str]) -> None:
    """Refuse tensors that no row describes, and rows without their tensor."""
    if unclaimed := [name for name in shapes if name not in rows and name not in buffers]:
        raise ArchitectureError(
            f"{family}: {len(unclaimed)} tensor(s) that the table does not know: {listing(unclaimed)}",
            hint="the model has parts that this architecture's table does not describe, or config.json"
            " belongs to another model; nothing is moved that is not understood",
        )
    present = {row.pattern for name, row in rows.items() if name in shapes}
    absent = (row for name, row in rows.items() if name not in shapes)
    if missing := [row.name for row in absent if not row.optional or row.pattern in present]:
        raise ArchitectureError(
            f"{family}: {len(missing)} tensor(s) missing from the checkpoint: {listing(missing)}",
            hint="the download may be incomplete, or config.json belongs to another model",
        )


def _sizes(
    family: str, tensors: Mapping[str, Layout], shapes: Shapes, reader: _TableReader
) -> dict[str, int]:
    given = {id: reader.given_size(id) for layout in tensors.values() for id in layout.names()}
    sizes = {id: size for id, size in given.items() if size is not None}
    waiting = dict(tensors)
    while waiting:
        before = len(waiting)
        for name, layout in list(waiting.items()):
            sizes |= solve_sizes(layout, shapes[name], sizes, name)
            if sizes.keys() >= set(layout.names()):
                del waiting[name]
        if len(waiting) == before:
            name, layout = next(iter(waiting.items()))
            unknown = [id for id in layout.names() if id not in sizes]
            raise ArchitectureError(
                f"{family}: the sizes of {listing(unknown)} do not follow from any shape"
                f" (for instance {name}: '{layout}', {shapes[name]})",
                hint="give one of them in the table's sizes",
            )
    return sizes


def _parents_first(layout: Layout, reader: _TableReader) -> Iterator[str]:
    for id in layout.names():
        if parent := reader.specs[id].parent:
            yield parent
        yield id


class _TableReader:
    """Expands the text of a table: names of blocks filled in, axes replaced by ids of spaces."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.stacks = {stack.name: stack for stack in table.stacks}
        self.specs: dict[str, Space] = {}
        """Every space met so far, without its size."""
        self.streams = {name: name for name in self.stacks}
        """The stream of every stack: stacks that have a point in common are on one stream."""
        for one, other in table.unified:
            kept, joined = (self.streams.get(point.partition(".")[0], "") for point in (one, other))
            self.streams = {name: kept if own == joined else own for name, own in self.streams.items()}
        self.same_point: dict[str, str] = {}
        self.same_point = {self.point(later): self.point(first) for first, later in table.unified}
        for point, why in table.pinned.items():
            id = self.point(point)
            self.specs[id] = replace(self.specs[id], group=Symmetry.FIXED, why=why)

    def rows(self) -> Iterator[_Row]:
        for stack in self.table.stacks:
            yield from self._expand(stack.rows, stack)
        yield from self._expand(self.table.rows, None)
        for row in self._expand(self.table.heads, None):
            yield replace(row, optional=True, head=True)

    def buffers(self) -> Iterator[str]:
        deepest = max(stack.depth for stack in self.table.stacks)
        for pattern in self.table.buffers:
            yield from (pattern.replace("{}", str(i)) for i in range(deepest))

    def shortcuts(self) -> Iterator[Shortcut]:
        for stack in self.table.stacks:
            for entry, source, target, branch in stack.shortcuts.values():
                for i in blocks_of(entry, stack):
                    yield Shortcut(
                        _BLOCK.sub(str(i), entry),
                        _BLOCK.sub(str(i), branch),
                        self._resolve(source, stack, i),
                        self._resolve(target, stack, i),
                        stack.branch_factor,
                    )

    def _expand(self, rows: Rows, stack: Stack | None) -> Iterator[_Row]:
        """The rows of all blocks; rows about blocks repeat block by block, in the order written."""
        block: list[tuple[frozenset[int], str, str]] = []
        for pattern, layout in [*rows.items(), ("", "")]:
            if stack is not None and _BLOCK.search(pattern):
                block.append((blocks_of(pattern, stack), pattern, layout))
                continue
            for i in range(stack.depth if stack else 0):
                for having, one, its_layout in block:
                    if i in having:
                        yield from self._row(one, its_layout, stack, i)
            block = []
            if pattern:
                yield from self._row(pattern, layout, stack, 0)

    def _row(self, pattern: str, text: str, stack: Stack | None, i: int) -> Iterator[_Row]:
        read = text.removeprefix(UNREAD)
        marked = read.removeprefix("optional ")
        axes = marked.removeprefix("scale ")
        unread, optional, scale = read != text, marked != text, axes != marked
        layout = parse(axes).rename(lambda name: self._resolve(name, stack, i))
        if scale and (layout.arrow or len(layout.items) != 1):
            raise ArchitectureError(
                f"the table calls {pattern} a scale, but '{layout}' is not one dimension without an arrow",
                hint="a scale is a vector that multiplies the units of an axis; remove the word 'scale'",
            )
        name = _BLOCK.sub(str(i), pattern)
        if not name.endswith(".*"):
            yield _Row(name, layout, pattern, optional or unread, scale, unread=unread)
            return
        bias = layout.part(layout.outputs) if layout.arrow else layout
        module = name.removesuffix("*")
        weight = f"{pattern} (weight)"
        yield _Row(f"{module}weight", layout, weight, optional or unread, scale, unread=unread)
        yield _Row(f"{module}bias", bias, f"{pattern} (bias)", optional=True, unread=unread)

    def point(self, name: str) -> str:
        """The id of an axis named from outside any stack, as ``vision.x@last`` or ``pool``."""
        return self._resolve(name, None, 0)

    def _resolve(self, name: str, stack: Stack | None, i: int) -> str:
        """The id of the space that a name means in block i of a stack."""
        base, _, at = name.partition("@")
        if "." in base:
            stack_name, base = base.split(".", 1)
            stack = self.stacks[stack_name]
        elif stack is None and len(self.table.read_stacks) == 1:
            (stack,) = self.table.read_stacks
        places = {"": i, "next": i + 1, "first": 0, "last": stack.depth if stack else 0}
        block = places[at] if at in places else int(at)
        if stack is not None and base in stack.points:
            id = f"{stack.name}.{base}" if stack.one_space else f"{stack.name}.{block}.{base}"
            stream = self.streams[stack.name] if stack.residual else None
            self.specs.setdefault(id, Space(id, base, 0, Symmetry.PERMUTATION, stream=stream))
            return self.same_point.get(id, id)
        axis = self._declaration(base, stack)
        prefixes = {"layer": f"{stack.name}.{block}.", "stack": f"{stack.name}."} if stack else {}
        id = prefixes.get(axis.scope, "") + base
        if id not in self.specs:
            parent, tied_with = (
                self._resolve(other, stack, block) if other else None
                for other in (axis.within, axis.tied_with)
            )
            self.specs[id] = Space(id, base, 0, axis.group, parent, None, tied_with, axis.why)
        return id

    def _declaration(self, name: str, stack: Stack | None) -> Axis:
        for axis in (*(stack.axes if stack else ()), *self.table.axes):
            if axis.name == name:
                return axis
        raise ArchitectureError(
            f"the table uses an axis {name!r} that it does not declare",
            hint=f"add a line 'axis {name}', or correct the name",
        )

    def given_size(self, id: str) -> int | None:
        """A size that the configuration gives; shapes must agree with it."""
        stack = self.stacks.get(id.split(".", maxsplit=1)[0])
        axis = self.specs[id].axis
        if stack and axis in stack.sizes:
            return stack.sizes[axis]
        return self.table.sizes.get(axis)
