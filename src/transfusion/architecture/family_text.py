"""Families as text: reads the lines of a ``.family`` file into statements, and refuses what it cannot read.

One statement per line; indented lines belong to the line above them. A line that begins with none of the
words in `FORMS` is a row, ``tensor  layout``. ``# …`` is a comment, ``a.{q,k}.b`` two rows, ``$name`` or
``${name}`` the value of a ``let``, and a line that ends in a backslash goes on in the next one.
`family_library` says what statements mean.

Expressions are what Python writes for arithmetic and conditions, and nothing else:

    num_attention_heads / (num_key_value_heads or num_attention_heads)
    "x@first" if tie_word_embeddings else "mlm"
    has("pooler.dense.weight") and not vision_config.use_head

Names are keys of the configuration; a key that the configuration lacks is None. ``section.key`` is a key of a
section. ``a / b`` must leave no remainder. Only the functions that the reader of a table knows can be called.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

from transfusion.architecture.layouts import parse
from transfusion.architecture.table import WRONG_FILE
from transfusion.errors import ArchitectureError, LayoutError

# ── expressions ───────────────────────────────────────────────────────────────────────────

Functions: TypeAlias = Mapping[str, Callable[..., Any]]
Lookup: TypeAlias = Callable[[str], Any]

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in (many or ()),
    ast.NotIn: lambda one, many: one not in (many or ()),
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}
_ALLOWED: tuple[type[ast.AST], ...] = (
    *(ast.Name, ast.Load, ast.Constant, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Dict),
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.BinOp, ast.Div, ast.Compare, ast.IfExp, ast.Call),
    *(ast.keyword, ast.Slice),
)


@dataclass(frozen=True)
class Expression:
    """One expression, parsed and checked."""

    text: str
    tree: ast.expr

    @classmethod
    def parse(cls, text: str, functions: Functions) -> Expression:
        """Read an expression; a ValueError says what is wrong with it."""
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"'{text}' is not an expression ({error.msg})") from error
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED) and type(node) not in _OPERATORS:
                raise ValueError(f"'{text}': {type(node).__name__} is not allowed in an expression")
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else None
            if called is not None and called not in functions:
                raise ValueError(f"'{text}' calls {called}; known are {', '.join(sorted(functions))}")
        return cls(text.strip(), tree)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in it."""
        called = {id(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name))
        return frozenset(node.id for node in nodes if id(node) not in called)

    @cached_property
    def keys(self) -> frozenset[str]:
        """The names in it, and the keys of sections."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute))
        return self.names | {node.attr for node in nodes}

    @property
    def may_be_absent(self) -> bool:
        """Whether it ends in ``or None``."""
        return isinstance(self.tree, ast.BoolOp) and ast.unparse(self.tree.values[-1]) == "None"

    def value(self, lookup: Lookup, functions: Functions) -> Any:
        """Return its value; ``lookup`` gives that of a name."""
        return _value(self.tree, lookup, functions)

    def required(self, lookup: Lookup, functions: Functions) -> Any:
        """Return its value; a KeyError names the key that is not there."""
        try:
            found = self.value(lookup, functions)
        except TypeError:
            found = None
        if found is None and not self.may_be_absent:
            missing = [name for name in sorted(self.names) if lookup(name) is None]
            raise KeyError(missing[0] if missing else self.text)
        return found


def _value(node: ast.AST, lookup: Lookup, functions: Functions) -> Any:
    def of(inner: ast.AST) -> Any:
        return _value(inner, lookup, functions)

    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return lookup(name)
        case ast.Attribute(inner, key):
            section = of(inner)
            return section.get(key) if isinstance(section, Mapping) else None
        case ast.Subscript(inner, place):
            return of(inner)[of(place)]
        case ast.Slice(lower, upper, step):
            return slice(*(of(part) if part else None for part in (lower, upper, step)))
        case ast.Tuple(items):
            return tuple(of(item) for item in items)
        case ast.List(items):
            return [of(item) for item in items]
        case ast.Dict(keys, values):
            return {of(key): of(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.BoolOp(kind, parts):
            for part in parts:
                found = of(part)
                if bool(found) is isinstance(kind, ast.Or):
                    return found
            return found
        case ast.UnaryOp(kind, inner):
            return _OPERATORS[type(kind)](of(inner))
        case ast.BinOp(left, ast.Div(), right):
            return _share(of(left), of(right), f"{ast.unparse(left)} by {ast.unparse(right)}")
        case ast.BinOp(left, kind, right):
            return _OPERATORS[type(kind)](of(left), of(right))
        case ast.Compare(first, kinds, others):
            values = [of(first), *(of(other) for other in others)]
            pairs = zip(kinds, values, values[1:], strict=False)
            return all(_OPERATORS[type(kind)](one, other) for kind, one, other in pairs)
        case ast.IfExp(test, body, otherwise):
            return of(body) if of(test) else of(otherwise)
        case ast.Call(ast.Name(name), arguments, keywords):
            named = {keyword.arg: of(keyword.value) for keyword in keywords if keyword.arg}
            return functions[name](*(of(argument) for argument in arguments), **named)
    raise ValueError(f"{ast.unparse(node)} is not allowed in an expression")


def _share(whole: int, parts: int, what: str) -> int:
    """Return ``whole / parts``; refuse a remainder."""
    share, rest = divmod(whole, parts)
    if rest or share < 1:
        raise ArchitectureError(
            f"the configuration divides {what}, but {whole} is not a multiple of {parts}", hint=WRONG_FILE
        )
    return share


# ── statements ────────────────────────────────────────────────────────────────────────────

_FORMS = """
family NAME [: PARENT]
fragment NAME ...
keys NAME ...

