"""Alignment of two models of different shapes.

Blocks are paired by what their branches write, tensors by their roles, and axes by what is read from them and
written to them on the same images or texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment, BlockPath, PartPair, part_pairs
from transfusion.alignment.maps import Map, NormFold
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.layouts import Item, names_in
from transfusion.architecture.table import Symmetry
from transfusion.errors import AlignmentError, MismatchError, UselessResultError
from transfusion.matching.activations import ActivationPair, AxisPiece, RecordedModel, run_both
from transfusion.matching.functional import AxisSums, PredictionQuality, mean_quality, predicted, spans
from transfusion.matching.methods import FunctionalOptions
from transfusion.matching.procrustes import PlanePairs, assign_rectangle, isometry, mean_ratio, norm_ratio
from transfusion.model.model import Model
from transfusion.model.part_roles import Role, TensorPart, place_of, tensor_parts
from transfusion.running.activations import INPUT, OUTPUT, comparable

EXPERT = "expert"
"""The axis of experts, in all tables."""
BRANCHES = ("stream <- vo", "stream <- ffn")
"""What the branches of a block write to the stream."""
LEAST_SHARE = 1e-6
MARGIN = 0.02
"""The least lead over chance, as a share of B's activations that is predicted."""


def align_shapes(
    a: Model,
    b: Model,
    options: FunctionalOptions,
    provenance: Provenance,
    *,
    force_unrelated: bool = False,
    device: str = "cpu",
    on_axis: Callable[[str, int], None] = lambda axis, total: None,
) -> Alignment:
    """Align two models of different shapes; refuse unrelated ones unless ``force_unrelated``."""
    with run_both(a.to_run, b, options, provenance.seed, device) as probed:
        found = match_shapes(probed, provenance, on_axis)
    advice = found.provenance.advice
    if not force_unrelated and advice["found"] < advice["null"] + MARGIN:
        raise UselessResultError(
            f"{a.label} and {b.label} compute unrelated things: A's activations predict"
            f" {advice['found']:.1%} of B's, and {advice['null']:.1%} by chance",
            hint="fine-tune B anew; or insist with `force_unrelated`",
        )
    return found


def match_shapes(
    probed: ActivationPair,
    provenance: Provenance,
    on_axis: Callable[[str, int], None] = lambda axis, total: None,
) -> Alignment:
    """Find π between two models of different shapes."""
    a, b = probed.a.architecture, probed.b.architecture
    stacks = depths(probed.a.model, probed.b.model)
    qualities = {stack: _block_quality(probed, stack, *both) for stack, both in stacks.items()}
    paths = {stack: divided_path(quality) for stack, quality in qualities.items()}
    pairs = list(part_pairs(a, b, paths))
    maps: dict[str, Map] = {}
    measured: dict[str, PredictionQuality] = {}
    evidence = _evidence(probed, pairs)
    for name, axis in evidence.items():
        on_axis(name, len(evidence))
        if axis.samples and axis.held_out:
            maps[name], measured[name] = axis.solve()
    if not maps:
        raise AlignmentError(
            f"{probed.a.model.label} and {probed.b.model.label} have no axis that could be compared",
            hint="choose a base of the same kind",
        )
    every = mean_quality(measured)
    advice = {
        "verdict": "predicted",
        "text": str(every),
        "found": every.found,
        "null": every.null,
        "axes": {name: asdict(one) for name, one in measured.items()},
        "probes": probed.about,
        "blocks": {
            stack: [[round(one, 4) for one in row] for row in table] for stack, table in qualities.items()
        },
        "paths": {stack: [[i, j] for i, j, _ in path] for stack, path in paths.items()},
    }
    used = [pair for pair in pairs if pair.maps <= maps.keys()]
    folds = _folds(probed.a, [pair.source for pair in used])
    folds_b = _folds(probed.b, [pair.target for pair in used])
    made = replace(provenance, advice=advice)
    return Alignment(maps, a.sizes, a.parents, made, folds, b.sizes, folds_b, paths)


