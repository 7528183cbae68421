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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
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
        found: set[str] = set()
        for items in self._products():
            for place, child in enumerate(items):
                later = {parents.get(name) for other in items[place + 1 :] for name in names_in(other)}
                if isinstance(child, Name) and (later - {None}) & {child.text, parents.get(child.text)}:
                    found.add(child.text)
        return found

    def pairs(self, parent: str, child: str) -> bool:
        """Return whether an axis follows its parent directly wherever it occurs: ``(head qk)``."""
        pairs = [pair for items in self._products() for pair in pairwise(items)]
        times = sum(name == child for item in self.items for name in names_in(item))
        return pairs.count((Name(parent), Name(child))) == times

    def flattened(self, pairs: Mapping[str, str]) -> Layout:
        """Return the layout with every ``(parent child)`` of these pairs written as ``child``."""
        return Layout(tuple(_flattened(item, pairs) for item in self.items), self.arrow, self.split)

    def _products(self) -> Iterator[tuple[Item, ...]]:
        """Yield the items of every product."""
        waiting = list(self.items)
        while waiting:
            item = waiting.pop()
            waiting += _children(item)
            if isinstance(item, Product):
                yield item.items


def _children(item: Item) -> tuple[Item, ...]:
    match item:
        case Name():
            return ()
        case Product(items) | Concat(items):
            return items


def names_in(item: Item) -> Iterator[str]:
    """Return the axes of one item in order, with repetitions, without `_`."""
    if isinstance(item, Name) and item.text != ANONYMOUS:
        yield item.text
    for child in _children(item):
        yield from names_in(child)


def _rename(item: Item, new_name: Callable[[str], str]) -> Item:
    if isinstance(item, Name):
        return item if item.text == ANONYMOUS else Name(new_name(item.text))
    return type(item)(tuple(_rename(child, new_name) for child in _children(item)))


def _flattened(item: Item, pairs: Mapping[str, str]) -> Item:
    if isinstance(item, Name):
        return item
    kept: list[Item] = []
    for child in _children(item):
        follows = isinstance(child, Name) and kept[-1:] == [Name(pairs.get(child.text, ""))]
        if follows and isinstance(item, Product):
            kept.pop()
        kept.append(_flattened(child, pairs))
    return kept[0] if len(kept) == 1 else type(item)(tuple(kept))


_TOKEN = re.compile(r"\s*(<-|->|[()\[\]|]|[A-Za-z_][\w.]*(?:@\w+)?|\S)")
_NAME = re.compile(r"_|[A-Za-z][\w.]*(@\w+)?")


@lru_cache(maxsize=4096)
def parse(text: str) -> Layout:
    """Read a layout string; a `LayoutError` points at the character that is wrong."""
    reader = _Reader(text)
    items: list[Item] = []
    arrow, split = None, 0
    while token := reader.next:
        if token in ("<-", "->"):
            if arrow is not None:
                raise reader.wrong("a layout has at most one arrow")
            if not items:
                raise reader.wrong("an arrow needs an axis before it")
            arrow, split = reader.take(), len(items)
        else:
            items.append(reader.item(nested=False))
    if arrow is not None and split == len(items):
        raise reader.wrong("an arrow needs an axis after it")
    return Layout(tuple(items), arrow, split)


