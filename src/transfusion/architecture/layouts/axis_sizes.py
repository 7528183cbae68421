"""The sizes of axes, worked out from the shapes of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

from transfusion.architecture.layouts.notation import ANONYMOUS, Concat, Item, Layout, Name, Product
from transfusion.errors import LayoutError

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