def shape_qualities(probed: ActivationPair, alignment: Alignment) -> dict[str, PredictionQuality]:
    """Return how well the maps of an alignment predict B's held-out activations."""
    pairs = alignment.pairs(probed.a.architecture, probed.b.architecture)
    return {
        name: axis.quality(torch.from_numpy(alignment.maps[name].matrix[0]))
        for name, axis in _evidence(probed, pairs).items()
        if axis.held_out
    }


def _folds(recorded: RecordedModel, parts: list[TensorPart]) -> dict[str, NormFold]:
    """Return the norms that tensors read through; of such a norm's own tensors, the norm."""
    found = {part.tensor: recorded.fold(part) for part in parts}
    return {tensor: fold for tensor, fold in found.items() if fold is not None}


# ── blocks ───────────────────────────────────────────────────────────────────────────────────


def depths(a: Model, b: Model) -> dict[str, tuple[int, int]]:
    """Return how many blocks A and B have in every stack that both have; refuse models without such stacks,
    and experts.
    """
    for model in (a, b):
        if any(place_of(id)[2] == EXPERT for id in model.architecture.spaces):
            raise MismatchError(
                f"{model.label} is a mixture of experts, which moves between models of one shape only",
                hint="choose a base of the same shape",
            )
    if a.family.repeats_block != b.family.repeats_block:
        one, other = (a, b) if a.family.repeats_block else (b, a)
        raise MismatchError(
            f"{one.label}, a {one.family.name}, runs one block several times, and the blocks of {other.label}"
            " differ: they do not correspond",
            hint="choose a base of the same kind",
        )
    of_a, of_b = (_depths(model) for model in (a, b))
    if not of_a.keys() & of_b.keys():
        raise MismatchError(
            f"{a.label} is a {a.family.name} and {b.label} a {b.family.name}: they have no blocks that"
            " correspond",
            hint="choose a base of the same kind",
        )
    return {stack: (of_a[stack], of_b[stack]) for stack in sorted(of_a.keys() & of_b.keys())}


def _depths(model: Model) -> dict[str, int]:
    found: dict[str, int] = {}
    for role, part in tensor_parts(model.architecture).items():
        if role.block is not None and part.is_weight:
            found[role.stack] = max(found.get(role.stack, 0), role.block + 1)
    return found


