"""Functional alignment, and the choice of `auto` between identity, permutation and functional maps.

How A's units correspond to B's is told from what both compute on the same probes. `procrustes` and
`heads_and_experts` solve for the maps of one axis each, and `prediction_quality` measures them on held-out
samples. Axes are solved side by side on an engine, in three stages: neurons and experts, then heads, then the
points of the stream, for which the weights of all others count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map, NormFold, move_tensor
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import Architecture, HeadPolicy
from transfusion.architecture.layouts import ANONYMOUS, Layout, Name
from transfusion.errors import AlignmentError, ArchitectureError, LibraryError, listing
from transfusion.matching.activations import ActivationPair, AxisPiece, run_on_probes
from transfusion.matching.assignment import assign
from transfusion.matching.heads_and_experts import ExpertStack, expert_stacks, match_experts, match_heads
from transfusion.matching.methods import FunctionalOptions, MlpSolver
from transfusion.matching.procrustes import SMALLEST, covariance, mean_ratio, nearest, norm_ratio, polar, unit
from transfusion.matching.search import Step
from transfusion.matching.weights import WeightPair
from transfusion.model.model import Model
from transfusion.running.activations import EXACT, INPUT, OUTPUT
from transfusion.running.streaming import RunConfig
from transfusion.runtime.engines import Engine
from transfusion.runtime.progress import warn

CLEARLY = 0.02
"""How much more of B's activations must be predicted for units to move between heads."""
NEARLY = 0.9
"""The share of the best prediction from which a simpler choice is preferred."""
IDENTITY, PERMUTATION, FUNCTIONAL = "identity", "permutation", "functional"


def require_rotatable(*models: Model) -> None:
    """Refuse models whose stream cannot be rotated, as functional alignment does."""
    for model in models:
        if why := model.architecture.unrotated:
            raise AlignmentError(
                f"{model.label}: functional alignment rotates the residual stream, and that of a"
                f" {model.family.name} {why}",
                hint='choose a method that permutes, such as `method="guarded"`',
            )


def align_functional(
    weights: WeightPair,
    options: FunctionalOptions,
    metadata: Provenance,
    on_step: Callable[[Step], None],
    engine: Engine,
    run_config: RunConfig,
) -> Alignment:
    """Align by activations, with a rotation for every axis that allows one."""
    with run_on_probes(weights.a, weights.b, options, metadata.seed, run_config) as probed:
        found = _best_heads(probed, options, on_step, engine)
    return _aligned(found, replace(metadata, advice=_advice_of(found.quality, probed)))


def _aligned(found: Correspondence, metadata: Provenance) -> Alignment:
    architecture = found.architecture
    metadata = replace(metadata, policy=architecture.policy, architecture=architecture.digest(), objective=())
    return Alignment.of(found.maps, architecture, metadata, found.folds)


def _best_heads(
    probed: ActivationPair, options: FunctionalOptions, on_step: Callable[[Step], None], engine: Engine
) -> Correspondence:
    """Solve with units inside matched heads, or across heads where that is clearly better.

    Neurons are solved once. So are the points of the stream, unless units do move between heads.
    """
    within = correspond(probed, options, engine, on_axis=counting("pass", on_step))
    if not options.freely:
        return within
    flat = probed.under(replace(within.architecture.policy, heads=HeadPolicy.FLAT))
    across = correspond(flat, options, engine, before=within, on_axis=counting("flat heads", on_step))
    if mean_quality(across.quality).found <= mean_quality(within.quality).found + CLEARLY:
        return within
    del within
    across = across.branches()
    return correspond(flat, options, engine, before=across, on_axis=counting("stream", on_step))


def counting(name: str, on_step: Callable[[Step], None]) -> Callable[[str, int], None]:
    """Return what reports every axis of one pass as a step; it is called with an axis and their number."""
    done = count(1)
    return lambda axis, total: on_step(Step(name, 0, next(done), total, axis, None))


