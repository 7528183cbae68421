"""Layouts as values, and the strings that they are written in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from transfusion.errors import LayoutError

ANONYMOUS = "_"


@dataclass(frozen=True, slots=True)
class Name:
    """One axis."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Product:
    """Axes multiplied into one dimension, the last varying fastest."""

    items: tuple[Item, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.items))})"


@dataclass(frozen=True, slots=True)
class Concat:
    """Axes concatenated in one dimension."""

    parts: tuple[Item, ...]

    def __str__(self) -> str:
        return f"[{'|'.join(map(str, self.parts))}]"


Item: TypeAlias = Name | Product | Concat


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of a tensor, one item per dimension, with an optional arrow between them."""

    items: tuple[Item, ...]
    arrow: str | None = None
    split: int = 0

    def __str__(self) -> str:
        words = [str(item) for item in self.items]
        if self.arrow:
            words.insert(self.split, self.arrow)
        return " ".join(words)

    @property
    def outputs(self) -> range:
        """The dimensions that the arrow points to; none without an arrow."""
        if self.arrow is None:
            return range(0)
        return range(self.split) if self.arrow == "<-" else range(self.split, len(self.items))

    @property
    def inputs(self) -> range:
        """The dimensions that the arrow comes from; none without an arrow."""
        if self.arrow is None:
            return range(0)
        return range(self.split, len(self.items)) if self.arrow == "<-" else range(self.split)

    def part(self, dims: Sequence[int]) -> Layout:
        """Return a layout of only these dimensions, without the arrow, as for the bias of a linear map."""
        return Layout(tuple(self.items[dim] for dim in dims))

    def piece(self, part: int) -> Layout:
        """Return the layout of one part of the concatenations."""
        items = (item.parts[part] if isinstance(item, Concat) else item for item in self.items)
        return Layout(tuple(items), self.arrow, self.split)

    def names(self) -> tuple[str, ...]:
        """Return every axis once, in order of appearance, without `_`."""
        return tuple(dict.fromkeys(name for item in self.items for name in names_in(item)))

    def dims_with(self, name: str) -> tuple[int, ...]:
        """Return the dimensions in which an axis occurs."""
        return tuple(dim for dim, item in enumerate(self.items) if name in names_in(item))

    def outside(self, dim: int, parents: Mapping[str, str]) -> dict[str, int]:
        """Return the ancestors of a dimension's axes that are earlier dimensions, and these dimensions."""
        wanted: set[str] = set()
        for name in names_in(self.items[dim]):
            while (parent := parents.get(name)) is not None:
                wanted.add(parent)
                name = parent
        earlier = enumerate(self.items[:dim])
        return {item.text: at for at, item in earlier if isinstance(item, Name) and item.text in wanted}

    def rename(self, new_name: Callable[[str], str]) -> Layout:
        """Return the layout with every axis renamed, except `_`."""
        return Layout(tuple(_rename(item, new_name) for item in self.items), self.arrow, self.split)

    def enclosing(self, parents: Mapping[str, str]) -> set[str]:
        """Return the axes whose elements enclose other axes in a product.

        Head in ``(head qk)``; both group and rep in ``(group rep qk)``, where qk lies within group.
        """
        return {name for item in self.items for name in _enclosing(item, parents)}

    def pairs(self, parent: str, child: str) -> bool:
        """Return whether an axis follows its parent directly wherever it occurs: ``(head qk)``."""
        items = [place for item in self.items for place in _before(item, child)]
        return all(before == Name(parent) for before in items)

    def flattened(self, pairs: Mapping[str, str]) -> Layout:
        """Return the layout with every ``(parent child)`` of these pairs written as ``child``."""
        return Layout(tuple(_flattened(item, pairs) for item in self.items), self.arrow, self.split)


def names_in(item: Item) -> Iterator[str]:
    """Return the axes of one item in order, with repetitions, without `_`."""
    match item:
        case Name(text):
            if text != ANONYMOUS:
                yield text
        case Product(children) | Concat(children):
            for child in children:
                yield from names_in(child)


def _rename(item: Item, new_name: Callable[[str], str]) -> Item:
    match item:
        case Name(text):
            return item if text == ANONYMOUS else Name(new_name(text))
        case Product(items):
            return Product(tuple(_rename(child, new_name) for child in items))
        case Concat(parts):
            return Concat(tuple(_rename(child, new_name) for child in parts))