def even_paths(a: Model, b: Model) -> dict[str, BlockPath]:
    """Return paths that divide both depths evenly; they are assumed before the models were run."""
    paths: dict[str, BlockPath] = {}
    for stack, (ours, theirs) in depths(a, b).items():
        steps = max(ours, theirs)
        cells = [(step * ours // steps, step * theirs // steps) for step in range(steps)]
        paths[stack] = tuple((i, j, 1 / sum(at == i for at, _ in cells)) for i, j in cells)
    return paths


def count_axes(a: Model, b: Model) -> int:
    """Return the number of maps that are needed if both depths are divided evenly."""
    pairs = part_pairs(a.architecture, b.architecture, even_paths(a, b))
    return len({name for pair in pairs for name in pair.maps})


def _block_quality(probed: ActivationPair, stack: str, depth_a: int, depth_b: int) -> list[list[float]]:
    """Return how well the branches of A's blocks predict those of B's."""
    written_a, written_b = _branches(probed.a, stack, depth_a), _branches(probed.b, stack, depth_b)
    return [
        [
            fmean(
                [
                    _prediction(theirs, of_a[use])
                    for use, theirs in of_b.items()
                    if use in of_a and len(of_a[use][0]) == len(theirs[0])
                ]
                or [0.0]
            )
            for of_b in written_b
        ]
        for of_a in written_a
    ]


def _branches(recorded: RecordedModel, stack: str, depth: int) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Return what the branches of every block write, on the probes and on the held-out ones."""
    parts = tensor_parts(recorded.architecture)
    found: list[dict[str, tuple[Tensor, Tensor]]] = []
    for block in range(depth):
        here: dict[str, tuple[Tensor, Tensor]] = {}
        for use in BRANCHES:
            if (part := parts.get(Role(stack, block, use))) is None:
                continue
            seen, held_out = (one.part_samples(part, OUTPUT) for one in (recorded, recorded.held_out))
            if seen is not None and held_out is not None:
                here[use] = seen, held_out
        found.append(here)
    return found


def _prediction(of_b: tuple[Tensor, Tensor], of_a: tuple[Tensor, Tensor]) -> float:
    """Return how much of B's held-out activations an isometry predicts that was found on the others."""
    if not of_b[0].abs().sum() or not of_a[0].abs().sum():
        return 0.0
    (a, b), (held_a, held_b) = comparable(of_a[0], of_b[0]), comparable(of_a[1], of_b[1])
    return predicted(held_b.T, isometry(b.T @ a) @ held_a.T)  # a, b: (samples, units)


def divided_path(quality: list[list[float]]) -> BlockPath:
    """Return the pairs of blocks on the best path, each with the share of the change of A's block."""
    path = monotone_path(quality)
    found: list[tuple[int, int, float]] = []
    for i, j in path:
        beside = sum(max(quality[i][other], 0.0) for at, other in path if at == i)
        count = sum(at == i for at, _ in path)
        share = max(quality[i][j], 0.0) / beside if beside > LEAST_SHARE else 1 / count
        found.append((i, j, share))
    return tuple(found)


def monotone_path(quality: Sequence[Sequence[float]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of blocks (of A, of B) with the largest total quality.

    ``quality[i][j]`` is that of A's block i and B's block j. Both ends are paired, the order is kept, every
    block has a partner, and every block of the deeper model has exactly one.
    """
    table = np.asarray(quality, dtype=np.float64)
    if table.shape[0] > table.shape[1]:
        return tuple((i, j) for j, i in monotone_path(table.T.tolist()))
    depth, deeper = table.shape
    best = np.full((depth, deeper), -np.inf)
    best[0, 0] = table[0, 0]
    for j in range(1, deeper):
        for i in range(min(j + 1, depth)):
            before = best[i, j - 1] if i == 0 else max(best[i, j - 1], best[i - 1, j - 1])
            best[i, j] = before + table[i, j]
    path = [(depth - 1, deeper - 1)]
    while path[-1][1]:
        i, j = path[-1]
        stays = i < j and best[i, j - 1] >= (best[i - 1, j - 1] if i else -np.inf)
        path.append((i if stays else i - 1, j - 1))
    return tuple(reversed(path))


# ── maps ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class AxisEvidence:
    """All samples of an axis of B and the axis of A that corresponds to it."""

    probed: ActivationPair
    item_a: Item
    item_b: Item
    samples: list[AxisPiece] = field(default_factory=list)
    held_out: list[AxisPiece] = field(default_factory=list)
    produced: float | None = None
    """How much larger B's activations are before a norm; it takes precedence over the samples."""

    @property
    def on_stream(self) -> bool:
        return self.probed.a.is_point(self.item_a) and self.probed.b.is_point(self.item_b)

    def add(self, ours: Item | TensorPart, theirs: Item | TensorPart, side: str) -> None:
        """Add what both models show at two points of the stream, or at one side of two weights."""
        for probed, kept in ((self.probed, self.samples), (self.probed.held_out, self.held_out)):
            a, b = _samples(probed.a, ours, side), _samples(probed.b, theirs, side)
            if a is not None and b is not None and len(a) == len(b):
                kept.append(AxisPiece.of((), a.T, b.T, side))

    def solve(self) -> tuple[Map, PredictionQuality]:
        """Return the map of the axis, and how well it predicts B's held-out activations."""
        measured = [(self.quality(matrix), matrix) for matrix in self._candidates()]
        quality, matrix = max(measured, key=lambda one: one[0].found)
        written, read = (
            mean_ratio(norm_ratio(one.b, matrix @ one.a) for one in self.samples if one.side == side)
            for side in (OUTPUT, INPUT)
        )
        produced = self.produced or written or read or 1.0
        return Map.rectangular(matrix.float().cpu().numpy(), produced, read or produced), quality

    def quality(self, matrix: Tensor) -> PredictionQuality:
        found = [PredictionQuality.of(one.b, matrix.to(one.a) @ one.a) for one in self.held_out]
        return PredictionQuality.mean(found)

    def _candidates(self) -> list[Tensor]:
        """Return the matrices that the axis may be mapped by, (units of B, units of A)."""
        sums = AxisSums()
        for piece in self.samples:
            sums.add(piece)
        covariances, point = sums.covariance, self.probed.a.is_point(self.item_a)
        assert covariances is not None
        if point and all(_is_centred(one.a) and _is_centred(one.b) for one in self.samples):
            covariances = covariances + 1 / covariances.numel()
        a, b = self.probed.a.architecture, self.probed.b.architecture
        groups = tuple(
            one.spaces[list(names_in(item))[-1]].group for one, item in ((b, self.item_b), (a, self.item_a))
        )
        heads = tuple(
            prod(one.sizes[name] for name in list(names_in(item))[:-1])
            for one, item in ((b, self.item_b), (a, self.item_a))
        )
        if all(group.rotates_pairs for group in groups) or Symmetry.PERMUTATION not in groups:
            return [matched_heads(covariances, (heads[0], heads[1]), (groups[0], groups[1]))]
        if heads != (1, 1) or point:
            return [isometry(covariances)]
        candidates = [isometry(covariances)] if spans(self.samples) else []
        similar = sums.correlation()
        assigned = torch.zeros_like(similar)
        assigned[assign_rectangle(similar)] = 1
        return [assigned, *candidates]


def _samples(recorded: RecordedModel, shown: Item | TensorPart, side: str) -> Tensor | None:
    if isinstance(shown, TensorPart):
        return recorded.part_samples(shown, side)
    return recorded.stream(str(shown), first=True)


def _evidence(probed: ActivationPair, pairs: Sequence[PartPair]) -> dict[str, AxisEvidence]:
    """Collect what both models write to an axis and read from it."""
    found: dict[str, AxisEvidence] = {}
    for pair in pairs:
        source, target = pair.source, pair.target
        for name, side, ours, theirs in (
            (pair.writes, OUTPUT, source.output, target.output),
            (pair.reads, INPUT, source.input, target.input),
        ):
            if name is None or ours is None or theirs is None:
                continue
            axis = found.setdefault(name, AxisEvidence(probed, ours, theirs))
            if not axis.on_stream and target.is_weight:
                axis.add(source, target, side)
            elif axis.on_stream and not axis.samples:
                axis.add(ours, theirs, INPUT)
                raw = probed.a.raw(str(ours)), probed.b.raw(str(theirs))
                if raw[0] is not None and raw[1] is not None:
                    axis.produced = norm_ratio(raw[1], raw[0])
    return found


def _is_centred(values: Tensor) -> bool:
    """Return whether the mean over all units is zero in every sample, as behind LayerNorm.

    The direction in which all units are equal then has no activations, and is the same one in both models.
    """
    mean, size = values.mean(dim=0), values.square().mean(dim=0).sqrt()
    return bool((mean.abs() < 1e-3 * size).all())


def matched_heads(covariances: Tensor, heads: tuple[int, int], groups: tuple[Symmetry, Symmetry]) -> Tensor:
    """Assign A's heads to B's. Units rotate in the planes of rotary positions; others stay in their places,
    and nothing moves between heads of other sizes. Where B has more heads, the others take the head that fits
    best.
    """
    ours, theirs = heads
    sizes = covariances.shape[0] // ours, covariances.shape[1] // theirs
    # (heads of B, heads of A, units of B, units of A)
    blocks = covariances.reshape(ours, sizes[0], theirs, sizes[1]).movedim(2, 1)
    matrix = torch.zeros_like(covariances).reshape(ours, sizes[0], theirs, sizes[1])
    if all(group.rotates_pairs for group in groups):
        pairs = PlanePairs(groups, sizes)
        planes = pairs.split(blocks)  # (B's head, A's head, plane)
        agreement, units = planes.abs().sum(-1), pairs.rotation(planes.angle())
    elif sizes[0] == sizes[1]:
        agreement = torch.diagonal(blocks, dim1=2, dim2=3).sum(-1)
        units = torch.eye(sizes[0]).to(blocks).expand_as(blocks)
    else:
        return torch.zeros_like(covariances)
    rows, columns = assign_rectangle(agreement)
    partner = dict(enumerate(agreement.argmax(1).tolist())) if ours > theirs else {}
    for i, j in {**partner, **dict(zip(rows.tolist(), columns.tolist(), strict=True))}.items():
        matrix[i, :, j] = units[i, j]
    return matrix.reshape(covariances.shape)
