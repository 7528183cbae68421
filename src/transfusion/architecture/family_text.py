"""Families as text: reads the lines of a ``.family`` file into statements, and refuses what it cannot read.

One statement per line; indented lines belong to the line above them. A line that begins with none of the
words in `FORMS` is a row, ``tensor  layout``. ``# …`` is a comment, ``a.{q,k}.b`` two rows, ``$name`` or
``${name}`` the value of a ``let``, and a line that ends in a backslash goes on in the next one.
`family_library` says what statements mean.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from transfusion.architecture.expressions import Expression, Functions
from transfusion.architecture.layouts import parse
from transfusion.errors import ArchitectureError, LayoutError

_NAME, _WORDS = r"(?P<name>[\w.@{}-]+)", r"(?P<words>.+)"
_VALUE = r"(?P<value>.+)"
_AXIS = (
    r"(?P<name>[\w${}]+)(?:\s+in\s+(?P<within>[\w${}]+))?(?:\s+with\s+(?P<tied_with>[\w${}]+))?"
    r"(?:\s+per\s+(?P<scope>layer|stack|model))?"
)
_REASON = r"\s*:\s*(?P<why>.+)"

FORMS: dict[str, tuple[str, str]] = {
    "family": ("family NAME : PARENT", r"(?P<name>[\w.-]+)(?:\s*:\s*(?P<parent>[\w.-]+))?"),
    "fragment": ("fragment NAME", _NAME),
    "keys": ("keys NAME", _NAME),
    # how a model of the family is recognised, named and run
    "library": ("library NAME", _NAME),
    "models": ("models NAME …", _WORDS),
    "signature": ("signature TENSOR …, or signature + TENSOR …", r"(?P<more>\+\s+)?" + _WORDS),
    "prefixes": ("prefixes PREFIX …", _WORDS),
    "inputs": ("inputs KIND …", _WORDS),
    "computed": ("computed TENSOR …", _WORDS),
    "tied_scale": ("tied_scale", ""),
    "positions_after_padding": ("positions_after_padding", ""),
    "whole_only": ("whole_only", ""),
    "ignores": ("ignores KEY …, where @NAME stands for a list of keys", _WORDS),
    "requires": ("requires KEY VALUE | VALUE …", r"(?P<name>\S+)\s+" + _VALUE),
    "defaults": ("defaults KEY = VALUE, …", r"(?:of\s+(?P<name>[\w-]+)\s*:\s*)?" + _VALUE),
    "aliases": ("aliases", ""),
    "originals": ("originals", ""),
    "part": (
        "part SECTION PREFIX KIND as STACK",
        r"(?P<name>\w+)\s+(?P<prefix>\S+)(?:\s+(?!as\s)(?P<kind>\S+))?(?:\s+as\s+(?P<stack>\w+))?",
    ),
    "set": ("set KEY = EXPRESSION", r"(?P<name>\w+)\s*=\s*" + _VALUE),
    "fits": ("fits EXPRESSION", _VALUE),
    "shapes": ("shapes", ""),
    "draw": ("draw INPUT = EXPRESSION", r"(?P<name>\w+)\s*=\s*" + _VALUE),
    "frame": ("frame EXPRESSION", _VALUE),
    "arrange": ("arrange FUNCTION", _NAME),
    "complete": ("complete FUNCTION", _NAME),
    "from_shapes": ("from_shapes FUNCTION", _NAME),
    "original_names": ("original_names FUNCTION", _NAME),
    "table": ("table FUNCTION", _NAME),
    # what decides
    "let": ("let NAME = EXPRESSION", r"(?P<name>\w+)\s*=\s*" + _VALUE),
    "when": ("when EXPRESSION", _VALUE),
    "otherwise": ("otherwise", ""),
    "for": ("for NAME in EXPRESSION", r"(?P<name>\w+)\s+in\s+" + _VALUE),
    "refuse": ("refuse REASON; HINT", r"(?P<why>[^;]+)(?:;\s*(?P<hint>.+))?"),
    # the table
    "stack": ("stack NAME DEPTH", r"(?P<name>[\w$]+)\s+" + _VALUE),
    "one_space": ("one_space", ""),
    "separate_points": ("separate_points POINT …", _WORDS),
    "branch_factor": ("branch_factor EXPRESSION", _VALUE),
    "kind": ("kind NAME = EXPRESSION", r"(?P<name>\w+)\s*=\s*" + _VALUE),
    "axis": ("axis NAME in AXIS with AXIS per layer|stack|model", _AXIS),
    "fixed": ("fixed NAME in AXIS per layer|stack|model: REASON", _AXIS + _REASON),
    "rotary": ("rotary NAME in AXIS", _AXIS),
    "interleaved": ("interleaved NAME in AXIS", _AXIS),
    "sizes": ("sizes AXIS = EXPRESSION, …", _VALUE),
    "skip": (
        "skip ENTRY  POINT -> POINT  BRANCH",
        r"(?P<entry>\S+)\s+(?P<source>\S+)\s*->\s*(?P<target>\S+)\s+(?P<branch>\S+)",
    ),
    "without": ("without ROW …", _WORDS),
    "heads": ("heads", ""),
    "outside": ("outside", ""),
    "buffers": ("buffers TENSOR …", _WORDS),
    "same": ("same POINT POINT", r"(?P<first>\S+)\s+(?P<later>\S+)"),
    "pin": ("pin POINT: REASON", r"(?P<name>[\w.@]+)" + _REASON),
    "permuted_only": ("permuted_only: REASON", r"\s*:\s*(?P<why>.+)"),
    "no_outputs": ("no_outputs", ""),
    "tie": ("tie TENSOR = TENSOR", r"(?P<name>\S+)\s*=\s*(?P<first>\S+)"),
    "output": ("output NAME = AXIS, or none", r"(?P<name>\S+)\s*=\s*(?P<point>\S+)"),
}
"""Each word that may begin a line: what a line with it looks like, and how the rest is read."""
_BLOCKS = frozenset(
    {
        "fragment",
        "keys",
        "aliases",
        "originals",
        "part",
        "shapes",
        "when",
        "otherwise",
        "for",
        "heads",
        "outside",
    }
)
"""Words below which lines are indented."""
_TOP = frozenset({"family", "fragment", "keys"})
FUNCTIONS = frozenset({"arrange", "complete", "from_shapes", "original_names", "table"})
"""Words followed by the name of a function."""
_ASSIGNMENTS = frozenset({"sizes", "defaults"})
VALUE_OF = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
"""``$name`` or ``${name}``: the value of a ``let``."""
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True)
class Statement:
    """One line of a family's text."""

    word: str
    parts: dict[str, str]
    place: str
    """The file and the line."""
    value: Expression | None = None
    assigned: dict[str, Expression] = field(default_factory=dict)
    block: tuple[Statement, ...] = ()

    @property
    def name(self) -> str:
        return self.parts["name"]

    @property
    def words(self) -> list[str]:
        return self.parts["words"].split()

    def constants(self) -> dict[str, Any]:
        """The values of ``NAME = VALUE, …``."""

        def unknown(name: str) -> Any:
            _refuse(self.place, f"{name} is not a value: write a number, True or False")

        return {key: value.value(unknown, {}) for key, value in self.assigned.items()}

    def expressions(self) -> Iterator[Expression]:
        """Every expression in it, and in its block."""
        if self.value is not None:
            yield self.value
        yield from self.assigned.values()
        for one in self.block:
            yield from one.expressions()


