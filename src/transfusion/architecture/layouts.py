"""The notation: a layout names the axes of a tensor, dimension by dimension.

    (head qk) <- x                            a query projection, stored (out, in)
    x -> [(head qk)|(head qk)|(head vo)]      GPT-2's fused projection, stored (in, out)
    vocab -> x@first                          an embedding: from tokens to the stream
    x                                         a bias, or the weight of a norm
    _ position x@first                        position embeddings with a leading 1

One item per dimension. ``( a b )`` is a product, row-major; ``[ p | q ]`` a concatenation; ``_`` a
dimension that no map moves and whose size is not known beforehand. An optional arrow points from a
linear map's inputs to its outputs; it changes nothing about the order of the dimensions.

Three steps, none of which needs torch: `parse` a string, `solve_sizes` from a shape, and then
either `index_map` (where each position of a dimension comes from when its axes are permuted) or
`explode` (the tensor as pieces whose dimensions are single axes).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transfusion.errors import LayoutError

# ── layouts as values, and the strings that they are written in ──────────────────────────────

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


# ── sizes of axes, worked out from the shapes of tensors ─────────────────────────────────────

_Terms: TypeAlias = dict[tuple[str, ...], int]
"""A size as a polynomial: the factor of every product of unknown axes."""


def size_of(item: Item, sizes: Mapping[str, int]) -> int:
    """Return the extent of an item whose axes all have known sizes."""
    match item:
        case Name(text):
            return sizes[text]
        case Product(items):
            return prod(size_of(child, sizes) for child in items)
        case Concat(parts):
            return sum(size_of(child, sizes) for child in parts)


def solve_sizes(
    layout: Layout, shape: Sequence[int], known: Mapping[str, int], tensor: str = "tensor"
) -> dict[str, int]:
    """Return the sizes that this shape determines beyond the known ones; refuse contradictions.

    An axis may stay undetermined (a product of two unknown axes): another tensor may determine it.
    """
    if len(shape) != len(layout.items):
        raise _misfit(
            layout,
            shape,
            known,
            tensor,
            f"the layout has {len(layout.items)} dimensions and the tensor {len(shape)}",
        )
    found: dict[str, int] = {}
    progress = True
    while progress:
        progress = False
        for dim, (item, extent) in enumerate(zip(layout.items, shape, strict=True)):
            if item == Name(ANONYMOUS):
                continue
            terms = _terms(item, {**known, **found})
            constant = terms.pop((), 0)
            if not terms:
                if constant != extent:
                    reason = f"dimension {dim} is {item} = {constant}, the tensor has {extent}"
                    raise _misfit(layout, shape, {**known, **found}, tensor, reason)
            elif len(terms) == 1 and len(unknown := next(iter(terms))) == 1:
                size, rest = divmod(extent - constant, terms[unknown])
                if rest or size <= 0:
                    reason = f"dimension {dim} is {item}, and no size of {unknown[0]} makes it {extent}"
                    raise _misfit(layout, shape, {**known, **found}, tensor, reason)
                found[unknown[0]] = size
                progress = True
    return found


def _terms(item: Item, known: Mapping[str, int]) -> _Terms:
    match item:
        case Name(text):
            return {(): known[text]} if text in known else {(text,): 1}
        case Concat(parts):
            total: _Terms = {}
            for part in parts:
                for unknown, factor in _terms(part, known).items():
                    total[unknown] = total.get(unknown, 0) + factor
            return total
        case Product(items):
            result: _Terms = {(): 1}
            for child in items:
                product: _Terms = {}
                for left, a in result.items():
                    for right, b in _terms(child, known).items():
                        key = tuple(sorted(left + right))
                        product[key] = product.get(key, 0) + a * b
                result = product
            return result


def _misfit(
    layout: Layout, shape: Sequence[int], known: Mapping[str, int], tensor: str, reason: str
) -> LayoutError:
    sizes = ", ".join(f"{name}={known[name]}" for name in layout.names() if name in known)
    return LayoutError(
        f"{tensor} of shape {tuple(shape)} does not fit its layout '{layout}': {reason}"
        + (f" (known sizes: {sizes})" if sizes else ""),
        hint="check that config.json belongs to these weights; if it does, the table of this"
        " architecture needs another layout for this tensor",
    )


# ── maps of positions, and pieces whose dimensions are single axes ───────────────────────────

Index: TypeAlias = NDArray[np.int64]


def index_map(
    item: Item,
    sizes: Mapping[str, int],
    permutations: Mapping[str, Index],
    parents: Mapping[str, str],
    outside: Sequence[str] = (),
) -> Index | None:
    """Return the source of each position of a dimension: ``new[j] = old[index[j]]``.

    ``permutations[axis]`` has one row for every element of the axis's ancestors (one row for an
    axis without a parent), in the order of the destination. The result is None if nothing in this item
    moves. Ancestors that have dimensions of their own are ``outside``; their dimensions come first in the
    index.
    """
    if not any(name in permutations for name in names_in(item)):
        return None

    def row_of(name: str, places: Mapping[str, Index], shape: tuple[int, ...]) -> Index:
        """Return the row that its ancestors select, for every destination position so far."""
        parent = parents.get(name)
        if parent is None:
            return np.zeros(shape, dtype=np.int64)
        if parent not in places:
            raise LayoutError(
                f"axis {name} lies within {parent}, which does not enclose it in '{item}'",
                hint=f"write the two together, as in ({parent} {name}), or give {parent} a"
                " dimension of its own before this one",
            )
        return row_of(parent, places, shape) * sizes[parent] + places[parent]

    def sources(item: Item, places: Mapping[str, Index], shape: tuple[int, ...]) -> Index:
        """Return the source within this item for every destination position: shape (*shape, size)."""
        match item:
            case Name(text):
                if (permutation := permutations.get(text)) is not None:
                    return permutation[row_of(text, places, shape)]
                return np.broadcast_to(np.arange(sizes[text]), (*shape, sizes[text]))
            case Concat(parts):
                blocks, offset = [], 0
                for part in parts:
                    blocks.append(sources(part, places, shape) + offset)
                    offset += size_of(part, sizes)
                return np.concatenate(blocks, axis=-1)
            case Product(items):
                total: Index = np.zeros(shape, dtype=np.int64)
                here, inner = dict(places), shape
                for child in items:
                    size = size_of(child, sizes)
                    total = total[..., None] * size + sources(child, here, inner)
                    inner = (*inner, size)
                    here = {name: np.broadcast_to(at[..., None], inner) for name, at in here.items()}
                    if isinstance(child, Name):
                        here[child.text] = np.broadcast_to(np.arange(size), inner)
                return total.reshape(*shape, -1)

    around = tuple(sizes[name] for name in outside)
    return sources(item, dict(zip(outside, np.indices(around), strict=True)), around)


@dataclass(frozen=True, slots=True)
class AxisFactor:
    """One dimension of a piece: its axis, and the dimension of the tensor that it came from."""

    name: str
    dim: int


def explode(array: Any, layout: Layout, sizes: Mapping[str, int]) -> list[tuple[Any, list[AxisFactor]]]:
    """Return views of a tensor in which every dimension is a single axis.

    Concatenations are split and products unfolded. ``array`` is a NumPy array or a torch tensor.
    """
    whole = [(item, dim) for dim, item in enumerate(layout.items)]
    return list(_pieces(array, whole, sizes))


def _pieces(
    array: Any, items: list[tuple[Item, int]], sizes: Mapping[str, int]
) -> Iterator[tuple[Any, list[AxisFactor]]]:
    for place, (item, dim) in enumerate(items):
        before, after = items[:place], items[place + 1 :]
        if isinstance(item, Product):
            extents = [size_of(child, sizes) for child in item.items]
            shape = (*array.shape[:place], *extents, *array.shape[place + 1 :])
            inner = [(child, dim) for child in item.items]
            yield from _pieces(array.reshape(shape), [*before, *inner, *after], sizes)
            return
        if isinstance(item, Concat):
            start = 0
            for part in item.parts:
                stop = start + size_of(part, sizes)
                cut = array[(slice(None),) * place + (slice(start, stop),)]
                yield from _pieces(cut, [*before, (part, dim), *after], sizes)
                start = stop
            return
    yield array, [AxisFactor(item.text, dim) for item, dim in items if isinstance(item, Name)]
