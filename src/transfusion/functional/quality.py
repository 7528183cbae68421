"""Quality: how much of what B computes is predicted from A, by maps that were found on other samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from transfusion.functional.axes import Evidence, Piece
from transfusion.functional.listening import READ
from transfusion.functional.solving import unit
from transfusion.layouts import ANONYMOUS, Layout, Name
from transfusion.maps import Map, move


@dataclass(frozen=True)
class Quality:
    """The share of B's activations that is predicted from A's."""

    found: float
    identity: float
    """The same with nothing moved."""
    null: float
    """The same with A's samples in another order: what is alike in all of B's activations."""

    def __str__(self) -> str:
        return (
            f"{self.found:.0%} of B's activations are predicted from A's, {self.identity:.0%} with nothing"
            f" moved and {self.null:.0%} by chance"
        )


def qualities(evidence: Evidence, maps: Mapping[str, Map]) -> dict[str, Quality]:
    """What maps are worth, for everything that may move: points of the stream, heads with all that lies
    within them, and the neurons of MLPs. What cannot be heard is left out.
    """
    found: dict[str, Quality] = {}
    for space in evidence.architecture.moving():
        if space.parent is None and (pieces := list(_pieces(evidence, space.id))):
            found[space.id] = Quality(
                fmean(_predicted(piece.b, _moved(evidence, piece, maps)) for piece in pieces),
                fmean(_predicted(piece.b, piece.a) for piece in pieces),
                fmean(_predicted(piece.b, _disordered(_moved(evidence, piece, maps))) for piece in pieces),
            )
    return found


def mean(found: Mapping[str, Quality]) -> Quality:
    """All axes as one."""
    every = found.values()
    return Quality(
        *(fmean([getattr(one, what) for one in every] or [0.0]) for what in ("found", "identity", "null"))
    )


def _pieces(evidence: Evidence, id: str) -> Iterator[Piece]:
    """The activations of an axis, and of what lies within it."""
    if evidence.architecture.spaces[id].stream is None:
        yield from (piece for piece in evidence.pieces(id) if piece.axes[0] == id)
    elif (pair := evidence.on_stream(id)) is not None:
        yield Piece((id,), pair[0].T, pair[1].T, READ)


def _moved(evidence: Evidence, piece: Piece, maps: Mapping[str, Map]) -> Tensor:
    layout = Layout((*map(Name, piece.axes), Name(ANONYMOUS)))
    here = {id: maps[id] for id in piece.axes if id in maps}
    return move(piece.a, layout, here, evidence.sizes, evidence.architecture.parents) if here else piece.a


def _disordered(values: Tensor) -> Tensor:
    return torch.roll(values, values.shape[-1] // 3 + 1, dims=-1)


def _predicted(b: Tensor, a: Tensor) -> float:
    """The squared cosine of the two, with its sign: the share that the best multiple of one explains."""
    cosine = float((unit(a) * unit(b)).sum())
    return cosine * abs(cosine)
