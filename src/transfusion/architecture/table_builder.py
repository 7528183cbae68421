"""The table of a family for one configuration and one set of tensors: runs its statements in order.

A later row, axis, size or shortcut replaces an earlier one of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from transfusion.architecture.expressions import Expression, Functions
from transfusion.architecture.family_text import VALUE_OF, Statement, with_word
from transfusion.architecture.naming import depth
from transfusion.architecture.table import ANGLES, Axis, Config, Draw, Family, Shapes, Stack, Symmetry, Table
from transfusion.errors import ArchitectureError

if TYPE_CHECKING:
    from transfusion.architecture.family_library import Library

TEXT = "text_config"
"""The section of a language model; files of some families have its settings outside of any section."""
BASE: Functions = {one.__name__: one for one in (len, range, bool, int, round, min, max, list, Draw)}
"""Functions that every text may call."""
OF_NAMES = ("has", "built_as", "depth", "shape", "find", "others")
"""The same, for functions that ask for the tensors of a model, or for the blocks of a stack."""
_GROUPS = {"axis": Symmetry.PERMUTATION, "fixed": Symmetry.FIXED}


@dataclass
class _Rows:
    """Rows by name, shortcuts by the point where they begin, and the other facts about a stack."""

    rows: dict[str, str] = field(default_factory=dict)
    skips: dict[tuple[str, ...], str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, frozenset[int]] = field(default_factory=dict)

    def text(self) -> str:
        return "\n".join(self.rows.values())


class TableBuilder:
    """Runs statements in order, and keeps what they say."""

    def __init__(
        self,
        library: Library,
        statements: Iterable[Statement],
        config: Config,
        names: frozenset[str],
        only: frozenset[str] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        self.library, self.config, self.names, self.only = library, config, names, only
        self.statements = list(statements)
        self.shapes = shapes or {}
        self.defaults = {
            key: value
            for one in with_word(self.statements, "defaults")
            if "name" not in one.parts
            for key, value in one.constants().items()
        }
        of_names = (self.has, self.built_as, self.depth, self.shape, self.find, self.others)
        self.functions: Functions = {
            **BASE,
            **library.functions,
            **dict(zip(OF_NAMES, of_names, strict=True)),
        }
        self.lets: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.draws: dict[str, Draw] = {}
        self.stacks: dict[str, _Rows] = {}
        self.outside, self.heads = _Rows(), _Rows()
        self.here = self.outside
        """Where rows go now."""
        self.axes: dict[str, Axis] = {}
        self.facts: dict[str, Any] = {"pinned": {}, "ties": {}, "outputs": {}, "unified": (), "buffers": ""}
        self.parts: list[Table] = []

    # values

    def lookup(self, name: str) -> Any:
        for known in (self.lets, self.here.sizes):
            if name in known:
                return known[name]
        if name in ("config", "shapes"):
            return getattr(self, name)
        try:
            return self.config[name]
        except KeyError:
            return self.defaults.get(name)

    def value(self, statement: Statement) -> Any:
        assert statement.value is not None
        return statement.value.value(self.lookup, self.functions)

    def required(self, expression: Expression | None) -> Any:
        assert expression is not None
        return expression.required(self.lookup, self.functions)

    def filled(self, text: str) -> str:
        """Put the values of names with ``$`` into a text."""
        return VALUE_OF.sub(lambda found: str(self.lookup(found[1] or found[2])), text)

    def has(self, *patterns: str) -> bool:
        return any(
            pattern in self.names
            or ("*" in pattern and any(fnmatchcase(name, pattern) for name in self.names))
            for pattern in map(self.filled, patterns)
        )

    def built_as(self, ending: str) -> bool:
        """Whether the configuration names a class that ends so."""
        return bool((self.config.get("architectures") or [""])[0].endswith(ending))

    def depth(self, pattern: str) -> int:
        return depth(self.names, self.filled(pattern))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[self.filled(name)]

    def find(self, name: str) -> tuple[int, ...] | None:
        return self.shapes.get(self.filled(name))

    def others(self, kind: str) -> frozenset[int]:
        return frozenset(range(self.here.facts["depth"])) - self.here.kinds[kind]

    # statements

    def run(self, statements: Iterable[Statement], prefix: str = "") -> None:
        taken = True
        for one in statements:
            if self.only is not None and one.word not in self.only:
                continue
            match one.word:
                case "let":
                    self.lets[one.name] = self.value(one)
                case "when" | "otherwise":
                    taken = not taken if one.word == "otherwise" else bool(self.value(one))
                    if taken:
                        self.run(one.block, prefix)
                case "for":
                    for item in self.value(one):
                        self.lets[one.name] = item
                        self.run(one.block, prefix)
                case "include":
                    self.run(self.library.fragment(one), prefix + one.parts.get("prefix", ""))
                case "heads" | "outside":
                    before, self.here = self.here, getattr(self, one.word)
                    self.run(one.block, prefix)
                    self.here = before
                case _:
                    if action := getattr(self, f"_{one.word}", None):
                        action(one, self.filled(prefix))

    def _row(self, one: Statement, prefix: str) -> None:
        name = prefix + self.filled(one.name)
        self.here.rows[name.removesuffix("?")] = f"{name}   {self.filled(one.parts['layout'])}".strip()

    def _without(self, one: Statement, prefix: str) -> None:
        for name in list(self.here.rows) if one.words == ["*"] else one.words:
            del self.here.rows[prefix + name]

    def _skip(self, one: Statement, prefix: str) -> None:
        entry, source, target, branch = (
            self.filled(one.parts[key]) for key in ("entry", "source", "target", "branch")
        )
        key = (source, *re.findall(r"\{.*?\}", prefix + entry))
        self.here.skips[key] = f"{prefix}{entry} {source} -> {target} {prefix}{branch}"

    def _stack(self, one: Statement, prefix: str) -> None:
        self.here = self.stacks.setdefault(self.filled(one.name), _Rows())
        self.here.facts["depth"] = self.required(one.value)

    def _one_space(self, one: Statement, prefix: str) -> None:
        self.here.facts["one_space"] = True

    def _separate_points(self, one: Statement, prefix: str) -> None:
        self.here.facts |= {"points": tuple(one.words), "residual": False}

    def _branch_factor(self, one: Statement, prefix: str) -> None:
        self.here.facts["branch_factor"] = self.required(one.value)

    def _kind(self, one: Statement, prefix: str) -> None:
        self.here.kinds[one.name] = frozenset(self.value(one))

    def _sizes(self, one: Statement, prefix: str) -> None:
        for axis, expression in one.assigned.items():
            self.here.sizes.pop(axis, None)
            if (size := self.required(expression)) is not None:
                self.here.sizes[axis] = size

    def _axis(self, one: Statement, prefix: str) -> None:
        name = self.filled(one.name)
        within, tied = (self.filled(one.parts.get(key, "")) or None for key in ("within", "tied_with"))
        scope = one.parts.get("scope", "model" if one.word == "fixed" else "layer")
        group = _GROUPS[one.word] if one.word in _GROUPS else Symmetry(one.word)
        why = one.parts.get("why", "" if one.word == "axis" else ANGLES)
        self.axes[name] = Axis(name, group, within, scope, tied, why)

    _fixed = _rotary = _interleaved = _axis

    def _buffers(self, one: Statement, prefix: str) -> None:
        self.facts["buffers"] += "".join(f" {prefix}{self.filled(name)}" for name in one.words)

    def _same(self, one: Statement, prefix: str) -> None:
        self.facts["unified"] += ((self.filled(one.parts["first"]), self.filled(one.parts["later"])),)

    def _pin(self, one: Statement, prefix: str) -> None:
        self.facts["pinned"][one.name] = one.parts["why"]

    def _permuted_only(self, one: Statement, prefix: str) -> None:
        self.facts["unrotated"] = one.parts["why"]

    def _tie(self, one: Statement, prefix: str) -> None:
        self.facts["ties"][one.name] = one.parts["first"]

    def _no_outputs(self, one: Statement, prefix: str) -> None:
        self.facts["outputs"] = {}

    def _output(self, one: Statement, prefix: str) -> None:
        point = self.filled(one.parts["point"])
        self.facts["outputs"][self.filled(one.name)] = None if point == "none" else point

    def _draw(self, one: Statement, prefix: str) -> None:
        self.draws[one.name] = self.value(one)

    def _set(self, one: Statement, prefix: str) -> None:
        self.settings[one.name] = self.value(one)

    def _refuse(self, one: Statement, prefix: str) -> None:
        hint = one.parts.get("hint", "there is no table for it")
        raise ArchitectureError(self.filled(one.parts["why"].strip()), hint=hint)

    # parts

    def add_part(self, family: Family, part: Statement) -> None:
        """Add the table of a part of a model, under the names that its tensors have in the whole."""
        component, section = family.components[part.name], self.config.get(part.name) or {}
        inner = section or (self.config if part.name == TEXT else {})
        kind = section.get("model_type", component.model_type)
        own = self.library.find(component, {"model_type": kind}, part.name)
        settings = {**own.class_defaults.get(kind, {}), **inner}
        settings |= {one.name: self.value(one) for one in with_word(part.block, "set")}
        if own.library == "":  # its keys are checked, and its tensors described with the whole
            return
        names = (
            name.removeprefix(component.prefix) for name in self.names if name.startswith(component.prefix)
        )
        table = placed_below(component.prefix, own.table(settings, frozenset(names)))
        stack = part.parts.get("stack")
        if stack and stack not in {one.name for one in table.stacks}:
            raise ArchitectureError(
                f"{family.name}: {part.name} describes a model that cannot be a part of it",
                hint="this composition has no table",
            )
        self.parts.append(table if len(table.stacks) > 1 else _qualified(table))
        self.lets[part.name] = settings

    # the table

    def table(self) -> Table:
        """Return what was said, as a table; the last part has the heads and the ties of the parts."""
        axes, last = tuple(self.axes.values()), self.parts[-1] if self.parts else Table(())
        texts = [*(part.rows for part in self.parts), self.outside.text()]
        for stack in self.stacks.values():
            stack.facts.setdefault("points", ("x", "y", "z"))
        own = (
            Stack(
                name,
                rows=stack.text(),
                axes=axes,
                sizes=stack.sizes,
                kinds=stack.kinds,
                shortcuts="\n".join(stack.skips.values()),
                **stack.facts,
            )
            for name, stack in self.stacks.items()
        )
        facts = self.facts
        return Table(
            stacks=(*(stack for part in self.parts for stack in part.stacks), *own),
            axes=(*axes, *(axis for part in self.parts for axis in part.axes if axis.name not in self.axes)),
            rows="\n".join(text for text in texts if text),
            heads="\n".join(text for text in (last.heads, self.heads.text()) if text),
            buffers=" ".join([*(part.buffers for part in self.parts), facts["buffers"]]).strip(),
            sizes={
                **{axis: size for part in self.parts for axis, size in part.sizes.items()},
                **self.outside.sizes,
            },
            unified=(*last.unified, *facts["unified"]),
            pinned=facts["pinned"],
            unrotated=facts.get("unrotated", ""),
            ties={**last.ties, **facts["ties"]},
            outputs=facts["outputs"] or last.outputs,
        )


def placed_below(prefix: str, table: Table) -> Table:
    """Return the same table, of modules that stand below ``prefix``. Task heads stay where they are."""

    def rows(text: str) -> str:
        return "\n".join(prefix + line.strip() for line in text.strip().splitlines())

    def ends(line: str) -> str:
        entry, *way, branch = line.split()
        return " ".join([prefix + entry, *way, prefix + branch])

    def placed(stack: Stack) -> Stack:
        shortcuts = "\n".join(ends(line) for line in stack.shortcuts.strip().splitlines())
        return replace(stack, rows=rows(stack.rows), shortcuts=shortcuts)

    return replace(
        table,
        stacks=tuple(map(placed, table.stacks)),
        rows=rows(table.rows),
        buffers=rows("\n".join(table.buffers.split())),
        ties={second: prefix + first for second, first in table.ties.items()},
    )


def _qualified(table: Table) -> Table:
    """Return a table of one stack whose points are named from outside."""
    (stack,) = table.stacks

    def point(name: str) -> str:
        return name if "." in name else f"{stack.name}.{name}"

    return replace(
        table,
        heads=table.heads.replace(" x@", f" {stack.name}.x@"),
        unified=tuple((point(one), point(other)) for one, other in table.unified),
    )
