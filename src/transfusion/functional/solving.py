"""Solving: the nearest rotation between two sets of activations, and how near it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transfusion.functional.axes import Evidence, Piece
from transfusion.functional.listening import MADE, READ
from transfusion.maps import Map, Rotation
from transfusion.methods import Functional, Mlp
from transfusion.planes import in_planes, turn
from transfusion.solvers.assignment import assign
from transfusion.tables import Group


@dataclass(frozen=True)
class Quality:
    """The share of B's activations that is predicted from A's, on samples that were not used to find out."""

    found: float
    identity: float
    null: float
    """The same with the samples of one model in another order: what chance can do."""


def covariance(b: Tensor, a: Tensor) -> Tensor:
    """How B's units go with A's, over samples in the last dimension; the sizes of both do not matter."""
    return unit(b) @ unit(a).transpose(-1, -2)


def nearest_rotation(covariances: Tensor) -> Tensor:
    """The orthogonal matrix that goes with a covariance of B and A best."""
    u, _, v = torch.linalg.svd(covariances)
    nearest: Tensor = u @ v
    return nearest


def nearest(covariances: Tensor, group: Group) -> Tensor:
    """The same among the matrices that an axis of this group admits."""
    if group.turns:
        return turn(in_planes(covariances, group).angle(), group)
    return nearest_rotation(covariances)


def larger(b: Tensor, a: Tensor) -> float:
    """How much larger B's activations are."""
    return float(torch.linalg.vector_norm(b) / torch.linalg.vector_norm(a).clamp(min=1e-30))


def stream(
    evidence: Evidence, id: str, options: Functional, quality: dict[str, Quality], maps: Mapping[str, Map]
) -> dict[str, Map]:
    """One point of the residual stream.

    Where branches read it through a norm, directions are those of the normalised stream, and the norm takes
    care of its size: only what is written to the stream must be of B's size. Otherwise directions and
    size are those of the stream that a norm has put out, and what is written goes through that norm.
    """
    before = [norm for norm in evidence.before_branches(id) if evidence.pair(norm, MADE)]
    if before:
        pairs = [pair for norm in before if (pair := evidence.normalised(norm))]
        raw = evidence.pair(before[0], READ)
        produced, read = larger(raw[1], raw[0]) if raw else 1.0, 1.0
    else:
        after = [norm for norm, point in evidence.norms.items() if point == id and evidence.pair(norm, MADE)]
        pairs = [pair for norm in after[-1:] if (pair := evidence.pair(norm, MADE))]
        if not pairs:
            pieces = [piece for piece in evidence.pieces(id) if piece.axes == (id,) and piece.side == READ]
            pairs = [(piece.a.T, piece.b.T) for piece in pieces[:1]]
        raw = evidence.pair(after[-1], READ) if after else None
        read = larger(pairs[0][1], pairs[0][0]) if pairs else 1.0
        produced = larger(raw[1], raw[0]) if raw else read
    if not pairs:
        return {}
    a, b = (torch.cat([pair[which] for pair in pairs]).T for which in (0, 1))
    quality[id] = _quality(b, a)
    together = covariance(b, a)
    if options.weights and (weighed := evidence.weighed(id, maps)) is not None:
        together = unit(together) + options.weights * unit(weighed)
    return {id: _rotation(nearest_rotation(together)[None], [produced], [read], options)}


def alone(evidence: Evidence, id: str, options: Functional, quality: dict[str, Quality]) -> dict[str, Map]:
    """An axis that lies within nothing and holds nothing: the neurons of an MLP, a key for all heads."""
    pieces = [piece for piece in evidence.pieces(id) if piece.axes == (id,)]
    if not pieces:
        return {}
    b, a = (torch.cat([unit(getattr(piece, one)) for piece in pieces], dim=1) for one in "ba")
    quality[id] = _quality(b, a)
    makers = sum(piece.side == MADE for piece in pieces)
    produced, read = (_mean_size(pieces, side) for side in (MADE, READ))
    if (group := evidence.architecture.spaces[id].group).turns:
        return {id: _rotation(nearest(b @ a.T, group)[None], [produced], [produced], options)}
    if options.mlp is Mlp.ASSIGNED or (options.mlp is Mlp.AUTO and (makers > 1 or _is_flat(a))):
        return {id: assign((each_unit(b) @ each_unit(a).T)[None])}
    return {id: _rotation(nearest_rotation(b @ a.T)[None], [produced], [read], options)}


def _is_flat(values: Tensor) -> bool:
    """Whether some directions never occur, so that nothing tells where they should be turned."""
    return int(torch.linalg.matrix_rank(values)) < len(values)


def each_unit(values: Tensor) -> Tensor:
    """Every unit's activations, of one length: what goes with what, however large."""
    sizes: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return values / sizes.clamp(min=1e-30)


def _mean_size(pieces: list[Piece], side: str) -> float:
    sizes = [larger(piece.b, piece.a) for piece in pieces if piece.side == side]
    return float(np.exp(np.mean(np.log(sizes)))) if sizes else 1.0


def _rotation(matrix: Tensor, produced: list[float], read: list[float], options: Functional) -> Rotation:
    if not options.scaled:
        produced, read = [1.0] * len(produced), [1.0] * len(read)
    return Rotation(matrix.float().numpy(), np.array(produced), np.array(read))


def unit(values: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(values)
    return values / size.clamp(min=1e-30)


def _quality(b: Tensor, a: Tensor) -> Quality:
    """What is predicted of every second sample, from a rotation found on the others."""
    learn, test = slice(0, None, 2), slice(1, None, 2)
    matrix = nearest_rotation(covariance(b[:, learn], a[:, learn]))
    turned = torch.roll(a, a.shape[1] // 3, dims=1)
    chance = nearest_rotation(covariance(b[:, learn], turned[:, learn]))
    return Quality(
        _predicted(b[:, test], matrix @ a[:, test]),
        _predicted(b[:, test], a[:, test]),
        _predicted(b[:, test], chance @ turned[:, test]),
    )


def _predicted(b: Tensor, a: Tensor) -> float:
    """The squared cosine of the two, with its sign: the share that the best multiple of one explains."""
    cosine = float((unit(a) * unit(b)).sum())
    return cosine * abs(cosine)