def align_auto(
    weights: WeightPair,
    matched: Mapping[str, Map],
    options: FunctionalOptions,
    metadata: Provenance,
    on_step: Callable[[Step], None],
    engine: Engine,
    run_config: RunConfig,
) -> Alignment:
    """Choose the simplest of identity, permutation and functional maps that predicts B about as well as any.

    If the models cannot be run, the permutation found by the search is kept.
    """
    try:
        require_rotatable(weights.a)
        with run_on_probes(weights.a, weights.b, options, metadata.seed, run_config) as probed:
            found = _best_heads(probed, options, on_step, engine)
            ways = {
                IDENTITY: prediction_qualities(probed.held_out, {}),
                PERMUTATION: prediction_qualities(probed.held_out, matched),
                FUNCTIONAL: found.quality,
            }
            info = {name: _advice_of(quality, probed) for name, quality in ways.items()}
    except (AlignmentError, ArchitectureError, LibraryError) as error:
        if not weights.a.architecture.unrotated:
            why = f"{error.message}; {error.hint}"
            warn(f"only weights were compared, because the models cannot be run: {why}")
        advice = {**metadata.advice, "chosen": PERMUTATION, "not_tried": {FUNCTIONAL: str(error)}}
        return Alignment.of(dict(matched), weights.architecture, replace(metadata, advice=advice))
    predicted = {name: mean_quality(quality).found for name, quality in ways.items()}
    chosen = next(name for name in predicted if predicted[name] >= NEARLY * max(predicted.values()))
    by_weights = dict(metadata.advice)
    compared = {"chosen": chosen, "predicted_by": predicted}
    if chosen == PERMUTATION:
        text = f"{by_weights['text']}; {_compared(chosen, predicted)}"
        advice = {**by_weights, **compared, "text": text}
        return Alignment.of(dict(matched), weights.architecture, replace(metadata, advice=advice))
    text = _compared(chosen, predicted)
    advice = {**info[chosen], **compared, "text": text, "by_weights": by_weights}
    if chosen == IDENTITY:
        return Alignment.of({}, weights.architecture, replace(metadata, advice=advice))
    return _aligned(found, replace(metadata, advice=advice))


def _advice_of(quality: Mapping[str, PredictionQuality], probed: ActivationPair) -> dict[str, Any]:
    """Return the prediction quality as advice for the provenance."""
    every = mean_quality(quality)
    return {
        "verdict": "predicted",
        "text": str(every),
        **asdict(every),
        "axes": {id: asdict(one) for id, one in quality.items()},
        "probes": probed.about,
    }


def _compared(chosen: str, predicted: Mapping[str, float]) -> str:
    others = ", ".join(f"{name} {max(share, 0):.0%}" for name, share in predicted.items() if name != chosen)
    simplest = ", the simplest that predicts about as much as any" if chosen != FUNCTIONAL else ""
    return f"{chosen} was chosen{simplest}: it predicts {predicted[chosen]:.0%} of B's activations ({others})"


@dataclass(frozen=True)
class Correspondence:
    """The maps of functional alignment, and how well they predict B's held-out activations."""

    architecture: Architecture
    maps: dict[str, Map] = field(default_factory=dict)
    quality: dict[str, PredictionQuality] = field(default_factory=dict)
    """By axis without a parent, its children included."""
    folds: dict[str, NormFold] = field(default_factory=dict)
    """For every tensor that reads the stream through a norm, the norm."""

    def branches(self) -> Correspondence:
        """Return the same without the points of the stream."""
        spaces = self.architecture.spaces
        maps = {id: map_ for id, map_ in self.maps.items() if spaces[id].stream is None}
        quality = {id: one for id, one in self.quality.items() if spaces[id].stream is None}
        return replace(self, maps=maps, quality=quality)


