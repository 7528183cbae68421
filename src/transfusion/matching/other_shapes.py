"""Alignment of two models of different shapes.

Blocks are paired by what their branches write, tensors by their roles, and axes by what is read from them and
written to them on the same images or texts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment, NormFold
from transfusion.alignment.maps import Map
from transfusion.alignment.part_pairs import BlockPath, PartPair, part_pairs
from transfusion.alignment.provenance import Provenance
from transfusion.errors import AlignmentError, MismatchError, UselessResultError
from transfusion.matching.activations.axis_activations import RecordedModel
from transfusion.matching.activations.prediction_quality import PredictionQuality, mean_quality
from transfusion.matching.activations.procrustes import norm_ratio
from transfusion.matching.methods import FunctionalOptions
from transfusion.matching.solvers.rectangular import (
    AxisEvidence,
    RectangularSolver,
    Sample,
    monotone_path,
    prediction,
)
from transfusion.model.model import Model
from transfusion.model.part_roles import Role, TensorPart, place_of, tensor_parts
from transfusion.running.activations import INPUT, OUTPUT, record_activations
from transfusion.running.building import build
from transfusion.running.live_model import RunningModel
from transfusion.running.probes.pairs import paired_probes
from transfusion.running.probes.probed_model import ProbedModel

EXPERT = "expert"
"""The axis of experts, in all tables."""
BRANCHES = ("stream <- vo", "stream <- ffn")
"""What the branches of a block write to the stream."""
LEAST_SHARE = 1e-6
MARGIN = 0.02
"""How much more of B's activations than by chance must be predicted."""


@dataclass(frozen=True)
class RecordedPair:
    """Two models of different shapes, run on the same inputs."""

    a: RecordedModel
    b: RecordedModel
    about: str


@contextmanager
def run_both(a: Model, b: Model, options: FunctionalOptions, seed: int) -> Iterator[RecordedPair]:
    """Run two models on the same inputs; their activations are on disk for the ``with`` block."""
    with tempfile.TemporaryDirectory() as folder:
        subjects = [ProbedModel(model, build(model, torch.float32)) for model in (a, b)]
        threads = torch.get_num_threads()
        running = [RunningModel(one.module, one.model.family, threads) for one in subjects]
        own = None if options.calibrate is None else Path(options.calibrate)
        probes = paired_probes(subjects[0], subjects[1], options.probes, seed, own)
        recorded = []
        given = probes.of_a, probes.of_b
        for subject, runs, shown, name in zip(subjects, running, given, "ab", strict=True):
            place = Path(folder) / name
            place.mkdir()
            store = record_activations(
                subject.model, runs, shown.batches, place, options.samples, places=shown.places, branches=True
            )
            recorded.append(RecordedModel(subject.model, store))
        del subjects, running
        yield RecordedPair(recorded[0], recorded[1], probes.about)


