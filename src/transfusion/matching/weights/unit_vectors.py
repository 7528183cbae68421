"""The units of an axis as vectors, from a tensor of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import AxisFactor, Layout, explode


def unfold(tensor: Tensor, layout: Layout, id: str, dim: int, architecture: Architecture) -> Iterator[Tensor]:
    """Yield the pieces of a tensor with an axis in a dimension as (rows of the axis, the axis, the rest)."""
    for piece, factors in explode(tensor, layout, architecture.sizes):
        if AxisFactor(id, dim) in factors:
            yield unfolded(piece, factors, AxisFactor(id, dim), architecture)


def unfolded(
    piece: Tensor, factors: Sequence[AxisFactor], axis: AxisFactor, architecture: Architecture
) -> Tensor:
    """Return one piece, whose dimensions are these factors, as (rows of the axis, the axis, the rest)."""
    own = factors.index(axis)
    first = [*(_enclosing(factors[:own], name) for name in _ancestors(axis.name, architecture)), own]
    rest = [place for place in range(piece.ndim) if place not in first]
    return piece.permute(*first, *rest).reshape(architecture.rows(axis.name), piece.shape[own], -1)


def _ancestors(id: str, architecture: Architecture) -> list[str]:
    """Return the ancestors of an axis, outermost first."""
    parent = architecture.parents.get(id)
    return [] if parent is None else [*_ancestors(parent, architecture), parent]


def _enclosing(factors: Sequence[AxisFactor], name: str) -> int:
    """Return the last place of an axis among factors."""
    return max(place for place, factor in enumerate(factors) if factor.name == name)
