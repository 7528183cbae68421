"""Prediction quality: the share of B's activations predicted from A's, on held-out samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.alignment.moves import move_tensor
from transfusion.architecture.layouts import ANONYMOUS, Layout, Name
from transfusion.matching.activations.axis_activations import AxisActivations, AxisPiece
from transfusion.running.activations import INPUT


@dataclass(frozen=True)
class PredictionQuality:
    """The share of B's activations that is predicted from A's."""

    found: float
    identity: float
    """The same with the identity."""
    null: float
    """The same with A's samples in another order: what all of B's activations have in common."""

    def __str__(self) -> str:
        unmoved = f"{self.identity:.0%} with nothing moved and " if self.identity else ""
        return (
            f"{self.found:.0%} of B's activations are predicted from A's, {unmoved}{self.null:.0%} by chance"
        )


def prediction_qualities(evidence: AxisActivations, maps: Mapping[str, Map]) -> dict[str, PredictionQuality]:
    """Return the quality of maps for all free axes: points of the stream, heads with their units, neurons.

    Axes without recorded activations are left out.
    """
    found: dict[str, PredictionQuality] = {}
    for space in evidence.architecture.moving():
        if space.parent is None and (quality := axis_quality(evidence, space.id, maps)) is not None:
            found[space.id] = quality
    return found


def axis_quality(evidence: AxisActivations, id: str, maps: Mapping[str, Map]) -> PredictionQuality | None:
    """Return the quality of the maps of one axis and of its children; None without activations."""
    shares: list[tuple[float, float, float]] = []
    for piece in _pieces(evidence, id):
        moved = _moved(evidence, piece, maps)
        ways = moved, piece.a, shuffled(moved)
        shares.append((predicted(piece.b, ways[0]), predicted(piece.b, ways[1]), predicted(piece.b, ways[2])))
    return PredictionQuality(*(fmean(one) for one in zip(*shares, strict=True))) if shares else None


def mean_quality(found: Mapping[str, PredictionQuality]) -> PredictionQuality:
    """Return the mean over all axes."""
    every = found.values()
    return PredictionQuality(
        *(fmean([getattr(one, what) for one in every] or [0.0]) for what in ("found", "identity", "null"))
    )


def _pieces(evidence: AxisActivations, id: str) -> Iterator[AxisPiece]:
    """Yield the activations of an axis and of its children."""
    if evidence.architecture.spaces[id].stream is None:
        yield from (piece for piece in evidence.pieces(id) if piece.axes[0] == id)
    elif (pair := evidence.on_stream(id)) is not None:
        yield AxisPiece.of((id,), pair[0].T, pair[1].T, INPUT)


def _moved(evidence: AxisActivations, piece: AxisPiece, maps: Mapping[str, Map]) -> Tensor:
    layout = Layout((*map(Name, piece.axes), Name(ANONYMOUS)))
    here = {id: maps[id].reading for id in piece.axes if id in maps}
    return (
        move_tensor(piece.a, layout, here, evidence.sizes, evidence.architecture.parents) if here else piece.a
    )


def shuffled(values: Tensor) -> Tensor:
    return torch.roll(values, values.shape[-1] // 3 + 1, dims=-1)


def predicted(b: Tensor, a: Tensor) -> float:
    """Return the squared cosine of both, with its sign: the share that the best multiple of A explains."""
    sizes: Tensor = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
    cosine = float((a * b).sum() / sizes.clamp(min=1e-30))
    return cosine * abs(cosine)
