"""Heads: which head of A becomes which head of B, or the shares if units leave their heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import HeadPolicy
from transfusion.report.formatting import axis_name, kind_of, layer_of
from transfusion.report.report_bases import Bases

Matrix = NDArray[np.floating[Any]]
REPEATED = "rep"
"""The axis of heads within a group, where keys and values are shared."""


@dataclass(frozen=True)
class Panel:
    """One matrix: rows are B's heads, columns A's, and every row sums to 1."""

    id: str
    title: str
    shares: Matrix

    def strongest(self) -> list[tuple[int, int, float]]:
        """For every head of B, the head of A with the largest share, and the share."""
        return [(to, int(row.argmax()), float(row.max())) for to, row in enumerate(self.shares)]

    @property
    def stays(self) -> float:
        """The fraction of heads whose largest share comes from the same head of A."""
        return float(np.mean([to == source for to, source, _ in self.strongest()]))


def panels(pi: Alignment, bases: Bases) -> list[Panel]:
    """Return a matrix for every axis of heads, block by block.

    If π ignores the boundaries of heads, return one for each axis that lies within heads in the bases.
    """
    flat = pi.provenance.policy.heads is HeadPolicy.FLAT
    parents: Mapping[str, str] = bases.a.architecture.parents if flat and bases.a else pi.parents
    found: list[Panel] = []
    for id in pi.sizes:
        children = [child for child, parent in parents.items() if parent == id]
        if not children or parents.get(id) is not None:
            continue
        if id in pi.maps:
            within = next((child for child in children if kind_of(child).endswith(REPEATED)), None)
            heads = _of_groups(pi, id, within) if within else None
            found.append(heads or Panel(id, _title(id), shares_of(pi.maps[id])))
            continue
        for child in children:
            if flat and child in pi.maps and pi.sizes[child] % pi.sizes[id] == 0:
                matrix = shares_of(pi.maps[child])
                if len(matrix) > pi.sizes[id]:
                    found.append(Panel(child, _title(child), _blocks(matrix, pi.sizes[id])))
    return found


def _of_groups(pi: Alignment, id: str, within: str) -> Panel | None:
    """Combine the maps of groups and of the heads within each group (grouped-query attention)."""
    groups, heads = pi.maps[id], pi.maps.get(within, Map.identity(pi.sizes[within], pi.sizes[id]))
    if not (groups.permutes and heads.permutes):
        return None
    sources = pi.lineage(within)[:, None] * heads.size + heads.index
    layer = layer_of(id)
    title = axis_name(kind_of(id).removesuffix("group") + "head")
    title = title if layer is None else f"layer {layer} · {title}"
    return Panel(within, title, np.asarray(np.eye(sources.size)[sources.reshape(-1)]))


def shares_of(map_: Map) -> Matrix:
    """Return the share of each unit of A in each unit of B; for a rotation, its squared entries."""
    matrix = np.asarray(map_.matrix[0], dtype=np.float64)
    return matrix**2 if map_.rotates else matrix


def _blocks(matrix: Matrix, count: int) -> Matrix:
    """Return the share that each block of rows takes from each block of columns."""
    width = len(matrix) // count
    return np.asarray(matrix.reshape(count, width, count, width).sum(axis=(1, 3)) / width)


def _title(id: str) -> str:
    layer = layer_of(id)
    kind = axis_name(kind_of(id))
    return kind if layer is None else f"layer {layer} · {kind}"
