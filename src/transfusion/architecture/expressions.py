"""Expressions in family tables: what Python writes for arithmetic and conditions, and nothing else.

    num_attention_heads / (num_key_value_heads or num_attention_heads)
    "x@first" if tie_word_embeddings else "mlm"
    has("pooler.dense.weight") and not vision_config.use_head

Names are keys of the configuration; a key that the configuration lacks is None. ``section.key`` is a key of a
section. ``a / b`` must leave no remainder. Only the functions that the reader of a table knows can be called.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from transfusion.architecture.config_schema import shared

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
            return shared(of(left), of(right), f"{ast.unparse(left)} by {ast.unparse(right)}")
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