def _enclosing(item: Item, parents: Mapping[str, str]) -> Iterator[str]:
    match item:
        case Product(items):
            for place, child in enumerate(items):
                later = [name for other in items[place + 1 :] for name in names_in(other)]
                family = {parents[name] for name in later if name in parents}
                if isinstance(child, Name) and family & {child.text, parents.get(child.text)}:
                    yield child.text
                yield from _enclosing(child, parents)
        case Concat(parts):
            for part in parts:
                yield from _enclosing(part, parents)


def _before(item: Item, name: str, previous: Item | None = None) -> Iterator[Item | None]:
    """Return the item before an axis in its product, for every occurrence."""
    match item:
        case Name(text):
            if text == name:
                yield previous
        case Product(items):
            for before, child in zip((None, *items), items, strict=False):
                yield from _before(child, name, before)
        case Concat(parts):
            for part in parts:
                yield from _before(part, name)


def _flattened(item: Item, pairs: Mapping[str, str]) -> Item:
    match item:
        case Name():
            return item
        case Concat(parts):
            return Concat(tuple(_flattened(part, pairs) for part in parts))
        case Product(items):
            kept: list[Item] = []
            for child in items:
                if isinstance(child, Name) and child.text in pairs and kept[-1:] == [Name(pairs[child.text])]:
                    kept.pop()
                kept.append(_flattened(child, pairs))
            return kept[0] if len(kept) == 1 else Product(tuple(kept))


_TOKEN = re.compile(r"\s*(<-|->|[()\[\]|]|[A-Za-z_][\w.]*(?:@\w+)?|\S)")
_NAME = re.compile(r"_|[A-Za-z][\w.]*(@\w+)?")


@lru_cache(maxsize=4096)
def parse(text: str) -> Layout:
    """Read a layout string; a `LayoutError` points at the character that is wrong."""
    return _Parser(text).layout()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [(match.group(1), match.start(1)) for match in _TOKEN.finditer(text)]
        self.place = 0

    def layout(self) -> Layout:
        items: list[Item] = []
        arrow, split = None, 0
        while (token := self.peek()) is not None:
            if token in ("<-", "->"):
                if arrow is not None:
                    raise self.wrong("a layout has at most one arrow")
                if not items:
                    raise self.wrong("an arrow needs an axis before it")
                arrow, split = self.take(), len(items)
            else:
                items.append(self.item(nested=False))
        if arrow is not None and split == len(items):
            raise self.wrong("an arrow needs an axis after it")
        return Layout(tuple(items), arrow, split)

    def item(self, *, nested: bool) -> Item:
        token = self.peek()
        if token == "(":
            return Product(self.children("(", ")", None))
        if token == "[":
            return Concat(self.children("[", "]", "|"))
        if token is None or not _NAME.fullmatch(token):
            raise self.wrong("expected an axis name, '(' or '['")
        if nested and token == ANONYMOUS:
            raise self.wrong("'_' stands for a whole dimension; inside brackets give the axis a name")
        return Name(self.take())

    def children(self, opening: str, closing: str, separator: str | None) -> tuple[Item, ...]:
        self.take()
        items = [self.item(nested=True)]
        while self.peek() != closing:
            if self.peek() is None:
                raise self.wrong(f"'{opening}' is never closed; add '{closing}'")
            if separator:
                if self.peek() != separator:
                    raise self.wrong(f"expected '{separator}' or '{closing}'")
                self.take()
            items.append(self.item(nested=True))
        self.take()
        if len(items) == 1:
            raise self.wrong(f"'{opening}{closing}' needs at least two items", back=1)
        return tuple(items)

    def peek(self) -> str | None:
        return self.tokens[self.place][0] if self.place < len(self.tokens) else None

    def take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1][0]

    def wrong(self, reason: str, back: int = 0) -> LayoutError:
        place = self.place - back
        column = self.tokens[place][1] if place < len(self.tokens) else len(self.text)
        return LayoutError(
            f"layout {self.text!r}, column {column + 1}: {reason}",
            hint=f"{self.text}\n      {' ' * column}^",
        )