@dataclass(frozen=True)
class _Line:
    text: str
    depth: int
    place: str


def read_statements(text: str, file: str, functions: Functions) -> tuple[Statement, ...]:
    """Return the statements of a text; an error names the file, the line and what was expected."""
    lines = list(_lines(text, file))
    return _block(lines, -1, functions, "")[0]


def _lines(text: str, file: str) -> Iterator[_Line]:
    begun, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s\s+)# .*$|^\s*#$", "", raw.expandtabs(4)).rstrip()
        if not begun:
            start = number
        begun = f"{begun} {line.strip()}" if begun else line
        if begun.endswith("\\"):
            begun = begun.removesuffix("\\").rstrip()
            continue
        if begun.strip():
            yield _Line(begun.strip(), len(begun) - len(begun.lstrip()), f"{file}, line {start}")
        begun = ""


def _block(
    lines: list[_Line], above: int, functions: Functions, inside: str
) -> tuple[tuple[Statement, ...], list[_Line]]:
    """Read lines that are indented more than ``above``; return their statements, and the other lines."""
    found: list[Statement] = []
    seen: dict[str, str] = {}
    depth = lines[0].depth if lines else 0
    while lines and lines[0].depth > above:
        line, lines = lines[0], lines[1:]
        if line.depth != depth:
            _refuse(line.place, f"'{line.text}' is indented by {line.depth}, the lines around it by {depth}")
        word = re.match(r"\w*", line.text)[0]  # type: ignore[index]
        below: tuple[Statement, ...] = ()
        if lines and lines[0].depth > line.depth and word in _BLOCKS:
            below, lines = _block(lines, line.depth, functions, word)
        for statement in _statements(line, word, functions, inside, below):
            if statement.word in ("stack", "family"):
                seen = {}
            if statement.word == "row" and (twice := seen.get(statement.name)):
                _refuse(line.place, f"the row {statement.name} stands here twice, first in {twice}")
            if statement.word == "row":
                seen[statement.name] = line.place
            if statement.word == "otherwise" and (not found or found[-1].word != "when"):
                _refuse(line.place, "'otherwise' without a 'when' directly before it")
            found.append(statement)
    return tuple(found), lines