def even_paths(a: Model, b: Model) -> dict[str, BlockPath]:
    """Return paths that divide both depths evenly; they are assumed before the models were run."""
    paths: dict[str, BlockPath] = {}
    for stack, (ours, theirs) in depths(a, b).items():
        steps = max(ours, theirs)
        cells = [(step * ours // steps, step * theirs // steps) for step in range(steps)]
        paths[stack] = tuple((i, j, 1 / sum(at == i for at, _ in cells)) for i, j in cells)
    return paths


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


def count_axes(a: Model, b: Model) -> int:
    """Return the number of maps that are needed if both depths are divided evenly."""
    pairs = part_pairs(a.architecture, b.architecture, even_paths(a, b))
    return len({name for pair in pairs for name in pair.maps})


@dataclass(frozen=True)
class ShapeMatching:
    """Finds π between two models of different shapes."""

    a: RecordedModel
    b: RecordedModel
    about: str
    on_axis: Callable[[str, int], None] = lambda axis, total: None

    @cached_property
    def _depths(self) -> dict[str, tuple[int, int]]:
        return depths(self.a.model, self.b.model)

    def find(self, provenance: Provenance) -> Alignment:
        qualities = {stack: self._block_quality(stack) for stack in self._depths}
        paths = {stack: divided_path(quality) for stack, quality in qualities.items()}
        pairs = list(part_pairs(self.a.architecture, self.b.architecture, paths))
        maps, predicted = self._maps(pairs)
        every = mean_quality(predicted)
        advice = {
            "verdict": "predicted",
            "text": f"{every.found:.0%} of B's activations are predicted from A's, {every.null:.0%} by"
            " chance",
            "found": every.found,
            "null": every.null,
            "axes": {name: asdict(one) for name, one in predicted.items()},
            "probes": self.about,
            "blocks": _rounded(qualities),
            "paths": {stack: [[i, j] for i, j, _ in path] for stack, path in paths.items()},
        }
        used = [pair for pair in pairs if pair.maps <= maps.keys()]
        a, b = self.a.architecture, self.b.architecture
        return Alignment(
            maps,
            a.sizes,
            a.parents,
            replace(provenance, advice=advice),
            _folds(self.a, [pair.source for pair in used]),
            b.sizes,
            _folds(self.b, [pair.target for pair in used]),
            paths,
        )

    def qualities(self, alignment: Alignment) -> dict[str, PredictionQuality]:
        """Return how well the maps of an alignment predict B's held-out activations."""
        solver = RectangularSolver(self.a, self.b)
        pairs = alignment.pairs(self.a.architecture, self.b.architecture)
        return {
            name: solver.quality(evidence, torch.from_numpy(alignment.maps[name].matrix[0]))
            for name, evidence in self._evidence(pairs).items()
            if evidence.held_out
        }

    # ── blocks ───────────────────────────────────────────────────────────────────────────────

    def _block_quality(self, stack: str) -> list[list[float]]:
        """Return how well the branches of A's blocks predict those of B's."""
        depth_a, depth_b = self._depths[stack]
        written_a, written_b = _branches(self.a, stack, depth_a), _branches(self.b, stack, depth_b)
        return [
            [
                fmean(
                    [
                        prediction(theirs[0], ours[0], theirs[1], ours[1])
                        for use, theirs in of_b.items()
                        if (ours := of_a.get(use)) is not None and len(ours[0]) == len(theirs[0])
                    ]
                    or [0.0]
                )
                for of_b in written_b
            ]
            for of_a in written_a
        ]

    # ── maps ─────────────────────────────────────────────────────────────────────────────────

    def _maps(self, pairs: list[PartPair]) -> tuple[dict[str, Map], dict[str, PredictionQuality]]:
        solver = RectangularSolver(self.a, self.b)
        maps: dict[str, Map] = {}
        qualities: dict[str, PredictionQuality] = {}
        every = self._evidence(pairs)
        for key, evidence in every.items():
            self.on_axis(key, len(every))
            if evidence.samples and evidence.held_out:
                maps[key], qualities[key] = solver.solve(evidence)
        if not maps:
            raise AlignmentError(
                f"{self.a.model.label} and {self.b.model.label} have no axis that could be compared",
                hint="choose a base of the same kind",
            )
        return maps, qualities

    def _evidence(self, pairs: list[PartPair]) -> dict[str, AxisEvidence]:
        """Collect what both models write to an axis and read from it."""
        found: dict[str, AxisEvidence] = {}
        for pair in pairs:
            source, target = pair.source, pair.target
            for key, side, ours, theirs in (
                (pair.writes, OUTPUT, source.output, target.output),
                (pair.reads, INPUT, source.input, target.input),
            ):
                if key is None or ours is None or theirs is None:
                    continue
                evidence = found.setdefault(key, AxisEvidence(ours, theirs))
                if self.a.is_point(ours) and self.b.is_point(theirs):
                    if not evidence.samples:
                        self._add_points(evidence, str(ours), str(theirs))
                elif target.is_weight:
                    self._add_parts(evidence, source, target, side)
        return found

    def _add_points(self, evidence: AxisEvidence, ours: str, theirs: str) -> None:
        for recorded, kept in (
            ((self.a, self.b), evidence.samples),
            ((self.a.held_out, self.b.held_out), evidence.held_out),
        ):
            a, b = recorded[0].stream(ours), recorded[1].stream(theirs)
            if a is not None and b is not None and len(a) == len(b):
                kept.append(Sample.of(a, b, INPUT))
        raw = self.a.raw(ours), self.b.raw(theirs)
        if raw[0] is not None and raw[1] is not None:
            evidence.produced = norm_ratio(raw[1], raw[0])

    def _add_parts(self, evidence: AxisEvidence, source: TensorPart, target: TensorPart, side: str) -> None:
        for recorded, kept in (
            ((self.a, self.b), evidence.samples),
            ((self.a.held_out, self.b.held_out), evidence.held_out),
        ):
            if side == OUTPUT:
                a, b = recorded[0].written_by(source), recorded[1].written_by(target)
            else:
                a, b = recorded[0].read_by(source), recorded[1].read_by(target)
            if a is not None and b is not None and len(a) == len(b):
                kept.append(Sample.of(a, b, side))


def _branches(recorded: RecordedModel, stack: str, depth: int) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Return what the branches of every block write, on the probes and on the held-out ones."""
    parts = tensor_parts(recorded.architecture)
    found: list[dict[str, tuple[Tensor, Tensor]]] = []
    for block in range(depth):
        here: dict[str, tuple[Tensor, Tensor]] = {}
        for use in BRANCHES:
            if (part := parts.get(Role(stack, block, use))) is None:
                continue
            values = [one.written_by(part) for one in (recorded, recorded.held_out)]
            if values[0] is not None and values[1] is not None:
                here[use] = values[0], values[1]
        found.append(here)
    return found


def _folds(recorded: RecordedModel, parts: list[TensorPart]) -> dict[str, NormFold]:
    """Return the norms that tensors read through; of such a norm's own tensors, the norm."""
    found = {part.tensor: recorded.fold(part) for part in parts}
    return {tensor: fold for tensor, fold in found.items() if fold is not None}


def _rounded(tables: Mapping[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    return {stack: [[round(one, 4) for one in row] for row in table] for stack, table in tables.items()}


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


def align_shapes(
    a: Model,
    b: Model,
    options: FunctionalOptions,
    provenance: Provenance,
    *,
    force_unrelated: bool = False,
    on_axis: Callable[[str, int], None] = lambda axis, total: None,
) -> Alignment:
    """Align two models of different shapes; refuse unrelated ones unless ``force_unrelated``."""
    with run_both(a.to_run, b, options, provenance.seed) as probed:
        found = ShapeMatching(probed.a, probed.b, probed.about, on_axis).find(provenance)
    advice = found.provenance.advice
    if not force_unrelated and advice["found"] < advice["null"] + MARGIN:
        raise UselessResultError(
            f"{a.label} and {b.label} compute unrelated things: A's activations predict"
            f" {advice['found']:.1%} of B's, and {advice['null']:.1%} by chance",
            hint="fine-tune B anew; or insist with `force_unrelated`",
        )
    return found
