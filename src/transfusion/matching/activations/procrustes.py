"""Procrustes: the nearest rotation between two sets of activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.table import Symmetry
from transfusion.matching.activations.axis_activations import AxisActivations, AxisPiece
from transfusion.matching.methods import FunctionalOptions, MlpSolver
from transfusion.matching.solvers.assignment import assign
from transfusion.matching.solvers.polar import polar
from transfusion.matching.solvers.rotary_pairs import rotate_pairs, split_pairs
from transfusion.running.activations import EXACT, INPUT, OUTPUT

SMALLEST = 1e-18
"""The smallest norm that is divided by: the product of two is still a number in float32."""


def covariance(b: Tensor, a: Tensor) -> Tensor:
    """Return the covariance of B's units and A's over the last dimension, with both normalised."""
    return (b @ a.transpose(-1, -2)).div_(product_of_norms(b, a))


def product_of_norms(b: Tensor, a: Tensor) -> float:
    """Return |B|·|A|; of zeros, a number that everything can be divided by."""
    sizes = [torch.linalg.vector_norm(one).clamp(min=SMALLEST) for one in (b, a)]
    return float(sizes[0] * sizes[1])


def nearest(covariances: Tensor, group: Symmetry) -> Tensor:
    """Return the nearest matrix among those that the symmetry of an axis admits."""
    if group.rotates_pairs:
        return rotate_pairs(split_pairs(covariances, group).angle(), group)
    return polar(covariances)


def norm_ratio(b: Tensor, a: Tensor) -> float:
    """Return the ratio of the norms of B's activations and A's."""
    return float(torch.linalg.vector_norm(b) / torch.linalg.vector_norm(a).clamp(min=1e-30))


def mean_ratio(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean of ratios, without those of activations that are all zero."""
    found = [ratio for ratio in ratios if ratio > 0]
    return float(np.exp(np.mean(np.log(found)))) if found else None


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
    del pair, a, b  # before matrices of the same size are needed
    if options.weights and (by_weights := evidence.weight_covariance(id, maps)) is not None:
        together = unit(together) + options.weights * unit(by_weights)
    writing = _writing(evidence, id, together, options)
    return {id: _rotation(polar(together)[None], [produced], [read], options, writing)}


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
    return (written or 1.0, 1.0 if before else seen or 1.0)  # a stream of zeros has no size


def solve_axis(evidence: AxisActivations, id: str, options: FunctionalOptions) -> dict[str, Map]:
    """Solve an axis without parent and children: the neurons of an MLP, a key shared by all heads, the units
    of heads whose boundaries are ignored.
    """
    sums = AxisSums()
    for piece in _own_pieces(evidence, id):
        sums.add(piece)
        del piece  # before the next one is read
    if sums.covariance is None:
        return {}
    gated = sums.sides.count(OUTPUT) > 1 and INPUT in sums.sides  # unlike q and k, which no module reads
    produced, read = sums.ratio(OUTPUT), sums.ratio(INPUT)
    if (group := evidence.architecture.spaces[id].group).rotates_pairs:
        writing = _writing(evidence, id, sums.covariance, options)
        return {
            id: _rotation(nearest(sums.covariance, group)[None], [produced], [produced], options, writing)
        }
    if options.mlp is MlpSolver.ASSIGNED or (
        options.mlp is MlpSolver.AUTO and (gated or not spans(_own_pieces(evidence, id)))
    ):
        return {id: assign(sums.correlation()[None])}
    writing = _writing(evidence, id, sums.covariance, options)
    return {id: _rotation(polar(sums.covariance)[None], [produced], [read], options, writing)}


def _own_pieces(evidence: AxisActivations, id: str) -> Iterator[AxisPiece]:
    return filter(lambda piece: piece.axes == (id,), evidence.pieces(id))


@dataclass
class AxisSums:
    """Sums over the samples of an axis, one piece after the other; every piece counts alike."""

    covariance: Tensor | None = None
    """Of B's units and A's."""
    squares: list[Tensor] = field(default_factory=list)
    """Of every unit of B, and of A."""
    sides: list[str] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """How much larger B's activations are, for every piece."""

    def add(self, piece: AxisPiece) -> None:
        b, a = piece.b, piece.a
        sizes = [torch.linalg.vector_norm(one).clamp(min=SMALLEST) for one in (b, a)]
        squares = [
            (torch.linalg.vector_norm(one, dim=1) / size) ** 2
            for one, size in zip((b, a), sizes, strict=True)
        ]
        share = float(1 / (sizes[0] * sizes[1]))
        if self.covariance is None:
            self.covariance, self.squares = (b @ a.T).mul_(share), squares
        else:
            self.covariance.addmm_(b, a.T, alpha=share)
            self.squares = [total + one for total, one in zip(self.squares, squares, strict=True)]
        self.sides.append(piece.side)
        self.ratios.append(norm_ratio(b, a))

    def correlation(self) -> Tensor:
        """Return the covariance with every unit's activations scaled to length 1; the sums are used up."""
        assert self.covariance is not None
        b, a = (one.sqrt().clamp(min=1e-30) for one in self.squares)
        return self.covariance.div_(b[:, None]).div_(a)

    def ratio(self, side: str) -> float:
        """Return the geometric mean of how much larger B's activations are on one side."""
        found = [ratio for ratio, own in zip(self.ratios, self.sides, strict=True) if own == side]
        return mean_ratio(found) or 1.0


def spans(pieces: Iterable[AxisPiece]) -> bool:
    """Return whether A's activations reach all directions; in others, no rotation can be found.

    Of many units only that is asked for which costs nothing: enough samples, and activations of every unit.
    """
    parts: list[Tensor] = []
    count, size, seen = 0, 0, torch.zeros(())
    for piece in pieces:
        count, size = count + piece.a.shape[1], len(piece.a)
        seen = seen.to(piece.a) + torch.linalg.vector_norm(piece.a, dim=1)
        if size <= EXACT:
            parts.append(unit(piece.a))
        del piece
    if count < size or not bool(seen.all()):
        return False
    return not parts or int(torch.linalg.matrix_rank(torch.cat(parts, dim=1))) == size


def normalise_units(values: Tensor) -> Tensor:
    """Return every unit's activations scaled to length 1."""
    sizes: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return values / sizes.clamp(min=1e-30)


def _rotation(
    matrix: Tensor,
    produced: list[float],
    read: list[float],
    options: FunctionalOptions,
    writing: Tensor | None = None,
) -> Map:
    if not options.scaled:
        produced, read = [1.0] * len(produced), [1.0] * len(read)
    return Map.rotation(
        matrix.float().cpu().numpy(),
        np.array(produced),
        np.array(read),
        None if writing is None else writing.float().cpu().numpy(),
    )


def unit(values: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(values)
    return values / size.clamp(min=1e-30)