def _statements(
    line: _Line, word: str, functions: Functions, inside: str, below: tuple[Statement, ...]
) -> Iterator[Statement]:
    """The statement of a line; several, if its name has alternatives."""
    if inside in ("aliases", "originals", "keys"):
        yield Statement("line", {"words": line.text}, line.place)
    elif inside == "shapes" and word != "let":
        yield _formed(line, "set", functions, below, line.text)
    elif line.text.startswith("@"):
        found = re.fullmatch(r"@(?P<name>\w+)(?:\s+below\s+(?P<prefix>\S+))?", line.text)
        if found is None:
            _refuse(line.place, f"expected '@FRAGMENT below PREFIX', found '{line.text}'")
        yield Statement("include", _given(found), line.place)
    elif word in FORMS and re.match(rf"{word}(\s|:|$)", line.text):
        if word in _TOP and line.depth:
            _refuse(line.place, f"'{word}' begins at the margin")
        yield _formed(line, word, functions, below, line.text[len(word) :])
    else:
        pattern, _, layout = line.text.partition(" ")
        for name in _alternatives(pattern):
            yield _row(name, layout.strip(), line)


def _formed(
    line: _Line, word: str, functions: Functions, below: tuple[Statement, ...], rest: str
) -> Statement:
    form, regex = FORMS[word]
    found = re.fullmatch(regex, rest.strip())
    if found is None or (word in _BLOCKS - {"part"} and not below):
        wanted = f"'{form}'" + (" with indented lines below it" if found else "")
        _refuse(line.place, f"expected {wanted}, found '{line.text}'")
    parts, value, assigned = _given(found), None, {}
    try:
        if word in _ASSIGNMENTS:
            assigned = _assignments(parts["value"], functions)
        elif "value" in parts and word != "requires":
            value = Expression.parse(parts["value"], functions)
    except ValueError as error:
        _refuse(line.place, f"expected '{form}': {error}")
    if word in FUNCTIONS and parts["name"] not in functions:
        _refuse(line.place, f"there is no function {parts['name']}; known are {', '.join(sorted(functions))}")
    return Statement(word, parts, line.place, value, assigned, below)


def _row(pattern: str, layout: str, line: _Line) -> Statement:
    try:
        parse(VALUE_OF.sub("x", layout.removeprefix("scale ").strip()))
    except LayoutError as error:
        raise ArchitectureError(
            f"{line.place}: expected a row 'TENSOR  LAYOUT' or one of {', '.join(sorted(FORMS))};"
            f" {error.message}",
            hint=error.hint,
        ) from error
    return Statement("row", {"name": pattern, "layout": layout}, line.place)


def _assignments(text: str, functions: Functions) -> dict[str, Expression]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"'{text}' is not a list of NAME = EXPRESSION ({error.msg})") from error
    if not isinstance(call, ast.Call) or call.args or not all(one.arg for one in call.keywords):
        raise ValueError(f"'{text}' is not a list of NAME = EXPRESSION")
    return {str(one.arg): Expression.parse(ast.unparse(one.value), functions) for one in call.keywords}


def _alternatives(pattern: str) -> list[str]:
    found = _ALTERNATIVES.search(pattern)
    if found is None:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [name for one in found[1].split(",") for name in _alternatives(before + one + after)]


def _given(found: re.Match[str]) -> dict[str, str]:
    return {key: value for key, value in found.groupdict().items() if value is not None}


def _refuse(place: str, reason: str) -> NoReturn:
    raise ArchitectureError(f"{place}: {reason}", hint="docs/your-own.md describes the text of a family")


def with_word(statements: Iterable[Statement], word: str) -> list[Statement]:
    """Return the statements that begin with a word."""
    return [one for one in statements if one.word == word]


def everything(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Yield statements and those in their blocks, without those about parts."""
    for one in statements:
        yield one
        yield from everything(one.block if one.word != "part" else ())