library NAME
kin NAME
models WORDS
signature [PLUS] WORDS
prefixes WORDS
inputs WORDS
computed WORDS
tied_scale
positions_after_padding
whole_only
repeats_block
ignores WORDS
requires NAME VALUES
defaults [of NAME :] SETTINGS
aliases ...
originals ...
part NAME PREFIX [KIND] [as STACK] [WHOLE] [OPTIONAL]
set NAME = VALUE
fits VALUE
shapes ...
draw NAME = VALUE
denoises NAME
frame VALUE
arrange FUNCTION
complete FUNCTION
from_shapes FUNCTION
original_names FUNCTION

let NAME = VALUE
when VALUE ...
otherwise ...
for NAME in VALUE ...
refuse WHY [; HINT]

stack NAME VALUE
one_space
separate_points WORDS
branch_factor VALUE
kind NAME = VALUE
axis NAME [in WITHIN] [with TIED_WITH] [per SCOPE]
fixed NAME [in WITHIN] [per SCOPE] : WHY
rotary NAME [in WITHIN]
interleaved NAME [in WITHIN]
sizes SETTINGS
skip ENTRY SOURCE -> TARGET BRANCH
without WORDS
heads ...
outside ...
unread ...
buffers WORDS
same FIRST LATER
pin NAME : WHY
permuted_only : WHY
no_outputs
tie NAME = FIRST
output NAME = POINT
"""
"""How a family is recognised, named and run; what decides; the table. Words in capitals stand for a part of
the line, brackets enclose a part that may be absent, and ``...`` are indented lines below."""
FORMS = {form.split()[0]: form for form in _FORMS.splitlines() if form}
_PARTS = {
    **dict.fromkeys(("VALUE", "VALUES", "SETTINGS", "WORDS", "WHY", "HINT"), ".+?"),
    "SCOPE": "layer|stack|model",
    "PLUS": r"\+",
    "OPTIONAL": "if there",
    "WHOLE": "whole",
}
"""What stands for a part; any other is one word. VALUE is an expression, and SETTINGS are several."""
_ABOVE = frozenset({"part", *(word for word, form in FORMS.items() if form.endswith("..."))})
"""Words below which lines may be indented."""
VALUE_OF = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
"""``$name`` or ``${name}``: the value of a ``let``."""
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def _regex(form: str) -> re.Pattern[str]:
    """Return the pattern of what follows the first word of a form."""
    pattern = ""
    for token in re.findall(r"\[|\]|->|[:=;]|\w+", form)[1:]:
        if token in "[]":
            pattern += "(?:" if token == "[" else ")?"
        elif token.isupper():
            kind = _PARTS.get(token, r"[^\s:=]+")
            pattern += rf"\s*(?<![^\s:=;>])(?P<{token.lower()}>{kind})"
        else:
            pattern += rf"\s*(?<!\S){token}(?=\s)" if token.isalpha() else rf"\s*{token}"
    return re.compile(pattern)


_REGEXES = {word: _regex(form) for word, form in FORMS.items()}


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
    return _block(list(_lines(text, file)), -1, functions, "")[0]


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
        if lines and lines[0].depth > line.depth and word in _ABOVE:
            below, lines = _block(lines, line.depth, functions, word)
        for statement in _statements(line, word, functions, inside, below):
            if statement.word in ("stack", "family"):
                seen = {}
            elif statement.word == "row":
                if statement.name in seen:
                    first = seen[statement.name]
                    _refuse(line.place, f"the row {statement.name} stands here twice, first in {first}")
                seen[statement.name] = line.place
            elif statement.word == "otherwise" and (not found or found[-1].word != "when"):
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
        if word in ("family", "fragment", "keys") and line.depth:
            _refuse(line.place, f"'{word}' begins at the margin")
        yield _formed(line, word, functions, below, line.text[len(word) :])
    else:
        pattern, _, layout = line.text.partition(" ")
        for name in _alternatives(pattern):
            yield _row(name, layout.strip(), line)


def _formed(
    line: _Line, word: str, functions: Functions, below: tuple[Statement, ...], rest: str
) -> Statement:
    form = FORMS[word].removesuffix(" ...")
    found = _REGEXES[word].fullmatch(rest.strip())
    if found is None or (form != FORMS[word] and not below):
        wanted = f"'{form}'" + (" with indented lines below it" if found else "")
        _refuse(line.place, f"expected {wanted}, found '{line.text}'")
    parts = _given(found)
    try:
        value = Expression.parse(parts["value"], functions) if "value" in parts else None
        assigned = _assignments(parts["settings"], functions) if "settings" in parts else {}
    except ValueError as error:
        _refuse(line.place, f"expected '{form}': {error}")
    if (called := parts.get("function")) and called not in functions:
        _refuse(line.place, f"there is no function {called}; known are {', '.join(sorted(functions))}")
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
        raise ValueError(f"'{text}' is not a list of NAME = VALUE ({error.msg})") from error
    if not isinstance(call, ast.Call) or call.args or not all(one.arg for one in call.keywords):
        raise ValueError(f"'{text}' is not a list of NAME = VALUE")
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