def correspond(
    probed: ActivationPair,
    options: FunctionalOptions,
    engine: Engine,
    *,
    before: Correspondence | None = None,
    on_axis: Callable[[str, int], None] = lambda axis, total: None,
) -> Correspondence:
    """Find a map for every axis that may move.

    ``before`` has the maps under another policy: axes that are the same under both are not solved again.
    ``on_axis`` is called with every axis, and how many there are.
    """
    found = Correspondence(probed.architecture, folds=probed.folds)
    moving, parents = probed.architecture.moving(), probed.parent_axes
    stacks = expert_stacks(probed)
    alone = [space.id for space in moving if space.parent is None and space.stream is None]
    branches = [*stacks, *(id for id in alone if id not in {*parents, *stacks})]
    stages = [branches, parents, [space.id for space in moving if space.stream is not None]]
    if before is not None:
        stages = [_taken_over(found, before, ids) for ids in stages]
    total = sum(map(len, stages))
    for ids in stages:  # heads need the axes that they share, and the stream needs all others
        solve = partial(_solve, probed, options, stacks, dict(found.maps))
        results = engine.map(solve, ids, on_result=lambda axis, result: on_axis(axis, total))
        for id, (maps, quality) in zip(ids, results, strict=True):
            found.maps.update(maps)
            if quality is not None:
                found.quality[id] = quality
    known = probed.architecture.backbone_spaces  # a class may not run a head that its file has: it stays
    missing = [space.id for space in moving if space.id not in found.maps and space.id in known]
    if missing:
        raise AlignmentError(
            f"no module of {probed.a.model.label} shows what the units of {listing(missing, 3)} compute",
            hint='choose a method that compares weights, such as `method="guarded"`',
        )
    return found


def _taken_over(found: Correspondence, before: Correspondence, ids: Sequence[str]) -> list[str]:
    """Take over the maps of axes that have not changed, with their children; return the others."""
    left: list[str] = []
    spaces = found.architecture.spaces, before.architecture.spaces
    for id in ids:
        family = {id} | {one.id for some in spaces for one in some.values() if one.parent == id}
        moved = [one for one in family if one in before.maps]
        if moved and all(spaces[0].get(one) == spaces[1].get(one) for one in family):
            found.maps.update({one: before.maps[one] for one in moved})
            if id in before.quality:
                found.quality[id] = before.quality[id]
        else:
            left.append(id)
    return left


def _solve(
    probed: ActivationPair,
    options: FunctionalOptions,
    stacks: Mapping[str, ExpertStack],
    known: Mapping[str, Map],
    id: str,
) -> tuple[dict[str, Map], PredictionQuality | None]:
    """Return the maps of an axis and of its children, and how well they predict B."""
    space = probed.architecture.spaces[id]
    if id in stacks:
        maps = match_experts(stacks[id])
    elif space.stream is not None:
        maps = solve_stream(probed, id, options, known)
    elif id in probed.parent_axes:
        maps = match_heads(probed, id, options, known)
    else:
        maps = solve_axis(probed, id, options)
    moves = id in probed.moving and space.parent is None
    every = {**known, **maps}  # the units within heads may have been solved before
    return maps, axis_quality(probed.held_out, id, every) if moves else None


# ── one axis ─────────────────────────────────────────────────────────────────────────────────


def solve_stream(
    probed: ActivationPair, id: str, options: FunctionalOptions, maps: Mapping[str, Map]
) -> dict[str, Map]:
    """Solve one point of the residual stream.

    With norms before branches, the rotation is that of the normalised stream, and the norms set the size:
    only what is written to the stream is scaled to B's size. Otherwise rotation and size are those of the
    output of a norm, and what is written passes through that norm.
    """
    pair = probed.on_stream(id)
    if pair is None:
        return {}
    a, b = (one.T for one in pair)  # (units, samples)
    seen, together = norm_ratio(b, a), covariance(b, a)
    del pair, a, b  # before matrices of the same size are needed
    raw = probed.a.raw(id), probed.b.raw(id)
    written = seen if raw[0] is None or raw[1] is None else norm_ratio(raw[1], raw[0])
    read = 1.0 if probed.a.pre_norms(id) else seen or 1.0  # a stream of zeros has no size
    if options.weights and (by_weights := probed.weight_covariance(id, maps)) is not None:
        together = unit(together) + options.weights * unit(by_weights)
    return {id: _rotation(polar(together), written or 1.0, read, options)}


def solve_axis(probed: ActivationPair, id: str, options: FunctionalOptions) -> dict[str, Map]:
    """Solve an axis without parent and children: the neurons of an MLP, a key shared by all heads, the units
    of heads whose boundaries are ignored.
    """
    sums = AxisSums()
    for piece in _own_pieces(probed, id):
        sums.add(piece)
        del piece  # before the next one is read
    if sums.covariance is None:
        return {}
    gated = sums.sides.count(OUTPUT) > 1 and INPUT in sums.sides  # unlike q and k, which no module reads
    produced, read = sums.ratio(OUTPUT), sums.ratio(INPUT)
    group = probed.architecture.spaces[id].group
    if group.rotates_pairs:
        read = produced
    elif options.mlp is MlpSolver.ASSIGNED or (
        options.mlp is MlpSolver.AUTO and (gated or not spans(_own_pieces(probed, id)))
    ):
        return {id: assign(sums.correlation()[None])}
    return {id: _rotation(nearest(sums.covariance, group), produced, read, options)}


