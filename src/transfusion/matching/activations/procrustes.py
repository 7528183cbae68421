"""Procrustes: the nearest rotation between two sets of activations."""

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
    """Return the covariance of B's units and A's over the last dimension, with both normalised."""
    return unit(b) @ unit(a).transpose(-1, -2)


def nearest_rotation(covariances: Tensor) -> Tensor:
    """Return the orthogonal matrix nearest to a covariance of B and A."""
    u, _, v = torch.linalg.svd(covariances)
    nearest: Tensor = u @ v
    return nearest


def nearest(covariances: Tensor, group: Symmetry) -> Tensor:
    """Return the nearest matrix among those that the symmetry of an axis admits."""
    if group.rotates_pairs:
        return rotate_pairs(split_pairs(covariances, group).angle(), group)
    return nearest_rotation(covariances)


def norm_ratio(b: Tensor, a: Tensor) -> float:
    """Return the ratio of the norms of B's activations and A's."""
    return float(torch.linalg.vector_norm(b) / torch.linalg.vector_norm(a).clamp(min=1e-30))


def writing_rotation(
    activations: Tensor, gradients: Tensor, weight: float, group: Symmetry = Symmetry.PERMUTATION
) -> Tensor:
    """Return the nearest matrix to two covariances together, each divided by its nuclear norm."""
    return nearest(_by_nuclear_norm(activations) + weight * _by_nuclear_norm(gradients), group)


def _by_nuclear_norm(covariances: Tensor) -> Tensor:
    size: Tensor = torch.linalg.matrix_norm(covariances, ord="nuc", keepdim=True)
    return covariances / size.clamp(min=1e-30)


def solve_stream(
    evidence: AxisActivations, id: str, options: FunctionalOptions, maps: Mapping[str, Map]
) -> dict[str, Map]:
    """Solve one point of the residual stream.

    With norms before branches, the rotation is that of the normalised stream, and the norms set the size:
    only what is written to the stream is scaled to B's size. Otherwise rotation and size are those of the
    output of a norm, and what is written passes through that norm.
    """
    pair = evidence.on_stream(id)
    if pair is None:
        return {}
    a, b = (one.T for one in pair)
    produced, read = _sizes(evidence, id, norm_ratio(b, a))
    together = covariance(b, a)
    if options.weights and (by_weights := evidence.weight_covariance(id, maps)) is not None:
        together = unit(together) + options.weights * unit(by_weights)
    writing = _writing(evidence, id, together, options)
    return {id: _rotation(nearest_rotation(together)[None], [produced], [read], options, writing)}


def _writing(
    evidence: AxisActivations, id: str, activations: Tensor, options: FunctionalOptions
) -> Tensor | None:
    """Return the matrix for tensors that write an axis, by gradients as well; None without gradients."""
    if not options.gradients:
        return None
    found = [covariance(piece.b, piece.a) for piece in evidence.gradients(id) if piece.axes == (id,)]
    if not found:
        return None
    group = evidence.architecture.spaces[id].group
    return writing_rotation(activations, torch.stack(found).sum(0), options.gradients, group)[None]


def _sizes(evidence: AxisActivations, id: str, seen: float) -> tuple[float, float]:
    """Return the ratios of norms for writing to a point and for reading from it."""
    before, after = evidence.before_branches(id), evidence.after(id)
    raw = evidence.pair((before or after)[-1], INPUT) if before or after else None
    written = norm_ratio(raw[1], raw[0]) if raw else seen
    return (written, 1.0) if before else (written, seen)


def solve_axis(evidence: AxisActivations, id: str, options: FunctionalOptions) -> dict[str, Map]:
    """Solve an axis without parent and children: the neurons of an MLP, a key shared by all heads, the units
    of heads whose boundaries are ignored.
    """
    pieces = [piece for piece in evidence.pieces(id) if piece.axes == (id,)]
    if not pieces:
        return {}
    b, a = (torch.cat([unit(getattr(piece, one)) for piece in pieces], dim=1) for one in "ba")
    sides = [piece.side for piece in pieces]
    gated = sides.count(OUTPUT) > 1 and INPUT in sides  # unlike q and k, which no module reads
    produced, read = (_mean_size(pieces, side) for side in (OUTPUT, INPUT))
    if (group := evidence.architecture.spaces[id].group).rotates_pairs:
        writing = _writing(evidence, id, b @ a.T, options)
        return {id: _rotation(nearest(b @ a.T, group)[None], [produced], [produced], options, writing)}
    if options.mlp is MlpSolver.ASSIGNED or (
        options.mlp is MlpSolver.AUTO and (gated or _is_rank_deficient(a))
    ):
        return {id: assign((normalise_units(b) @ normalise_units(a).T)[None])}
    writing = _writing(evidence, id, b @ a.T, options)
    return {id: _rotation(nearest_rotation(b @ a.T)[None], [produced], [read], options, writing)}


def _is_rank_deficient(values: Tensor) -> bool:
    """Return whether activations lack some directions, for which no rotation can be found."""
    return int(torch.linalg.matrix_rank(values)) < len(values)


def normalise_units(values: Tensor) -> Tensor:
    """Return every unit's activations scaled to length 1."""
    sizes: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return values / sizes.clamp(min=1e-30)


def _mean_size(pieces: list[AxisPiece], side: str) -> float:
    sizes = [norm_ratio(piece.b, piece.a) for piece in pieces if piece.side == side]
    return float(np.exp(np.mean(np.log(sizes)))) if sizes else 1.0


def _rotation(
    matrix: Tensor,
    produced: list[float],
    read: list[float],
    options: FunctionalOptions,
    writing: Tensor | None = None,
) -> Rotation:
    if not options.scaled:
        produced, read = [1.0] * len(produced), [1.0] * len(read)
    return Rotation(
        matrix.float().numpy(),
        np.array(produced),
        np.array(read),
        None if writing is None else writing.float().numpy(),
    )


def unit(values: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(values)
    return values / size.clamp(min=1e-30)