class _Reader:
    """Reads the items of a layout, token by token."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0
        self.tokens = [(match[1], match.start(1)) for match in _TOKEN.finditer(text)] + [("", len(text))]

    @property
    def next(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.place][0]

    def take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1][0]

    def item(self, *, nested: bool) -> Item:
        if self.next == "(":
            return Product(self.children(")", ""))
        if self.next == "[":
            return Concat(self.children("]", "|"))
        if not _NAME.fullmatch(self.next):
            raise self.wrong("expected an axis name, '(' or '['")
        if nested and self.next == ANONYMOUS:
            raise self.wrong("'_' stands for a whole dimension; inside brackets give the axis a name")
        return Name(self.take())

    def children(self, closing: str, separator: str) -> tuple[Item, ...]:
        opening, items = self.take(), [self.item(nested=True)]
        while self.next != closing:
            if not self.next:
                raise self.wrong(f"'{opening}' is never closed; add '{closing}'")
            if separator and self.take() != separator:
                raise self.wrong(f"expected '{separator}' or '{closing}'", back=1)
            items.append(self.item(nested=True))
        self.take()
        if len(items) == 1:
            raise self.wrong(f"'{opening}{closing}' needs at least two items", back=1)
        return tuple(items)

    def wrong(self, reason: str, back: int = 0) -> LayoutError:
        column = self.tokens[self.place - back][1]
        return LayoutError(
            f"layout {self.text!r}, column {column + 1}: {reason}",
            hint=f"{self.text}\n      {' ' * column}^",
        )


# ── sizes of axes, worked out from the shapes of tensors ─────────────────────────────────────

_Terms: TypeAlias = Counter[tuple[str, ...]]
"""A size as a polynomial: the factor of every product of unknown axes."""


def size_of(item: Item, sizes: Mapping[str, int]) -> int:
    """Return the extent of an item whose axes all have known sizes."""
    if isinstance(item, Name):
        return sizes[item.text]
    extents = (size_of(child, sizes) for child in _children(item))
    return prod(extents) if isinstance(item, Product) else sum(extents)


def solve_sizes(
    layout: Layout, shape: Sequence[int], known: Mapping[str, int], tensor: str = "tensor"
) -> dict[str, int]:
    """Return the sizes that this shape determines beyond the known ones; refuse contradictions.

    An axis may stay undetermined (a product of two unknown axes): another tensor may determine it.
    """
    found: dict[str, int] = {}

    def misfit(reason: str) -> LayoutError:
        given = {**known, **found}
        sizes = ", ".join(f"{name}={given[name]}" for name in layout.names() if name in given)
        return LayoutError(
            f"{tensor} of shape {tuple(shape)} does not fit its layout '{layout}': {reason}"
            + (f" (known sizes: {sizes})" if sizes else ""),
            hint="check that config.json belongs to these weights; if it does, the table of this"
            " architecture needs another layout for this tensor",
        )

    if len(shape) != len(layout.items):
        raise misfit(f"the layout has {len(layout.items)} dimensions and the tensor {len(shape)}")
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
                    raise misfit(f"dimension {dim} is {item} = {constant}, the tensor has {extent}")
            elif len(terms) == 1 and len(unknown := next(iter(terms))) == 1:
                size, rest = divmod(extent - constant, terms[unknown])
                if rest or size <= 0:
                    raise misfit(f"dimension {dim} is {item}, and no size of {unknown[0]} makes it {extent}")
                found[unknown[0]] = size
                progress = True
    return found


def _terms(item: Item, known: Mapping[str, int]) -> _Terms:
    if isinstance(item, Name):
        return Counter({(): known[item.text]} if item.text in known else {(item.text,): 1})
    result: _Terms = Counter({(): 1} if isinstance(item, Product) else {})
    for terms in (_terms(child, known) for child in _children(item)):
        if isinstance(item, Concat):
            result.update(terms)
            continue
        left, result = result, Counter()
        for (one, a), (other, b) in product(left.items(), terms.items()):
            result[tuple(sorted(one + other))] += a * b
    return result


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
    layout = Layout((*map(Name, outside), item))
    shape = (*(sizes[name] for name in outside), size_of(item, sizes))
    source = np.broadcast_to(np.arange(shape[-1]), shape).copy()
    target = np.empty_like(source)
    pieces = zip(explode(target, layout, sizes), explode(source, layout, sizes), strict=True)
    for (new, factors), (old, _) in pieces:  # views, in which every dimension is a single axis
        places = np.indices(new.shape, sparse=True)
        names = [factor.name for factor in factors]
        at = dict(zip(names, places, strict=True))
        index = [
            permutations[name][_row(name, at, sizes, parents, item), place]
            if name in permutations and name not in outside
            else place
            for name, place in zip(names, places, strict=True)
        ]
        new[...] = old[tuple(index)]
    return target


def _row(
    name: str, at: Mapping[str, Index], sizes: Mapping[str, int], parents: Mapping[str, str], item: Item
) -> Index | int:
    """Return the row of an axis's permutations that the places of its ancestors select."""
    parent = parents.get(name)
    if parent is None:
        return 0
    if parent not in at:
        raise LayoutError(
            f"axis {name} lies within {parent}, which does not enclose it in '{item}'",
            hint=f"write the two together, as in ({parent} {name}), or give {parent} a"
            " dimension of its own before this one",
        )
    return _row(parent, at, sizes, parents, item) * sizes[parent] + at[parent]


@dataclass(frozen=True, slots=True)
class AxisFactor:
    """One dimension of a piece: its axis, and the dimension of the tensor that it came from."""

    name: str
    dim: int


def explode(array: Any, layout: Layout, sizes: Mapping[str, int]) -> list[tuple[Any, list[AxisFactor]]]:
    """Return views of a tensor in which every dimension is a single axis.

    Concatenations are split and products unfolded. ``array`` is a NumPy array or a torch tensor.
    """
    return list(_pieces(array, [(item, dim) for dim, item in enumerate(layout.items)], sizes))


def _pieces(
    array: Any, items: list[tuple[Item, int]], sizes: Mapping[str, int]
) -> Iterator[tuple[Any, list[AxisFactor]]]:
    for place, (item, dim) in enumerate(items):
        before, after = items[:place], items[place + 1 :]
        extents = [size_of(child, sizes) for child in _children(item)]
        if isinstance(item, Product):
            shape = (*array.shape[:place], *extents, *array.shape[place + 1 :])
            inner = [(child, dim) for child in item.items]
            yield from _pieces(array.reshape(shape), [*before, *inner, *after], sizes)
            return
        if isinstance(item, Concat):
            stops = accumulate(extents)
            for part, extent, stop in zip(item.parts, extents, stops, strict=True):
                cut = array[(slice(None),) * place + (slice(stop - extent, stop),)]
                yield from _pieces(cut, [*before, (part, dim), *after], sizes)
            return
    yield array, [AxisFactor(item.text, dim) for item, dim in items if isinstance(item, Name)]