def _own_pieces(probed: ActivationPair, id: str) -> Iterator[AxisPiece]:
    return filter(lambda piece: piece.axes == (id,), probed.pieces(id))


def _rotation(matrix: Tensor, produced: float, read: float, options: FunctionalOptions) -> Map:
    scales = [produced, read] if options.scaled else [1.0, 1.0]
    return Map.rotation(matrix[None].float().cpu().numpy(), scales[:1], scales[1:])


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
            self.covariance, self.squares = (b @ a.T).mul_(share), squares  # (units of B, units of A)
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


# ── how much is predicted ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PredictionQuality:
    """The share of B's activations that is predicted from A's, on held-out samples."""

    found: float
    identity: float
    """The same with the identity; 0 between models of different shapes."""
    null: float
    """The same with A's samples in another order: what all of B's activations have in common."""

    def __str__(self) -> str:
        unmoved = f"{self.identity:.0%} with nothing moved and " if self.identity else ""
        return (
            f"{self.found:.0%} of B's activations are predicted from A's, {unmoved}{self.null:.0%} by chance"
        )

    @classmethod
    def of(cls, b: Tensor, moved: Tensor, a: Tensor | None = None) -> PredictionQuality:
        """Measure activations of A after a map; ``a`` are those before."""
        null = torch.roll(moved, moved.shape[-1] // 3 + 1, dims=-1)
        return cls(predicted(b, moved), 0.0 if a is None else predicted(b, a), predicted(b, null))

    @classmethod
    def mean(cls, found: Sequence[PredictionQuality]) -> PredictionQuality:
        names = ("found", "identity", "null")
        return cls(*(fmean([getattr(one, name) for one in found] or [0.0]) for name in names))


def predicted(b: Tensor, a: Tensor) -> float:
    """Return the squared cosine of both, with its sign: the share that the best multiple of A explains."""
    # torch's norm loses 0.3 % of 40 million numbers in float32, and its sum nothing
    sizes: Tensor = a.square().sum().sqrt() * b.square().sum().sqrt()
    cosine = float((a * b).sum() / sizes.clamp(min=1e-30))
    return cosine * abs(cosine)


def mean_quality(found: Mapping[str, PredictionQuality]) -> PredictionQuality:
    """Return the mean over all axes."""
    return PredictionQuality.mean(list(found.values()))


def prediction_qualities(held_out: ActivationPair, maps: Mapping[str, Map]) -> dict[str, PredictionQuality]:
    """Return the quality of maps for all free axes: points of the stream, heads with their units, neurons.

    Axes without recorded activations are left out.
    """
    ids = [space.id for space in held_out.architecture.moving() if space.parent is None]
    found = {id: axis_quality(held_out, id, maps) for id in ids}
    return {id: one for id, one in found.items() if one is not None}


def axis_quality(held_out: ActivationPair, id: str, maps: Mapping[str, Map]) -> PredictionQuality | None:
    """Return the quality of the maps of one axis and of its children; None without activations."""
    architecture, found = held_out.architecture, list[PredictionQuality]()
    for piece in _held_out_pieces(held_out, id):
        layout = Layout((*map(Name, piece.axes), Name(ANONYMOUS)))
        here = {id: maps[id] for id in piece.axes if id in maps}
        moved = move_tensor(piece.a, layout, here, architecture.sizes, architecture.parents)
        found.append(PredictionQuality.of(piece.b, moved, piece.a))
    return PredictionQuality.mean(found) if found else None


def _held_out_pieces(held_out: ActivationPair, id: str) -> Iterator[AxisPiece]:
    """Yield the activations of an axis and of its children."""
    if held_out.architecture.spaces[id].stream is None:
        yield from (piece for piece in held_out.pieces(id) if piece.axes[0] == id)
    elif (pair := held_out.on_stream(id)) is not None:
        yield AxisPiece.of((id,), pair[0].T, pair[1].T, INPUT)
