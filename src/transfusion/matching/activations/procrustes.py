"""Solving: the nearest rotation between two sets of activations, and how near it is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.maps import Map, Rotation
from transfusion.alignment.rotary_pairs import rotate_pairs, split_pairs
from transfusion.architecture.table import Symmetry
from transfusion.live.activations import INPUT, OUTPUT
from transfusion.matching.activations.axis_activations import AxisActivations, AxisPiece
from transfusion.matching.methods import FunctionalOptions, MlpSolver
from transfusion.matching.solvers.assignment import assign


def covariance(b: Tensor, a: Tensor) -> Tensor:
    """How B's units go with A's, over samples in the last dimension; the sizes of both do not matter."""
    return unit(b) @ unit(a).transpose(-1, -2)


def nearest_rotation(covariances: Tensor) -> Tensor:
    """The orthogonal matrix that goes with a covariance of B and A best."""
    u, _, v = torch.linalg.svd(covariances)
    nearest: Tensor = u @ v
    return nearest


def nearest(covariances: Tensor, group: Symmetry) -> Tensor:
    """The same among the matrices that an axis of this group admits."""
    if group.turns:
        return rotate_pairs(split_pairs(covariances, group).angle(), group)
    return nearest_rotation(covariances)


def larger(b: Tensor, a: Tensor) -> float:
    """How much larger B's activations are."""
    return float(torch.linalg.vector_norm(b) / torch.linalg.vector_norm(a).clamp(min=1e-30))


def solve_stream(
    evidence: AxisActivations, id: str, options: FunctionalOptions, maps: Mapping[str, Map]
) -> dict[str, Map]:
    """One point of the residual stream.

    Where branches read it through a norm, directions are those of the normalised stream, and the norm takes
    care of its size: only what is written to the stream must be of B's size. Otherwise directions and
    size are those of the stream that a norm has put out, and what is written goes through that norm.
    """
    pair = evidence.on_stream(id)
    if pair is None:
        return {}
    a, b = (one.T for one in pair)
    produced, read = _sizes(evidence, id, larger(b, a))
    together = covariance(b, a)
    if options.weights and (weighed := evidence.weighed(id, maps)) is not None:
        together = unit(together) + options.weights * unit(weighed)
    return {id: _rotation(nearest_rotation(together)[None], [produced], [read], options)}


def _sizes(evidence: AxisActivations, id: str, seen: float) -> tuple[float, float]:
    """How much larger what B writes to a point is, and what it reads from there."""
    before, after = evidence.before_branches(id), evidence.after(id)
    raw = evidence.pair((before or after)[-1], INPUT) if before or after else None
    written = larger(raw[1], raw[0]) if raw else seen
    return (written, 1.0) if before else (written, seen)


def solve_axis(evidence: AxisActivations, id: str, options: FunctionalOptions) -> dict[str, Map]:
    """An axis that lies within nothing and holds nothing: the neurons of an MLP, a key for all heads, the
    units of heads whose boundaries are ignored.
    """
    pieces = [piece for piece in evidence.pieces(id) if piece.axes == (id,)]
    if not pieces:
        return {}
    b, a = (torch.cat([unit(getattr(piece, one)) for piece in pieces], dim=1) for one in "ba")
    sides = [piece.side for piece in pieces]
    gated = sides.count(OUTPUT) > 1 and INPUT in sides  # q and k meet each other, and nobody reads them
    produced, read = (_mean_size(pieces, side) for side in (OUTPUT, INPUT))
    if (group := evidence.architecture.spaces[id].group).turns:
        return {id: _rotation(nearest(b @ a.T, group)[None], [produced], [produced], options)}
    if options.mlp is MlpSolver.ASSIGNED or (options.mlp is MlpSolver.AUTO and (gated or _is_flat(a))):
        return {id: assign((solve_units(b) @ solve_units(a).T)[None])}
    return {id: _rotation(nearest_rotation(b @ a.T)[None], [produced], [read], options)}


def _is_flat(values: Tensor) -> bool:
    """Whether some directions never occur, so that nothing tells where they should be turned."""
    return int(torch.linalg.matrix_rank(values)) < len(values)


def solve_units(values: Tensor) -> Tensor:
    """Every unit's activations, of one length: what goes with what, however large."""
    sizes: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return values / sizes.clamp(min=1e-30)


def _mean_size(pieces: list[AxisPiece], side: str) -> float:
    sizes = [larger(piece.b, piece.a) for piece in pieces if piece.side == side]
    return float(np.exp(np.mean(np.log(sizes)))) if sizes else 1.0


def _rotation(
    matrix: Tensor, produced: list[float], read: list[float], options: FunctionalOptions
) -> Rotation:
    if not options.scaled:
        produced, read = [1.0] * len(produced), [1.0] * len(read)
    return Rotation(matrix.float().numpy(), np.array(produced), np.array(read))


def unit(values: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(values)
    return values / size.clamp(min=1e-30)
