"""Libraries of families: what the statements of `family_text` say about each family.

A family is the statements of its parent, then its own. Its table is worked out when a model is opened, by
`table_builder`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from transfusion.architecture.expressions import Functions
from transfusion.architecture.family_text import FUNCTIONS, Statement, everything, read_statements, with_word
from transfusion.architecture.table import Component, Config, Draw, Family, Shapes, Table
from transfusion.architecture.table_builder import BASE, OF_NAMES, TableBuilder
from transfusion.errors import ArchitectureError

_ONCE = ("prefixes", "inputs", "computed")
_FLAGS = ("tied_scale", "positions_after_padding", "whole_only")
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
    parents: dict[str, str] = field(default_factory=dict)

    def extended(self, functions: Functions) -> Library:
        """Return a library with the same contents, to which more may be added, and with more functions."""
        return Library(
            functions={**self.functions, **functions},
            find=self.find,
            fragments=dict(self.fragments),
            keys=dict(self.keys),
            made=dict(self.made),
            own=dict(self.own),
            parents=dict(self.parents),
        )

    def read(self, text: str, file: str) -> list[str]:
        """Add a text; return the names of its families."""
        known = {**BASE, **self.functions, **dict.fromkeys(OF_NAMES, len)}
        names: list[str] = []
        for one in read_statements(text, file, known):
            if one.word == "keys":
                self.keys[one.name] = frozenset(self._keys(one.block))
            elif one.word == "fragment":
                self.fragments[one.name] = one.block
            elif one.word == "family":
                if one.name in names:
                    raise ArchitectureError(
                        f"{one.place}: the family {one.name} is there already", hint="give it another name"
                    )
                names.append(one.name)
                self.own[one.name] = []
                self.made.pop(one.name, None)
                self.parents.pop(one.name, None)
                if parent := one.parts.get("parent"):
                    self.parents[one.name] = parent
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
        parent = self.parents.get(name)
        if parent is None:
            return self.own[name]
        if parent not in self.own or parent in (name, *children):
            reason = "which does not exist" if parent not in self.own else "which is like it"
            raise ArchitectureError(
                f"the family {name} is to be like {parent!r}, {reason}", hint="correct the name of its parent"
            )
        return [*self.statements(parent, (name, *children)), *self.own[name]]

    def _family(self, name: str) -> Family:
        own, whole = self.own[name], self.statements(name)
        last = {one.word: one for one in whole}
        required = {one.name: _values(one.parts["value"]) for one in whole if one.word == "requires"}
        more: dict[str, Any] = {word: tuple(last[word].words) for word in _ONCE if word in last}
        more |= {word: True for word in _FLAGS if word in last}
        called = {word: self.functions[last[word].name] for word in FUNCTIONS if word in last}
        more |= {word: called[word] for word in ("arrange", "complete", "from_shapes") if word in called}
        if "originals" in last:
            more["original"] = "\n".join(one.parts["words"] for one in last["originals"].block)
        if "original_names" in called:
            more["original"] = called["original_names"]()
        if "shapes" in last:
            more["from_shapes"] = partial(self._from_shapes, last["shapes"])
        if "draw" in {one.word for one in everything(whole)}:
            more["draws"] = partial(self._draws, name)
        if "frame" in last:
            more["frame"] = partial(self._frame, name, last["frame"])
        for one in own:
            if one.word == "fits":
                more["fits"] = partial(self._fits, one)
        return Family(
            name=name,
            library=last["library"].name if "library" in last else "",
            table=called["table"] if "table" in called else partial(self.table, name),
            signature=self._signature(name),
            model_types=tuple(word for one in own if one.word == "models" for word in one.words),
            components={one.name: self._component(one) for one in whole if one.word == "part"},
            aliases=tuple(
                _pair(one) for block in reversed(with_word(whole, "aliases")) for one in block.block
            ),
            known_keys=self._known(whole),
            required=required,
            class_defaults={
                one.name: one.constants() for one in whole if one.word == "defaults" and "name" in one.parts
            },
            **more,
        )

    def _signature(self, name: str) -> tuple[str, ...]:
        own = [one for one in self.own[name] if one.word == "signature"]
        more = [word for one in own for word in one.words]
        if own and "more" in own[0].parts:
            return (*self._signature(self.parents[name]), *more)
        return tuple(more)

    def _component(self, part: Statement) -> Component:
        kind = part.parts.get("kind", "")
        inner = self.family(kind) if kind in self.own and not with_word(self.own[kind], "models") else None
        return Component(
            prefix="" if part.parts["prefix"] == "-" else part.parts["prefix"],
            model_type="" if inner else kind,
            family=inner,
            known_keys=self._known(with_word(part.block, "ignores")),
            required={one.name: _values(one.parts["value"]) for one in with_word(part.block, "requires")},
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

    # what a family's functions do

    def table(self, name: str, config: Config, names: frozenset[str]) -> Table:
        """Return the table of a family for one configuration and one set of names."""
        builder = TableBuilder(self, self.statements(name), config, names)
        for part in with_word(builder.statements, "part"):
            builder.add_part(self.family(name), part)
        builder.run(builder.statements)
        return builder.table()

    def _draws(self, name: str, config: Config) -> dict[str, Draw]:
        builder = TableBuilder(self, self.statements(name), config, frozenset(), _DRAWING)
        builder.run(builder.statements)
        return builder.draws

    def _frame(self, name: str, frame: Statement, config: Config) -> tuple[int, int, int]:
        builder = TableBuilder(self, self.statements(name), config, frozenset())
        found: tuple[int, int, int] = builder.value(frame)
        return found

    def _fits(self, fits: Statement, shapes: Shapes) -> bool:
        return bool(TableBuilder(self, (), {}, frozenset(shapes), shapes=shapes).value(fits))

    def _from_shapes(self, block: Statement, shapes: Shapes) -> dict[str, Any]:
        builder = TableBuilder(self, (), {}, frozenset(shapes), shapes=shapes)
        builder.run(block.block)
        return builder.settings


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
