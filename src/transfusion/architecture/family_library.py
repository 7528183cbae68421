"""Libraries of families: what the statements of `family_text` say about each family, and about its table.

A family is the statements of its parent, then its own. `TableBuilder` runs them in order when a model is
opened, for one configuration and one set of tensors: a later row, axis, size or shortcut replaces an earlier
one of the same name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from transfusion.architecture.family_text import (
    VALUE_OF,
    Functions,
    Statement,
    everything,
    read_statements,
    with_word,
)
from transfusion.architecture.naming import depth
from transfusion.architecture.table import (
    ANGLES,
    UNREAD,
    Axis,
    Component,
    Config,
    Draw,
    Family,
    Rows,
    Shapes,
    Stack,
    Symmetry,
    Table,
    rows_of,
)
from transfusion.errors import ArchitectureError

_CONTENTS = ("fragments", "keys", "made", "own")
_ONCE = ("prefixes", "inputs", "computed")
GRID = {"rows": 2, "columns": 3, "frames": 2, "words": 5}
"""The patches and the tokens of text of inputs that are drawn, where nothing else is asked for."""
_FLAGS = ("tied_scale", "positions_after_padding", "whole_only", "repeats_block")
_DRAWING = frozenset({"draw", "let", "when", "otherwise", "for"})
FindFamily: TypeAlias = Callable[[Component, Config, str], Family]


@dataclass
class Library:
    """The families, fragments and lists of keys that texts define."""

    functions: Functions
    find: FindFamily
    """Returns the family of a part of a model."""
    fragments: dict[str, tuple[Statement, ...]] = field(default_factory=dict)
    keys: dict[str, frozenset[str]] = field(default_factory=dict)
    made: dict[str, Family] = field(default_factory=dict)
    own: dict[str, list[Statement]] = field(default_factory=dict)
    """The statements of each family, the first of which names it and its parent."""

    def extended(self) -> Library:
        """Return a library with the same contents, to which more may be added."""
        copies: dict[str, Any] = {name: dict(getattr(self, name)) for name in _CONTENTS}
        return replace(self, **copies)

    def read(self, text: str, file: str) -> list[str]:
        """Add a text; return the names of its families."""
        known = {**BASE, **self.functions, **dict.fromkeys(OF_NAMES, len)}
        names: list[str] = []
        for one in read_statements(text, file, known):
            if one.word == "keys":
                self.keys[one.name] = frozenset(self._keys(one.block))
            elif one.word == "fragment":
                if self.fragments.get(one.name, one.block) != one.block:  # the first one's users would change
                    raise ArchitectureError(
                        f"{one.place}: the fragment {one.name} is there already", hint="give it another name"
                    )
                self.fragments[one.name] = one.block
            elif one.word == "family":
                if one.name in names:
                    raise ArchitectureError(
                        f"{one.place}: the family {one.name} is there already", hint="give it another name"
                    )
                names.append(one.name)
                self.own[one.name] = [one]
                self.made.pop(one.name, None)
            elif names:
                self.own[names[-1]].append(one)
            else:
                raise ArchitectureError(
                    f"{one.place}: expected 'family NAME' before any other line",
                    hint="docs/your-own.md describes the text of a family",
                )
        return names

    def families(self, names: Iterable[str]) -> tuple[Family, ...]:
        """Return those of these families that stand for models; others are only parents or parts."""
        return tuple(family for name in names if (family := self.family(name)).model_types)

    def family(self, name: str) -> Family:
        """Return a family by its name."""
        if name not in self.made:
            self.made[name] = self._family(name)
        return self.made[name]

    def statements(self, name: str, children: tuple[str, ...] = ()) -> list[Statement]:
        """Return the statements of a family, those of its parents first."""
        first, *own = self.own[name]
        if (parent := first.parts.get("parent")) is None:
            return own
        if parent not in self.own or parent in (name, *children):
            reason = "which does not exist" if parent not in self.own else "which is like it"
            raise ArchitectureError(
                f"the family {name} is to be like {parent!r}, {reason}", hint="correct the name of its parent"
            )
        return [*self.statements(parent, (name, *children)), *own]

    def _family(self, name: str) -> Family:
        own, whole = self.own[name], self.statements(name)
        last = {one.word: one for one in whole}
        called = {word: self.functions[f] for word, one in last.items() if (f := one.parts.get("function"))}
        more: dict[str, Any] = {word: tuple(last[word].words) for word in _ONCE if word in last}
        more |= {word: True for word in _FLAGS if word in last}
        more |= {"denoises": last["denoises"].name} if "denoises" in last else {}
        more |= {word: called[word] for word in ("arrange", "complete", "from_shapes") if word in called}
        if originals := [line for one in with_word(whole, "originals") for line in one.block]:
            more["original"] = "\n".join(one.parts["words"] for one in originals)
        elif "original_names" in called:
            more["original"] = called["original_names"]()

        def table(config: Config, names: frozenset[str]) -> Table:
            builder = TableBuilder(self, whole, config, names)
            for part in with_word(whole, "part"):
                builder.add_part(self.family(name), part)
            builder.run(whole)
            return builder.table()

        def draws(config: Config, grid: Mapping[str, int] = GRID) -> dict[str, Draw]:
            builder = TableBuilder(self, whole, config, frozenset(), _DRAWING)
            builder.sizes_of_inputs = grid
            builder.run(whole)
            return builder.draws

        def frame(config: Config) -> tuple[int, int, int]:
            found: tuple[int, int, int] = TableBuilder(self, whole, config, frozenset()).value(last["frame"])
            return found

        def fits(shapes: Shapes) -> bool:
            builder = TableBuilder(self, (), {}, frozenset(shapes), shapes=shapes)
            return all(builder.value(one) for one in with_word(own, "fits"))

        def from_shapes(shapes: Shapes) -> dict[str, Any]:
            builder = TableBuilder(self, (), {}, frozenset(shapes), shapes=shapes)
            for one in with_word(whole, "shapes"):
                builder.run(one.block)
            return builder.settings

        said = {one.word for one in everything(whole)}
        more |= {word: made for word, made in (("frame", frame), ("fits", fits)) if word in last}
        more |= {"draws": draws} if "draw" in said else {}
        more |= {"from_shapes": from_shapes} if "shapes" in last else {}
        return Family(
            name=name,
            library=last["library"].name if "library" in last else "",
            kin=last["kin"].name if "kin" in last else "",
            table=table,
            signature=self._signature(name),
            model_types=tuple(word for one in with_word(own, "models") for word in one.words),
            components={one.name: self._component(one) for one in with_word(whole, "part")},
            aliases=tuple(
                _pair(one) for block in reversed(with_word(whole, "aliases")) for one in block.block
            ),
            known_keys=self._known(whole),
            required=_required(whole),
            class_defaults={
                one.name: one.constants() for one in with_word(whole, "defaults") if "name" in one.parts
            },
            **more,
        )

    def _signature(self, name: str) -> tuple[str, ...]:
        own = with_word(self.own[name], "signature")
        more = tuple(word for one in own for word in one.words)
        if own and "plus" in own[0].parts:
            return (*self._signature(self.own[name][0].parts["parent"]), *more)
        return more

    def _component(self, part: Statement) -> Component:
        kind = part.parts.get("kind", "")
        inner = self.family(kind) if kind in self.own and not with_word(self.own[kind], "models") else None
        return Component(
            prefix="" if part.parts["prefix"] == "-" else part.parts["prefix"],
            model_type="" if inner else kind,
            family=inner,
            known_keys=self._known(with_word(part.block, "ignores")),
            required=_required(part.block),
            whole="whole" in part.parts,
        )

    def _keys(self, lines: Iterable[Statement]) -> Iterator[str]:
        for line in lines:
            for word in line.words:
                if not word.startswith("@"):
                    yield word
                elif word[1:] in self.keys:
                    yield from self.keys[word[1:]]
                else:
                    raise ArchitectureError(
                        f"{line.place}: there is no list of keys {word[1:]!r}",
                        hint=f"known are {', '.join(sorted(self.keys))}",
                    )

    def _known(self, statements: Iterable[Statement]) -> frozenset[str]:
        """The keys that a family ignores, and those that its expressions read."""
        whole = list(self._everything(statements))
        parts = {one.name for one in with_word(whole, "part")}
        keys = {
            key for one in with_word(whole, "defaults") for key in one.assigned if "name" not in one.parts
        }
        for said in (each for one in whole if one.word != "part" for each in one.expressions()):
            keys |= said.names if parts else said.keys  # keys of parts are known to their own families
        own = parts | {one.name for one in whole if one.word in ("let", "for")} | {"config", "shapes"}
        own |= {axis for one in with_word(whole, "sizes") for axis in one.assigned}
        return frozenset(keys - own) | frozenset(self._keys(with_word(whole, "ignores")))

    def _everything(self, statements: Iterable[Statement]) -> Iterator[Statement]:
        for one in everything(statements):
            yield one
            if one.word == "include":
                yield from self._everything(self.fragment(one))

    def fragment(self, include: Statement) -> tuple[Statement, ...]:
        """Return the lines of a fragment."""
        if include.name not in self.fragments:
            raise ArchitectureError(
                f"{include.place}: there is no fragment {include.name!r}",
                hint=f"known are {', '.join(sorted(self.fragments))}",
            )
        return self.fragments[include.name]


def _required(statements: Iterable[Statement]) -> dict[str, tuple[Any, ...]]:
    """Return the keys that must have one of some values."""
    return {one.name: _values(one.parts["values"]) for one in with_word(statements, "requires")}


def _pair(line: Statement) -> tuple[str, str]:
    if len(line.words) != 2:
        raise ArchitectureError(
            f"{line.place}: expected 'OTHER  OURS', found '{line.parts['words']}'",
            hint="an alias is two names of a module",
        )
    other, ours = line.words
    return other, ours


def _values(text: str) -> tuple[Any, ...]:
    def one(word: str) -> Any:
        try:
            return json.loads(word)
        except ValueError:
            return word

    return tuple(one(word.strip()) for word in text.split("|"))


# ── tables ────────────────────────────────────────────────────────────────────────────────

TEXT = "text_config"
"""The section of a language model; files of some families have its settings outside of any section."""
STREAM = "last_hidden_state"
"""The output in which a whole model gives its stream; rows of others read ``encoder.last_hidden_state``."""
BASE: Functions = {one.__name__: one for one in (len, range, bool, int, round, min, max, list, Draw)}
"""Functions that every text may call."""
OF_NAMES = ("has", "built_as", "depth", "shape", "find", "others", "grid")
"""The same, for methods of `TableBuilder`: they ask for a model's tensors, for the blocks of a stack, or
for the sizes of what is drawn."""
_GROUPS = {"axis": Symmetry.PERMUTATION, "fixed": Symmetry.FIXED}


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
        """``only`` are the words of statements that count; None for all."""
        self.library, self.config, self.names, self.only = library, config, names, only
        self.statements = list(statements)
        self.shapes = shapes or {}
        self.defaults = {
            key: value
            for one in with_word(self.statements, "defaults")
            if "name" not in one.parts
            for key, value in one.constants().items()
        }
        own = {name: getattr(self, name) for name in OF_NAMES}
        self.functions: Functions = {**BASE, **library.functions, **own}
        self.lets: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.draws: dict[str, Draw] = {}
        self.sizes_of_inputs: Mapping[str, int] = GRID
        self.axes: dict[str, Axis] = {}
        self.stacks: dict[str, Stack] = {}
        self.outputs: dict[str, str | None] = {}
        self.made = made = Table()
        """The table so far: that of the parts, and what statements say outside of stacks."""
        self.outside = Stack("outside", 1, made.rows, sizes=made.sizes)
        self.heads = Stack("heads", 1, made.heads)
        self.here = self.outside
        """Where rows go now."""
        self.mark = ""
        """What stands before their layouts."""

    # what expressions ask for

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

    def required(self, statement: Statement) -> Any:
        assert statement.value is not None
        return statement.value.required(self.lookup, self.functions)

    def filled(self, text: str) -> str:
        """Put the values of names with ``$`` into a text."""
        return VALUE_OF.sub(lambda found: str(self.lookup(found[1] or found[2])), text)

    def grid(self, what: str) -> int:
        """Return the number of rows, columns or frames of patches, or of words, that inputs have."""
        return self.sizes_of_inputs[what]

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
        return frozenset(range(self.here.depth)) - frozenset(self.here.kinds[kind])

    # statements

    def run(self, statements: Iterable[Statement], prefix: str = "") -> None:
        """Run statements about modules that stand below ``prefix``."""
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
                case "unread":
                    self.mark = UNREAD
                    self.run(one.block, prefix)
                    self.mark = ""
                case _:
                    parts = {key: self.filled(text) for key, text in one.parts.items()}
                    self._note(one, parts, self.filled(prefix))

    def _note(self, one: Statement, parts: dict[str, str], prefix: str) -> None:
        """Keep what a line says; ``parts`` are its parts with values in the place of ``$name``."""
        here, name = self.here, parts.get("name", "")
        match one.word:
            case "row":
                name = name.removesuffix("?") if self.mark else name  # all that is unread may be absent
                here.rows |= rows_of(f"{prefix}{name} {self.mark}{parts['layout']}")
            case "without":
                for row in list(here.rows) if one.words == ["*"] else one.words:
                    del here.rows[prefix + row]
            case "skip":
                entry, branch = prefix + parts["entry"], prefix + parts["branch"]
                key = (parts["source"], *re.findall(r"\{.*?\}", entry))
                here.shortcuts[key] = entry, parts["source"], parts["target"], branch
            case "stack":
                self.here = self.stacks.setdefault(name, Stack(name, 0))
                self.here.depth = self.required(one)
            case "one_space":
                here.one_space = True
            case "separate_points":
                here.points, here.residual = tuple(one.words), False
            case "branch_factor":
                here.branch_factor = self.required(one)
            case "kind":
                here.kinds[name] = frozenset(self.value(one))
            case "sizes":
                for axis, expression in one.assigned.items():
                    here.sizes.pop(axis, None)
                    if (size := expression.required(self.lookup, self.functions)) is not None:
                        here.sizes[axis] = size
            case "axis" | "fixed" | "rotary" | "interleaved":
                group = _GROUPS[one.word] if one.word in _GROUPS else Symmetry(one.word)
                scope = parts.get("scope", "model" if one.word == "fixed" else "layer")
                why = parts.get("why", "" if one.word == "axis" else ANGLES)
                within, tied_with = parts.get("within"), parts.get("tied_with")
                self.axes[name] = Axis(name, group, within, scope, tied_with, why)
            case "buffers":
                self.made.buffers += [prefix + word for word in parts["words"].split()]
            case "same":
                self.made.unified.append((parts["first"], parts["later"]))
            case "pin":
                self.made.pinned[name] = parts["why"]
            case "permuted_only":
                self.made.unrotated = parts["why"]
            case "tie":
                self.made.ties[name] = parts["first"]
            case "no_outputs":
                self.outputs = {}
            case "output":
                self.outputs[name] = None if parts["point"] == "none" else parts["point"]
            case "draw":
                self.draws[name] = self.value(one)
            case "set":
                self.settings[name] = self.value(one)
            case "refuse":
                raise ArchitectureError(parts["why"], hint=parts.get("hint", "there is no table for it"))

    # parts

    def add_part(self, family: Family, part: Statement) -> None:
        """Add the table of a part of a model, under the names that its tensors have in the whole."""
        component, section = family.components[part.name], self.config.get(part.name) or {}
        if "optional" in part.parts and not section:
            self.lets[part.name] = None
            return
        inner = section or (self.config if part.name == TEXT else {})
        kind = section.get("model_type", component.model_type)
        own = self.library.find(component, {"model_type": kind}, part.name)
        settings = {**own.class_defaults.get(kind, {}), **inner}
        settings |= {one.name: self.value(one) for one in with_word(part.block, "set")}
        if own.library == "":  # its keys are checked, and its tensors described with the whole
            return
        below = component.prefix
        names = frozenset(name.removeprefix(below) for name in self.names if name.startswith(below))
        table = own.table(settings, names)
        if component.whole:
            last = part.name == list(family.components)[-1]
            table = whole_below(below, part.name, table, mark="" if last else f"{part.name}_")
        else:
            table = placed_below(below, table)
        stack, stacks = part.parts.get("stack"), {one.name for one in table.stacks}
        if (stack and stack not in stacks) or stacks & {one.name for one in self.made.stacks}:
            raise ArchitectureError(
                f"{family.name}: {part.name} describes a model that cannot be a part of it",
                hint="this composition has no table",
            )
        made = self.made
        if component.whole:
            self.heads.rows |= table.heads
            made.pinned |= table.pinned
            made.unrotated = made.unrotated or table.unrotated
            table.unified, table.ties = made.unified + table.unified, {**made.ties, **table.ties}
            settings |= {name: point for name, point in table.outputs.items() if name == STREAM}
            table.outputs, table.heads = {}, self.heads.rows
        table = table if len(table.read_stacks) > 1 else _qualified(table)
        made.stacks += table.stacks
        made.axes += table.axes
        made.buffers += table.buffers
        made.rows |= table.rows
        made.sizes |= table.sizes
        made.unified, made.ties, made.outputs = list(table.unified), dict(table.ties), table.outputs
        self.heads.rows = made.heads = dict(table.heads)  # the last part is the one with heads
        self.lets[part.name] = settings

    # the table

    def table(self) -> Table:
        """Return what was said, as a table; the last part has the heads and the ties of the parts."""
        axes, made = tuple(self.axes.values()), self.made
        for stack in self.stacks.values():
            stack.axes = axes
        return replace(
            made,
            stacks=[*made.stacks, *self.stacks.values()],
            axes=[*axes, *(axis for axis in made.axes if axis.name not in self.axes)],
            outputs=self.outputs or made.outputs,
        )


def placed_below(prefix: str, table: Table) -> Table:
    """Return the same table, of modules that stand below ``prefix``.

    Task heads stay where they are, and so do modules that the library leaves unread.
    """

    def below(rows: Rows) -> Rows:
        return {prefix + name: layout for name, layout in rows.items()}

    def placed(stack: Stack) -> Stack:
        if not stack.is_read:
            return stack
        shortcuts = {
            key: (prefix + entry, source, target, prefix + branch)
            for key, (entry, source, target, branch) in stack.shortcuts.items()
        }
        return replace(stack, rows=below(stack.rows), shortcuts=shortcuts)

    return replace(
        table,
        stacks=list(map(placed, table.stacks)),
        rows=below(table.rows),
        buffers=[prefix + name for name in table.buffers],
        ties={second: prefix + first for second, first in table.ties.items()},
    )


def whole_below(prefix: str, name: str, table: Table, *, mark: str = "") -> Table:
    """Return the table of a whole model that stands below ``prefix``, with its heads.

    Its stack ``layer`` is called ``name``. ``mark`` stands before the axes that the model has once, so that
    another part may have one of that name, such as a vocabulary of its own.
    """
    table = placed_below(prefix, _qualified(table) if len(table.read_stacks) == 1 else table)
    once = {axis.name: mark + axis.name for axis in table.axes if axis.scope == "model"}
    stacks = {stack.name: name if stack.name == "layer" else stack.name for stack in table.stacks}
    words = re.compile(r"(?<![\w.@])(\w+)(?![\w@])(\.?)")

    def renamed(text: str) -> str:
        return words.sub(
            lambda found: (stacks if found[2] else once).get(found[1], found[1]) + found[2], text
        )

    def rows(given: Rows, below: str = "") -> Rows:
        return {below + key: renamed(layout) for key, layout in given.items()}

    def sizes(given: Mapping[str, int]) -> dict[str, int]:
        return {renamed(axis): size for axis, size in given.items()}

    def axes(given: Iterable[Axis]) -> list[Axis]:
        return [
            replace(
                axis,
                name=renamed(axis.name),
                within=axis.within and renamed(axis.within),
                tied_with=axis.tied_with and renamed(axis.tied_with),
            )
            for axis in given
        ]

    return replace(
        table,
        stacks=[
            replace(
                stack,
                name=stacks[stack.name],
                rows=rows(stack.rows),
                axes=tuple(axes(stack.axes)),
                sizes=sizes(stack.sizes),
            )
            for stack in table.stacks
        ],
        axes=axes(table.axes),
        rows=rows(table.rows),
        heads=rows(table.heads, prefix),
        sizes=sizes(table.sizes),
        unified=[(renamed(one), renamed(other)) for one, other in table.unified],
        pinned={renamed(point): why for point, why in table.pinned.items()},
        outputs={output: point and renamed(point) for output, point in table.outputs.items()},
        ties={prefix + second: first for second, first in table.ties.items()},
    )


def _qualified(table: Table) -> Table:
    """Return a table of one stack whose points are named from outside."""
    (stack,) = table.read_stacks

    def point(name: str) -> str:
        return name if "." in name else f"{stack.name}.{name}"

    heads = {name: re.sub(r"(?<!\S)x@", f"{stack.name}.x@", layout) for name, layout in table.heads.items()}
    return replace(
        table,
        heads=heads,
        unified=[(point(one), point(other)) for one, other in table.unified],
        pinned={point(name): why for name, why in table.pinned.items()},
        outputs={
            output: point(name) if name and "@" in name else name for output, name in table.outputs.items()
        },
    )
