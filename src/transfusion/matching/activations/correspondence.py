"""Functional alignment: how A's units correspond to B's, from what both compute on the same probes.

`live.activations` records samples of the inputs and outputs of modules, `axis_activations` sorts them by
axis, `procrustes`, `head_matching` and `expert_matching` solve for maps, and `prediction_quality` measures
the maps on held-out samples.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from transfusion.alignment.alignment import NormFold
from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import Policy
from transfusion.data.probes import calibration_probes, synthetic_probes
from transfusion.data.probes.probed_model import Probes
from transfusion.errors import AlignmentError, listing
from transfusion.live.activations import HELD_OUT, ActivationStore, record_activations
from transfusion.live.building import build
from transfusion.matching.activations.axis_activations import AxisActivations
from transfusion.matching.activations.expert_matching import expert_stacks, match_experts
from transfusion.matching.activations.head_matching import match_heads
from transfusion.matching.activations.prediction_quality import (
    PredictionQuality,
    mean_quality,
    prediction_qualities,
)
from transfusion.matching.activations.procrustes import solve_axis, solve_stream
from transfusion.matching.methods import FunctionalOptions
from transfusion.model.model import Model

__all__ = [
    "Correspondence",
    "PredictionQuality",
    "ProbedPair",
    "correspond",
    "mean_quality",
    "prediction_qualities",
    "run_on_probes",
]


@dataclass(frozen=True)
class ProbedPair:
    """The activations of two models on the same probes."""

    evidence: AxisActivations
    held_out: AxisActivations
    """Activations on held-out probes."""
    about: str
    """A description of the probes."""

    def under(self, policy: Policy) -> ProbedPair:
        """Return the same samples for the axes of another policy."""
        return replace(self, evidence=self.evidence.under(policy), held_out=self.held_out.under(policy))


def split_batches(batches: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
    """Divide inputs into at least ten batches, so that a fifth of the inputs can be held out."""
    total = sum(_count(batch) for batch in batches)
    size = max(1, total // (2 * HELD_OUT))
    return [
        {name: one[start : start + size] for name, one in batch.items()}
        for batch in batches
        for start in range(0, _count(batch), size)
    ]


def _count(batch: Mapping[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


@contextmanager
def run_on_probes(a: Model, b: Model, options: FunctionalOptions, seed: int = 0) -> Iterator[ProbedPair]:
    """Run two models one after the other; yield their activations, on disk for the ``with`` block."""
    with tempfile.TemporaryDirectory() as folder:
        stores: list[ActivationStore] = []
        probes: Probes | None = None
        for side, model in zip("ab", (a, b), strict=True):
            place = Path(folder) / side
            place.mkdir()
            module = build(model, torch.float32)
            if probes is None:
                make = (
                    partial(calibration_probes, Path(options.calibrate))
                    if options.calibrate
                    else synthetic_probes
                )
                probes = make(model, module, options.probes, seed)
            batches, asked = split_batches(probes.batches), options.gradients > 0
            stores.append(record_activations(model, module, batches, place, options.samples, gradients=asked))
            del module
        assert probes is not None
        of_a, of_b = stores
        yield ProbedPair(
            AxisActivations(a, b, of_a, of_b), AxisActivations(a, b, of_a.others, of_b.others), probes.about
        )


@dataclass(frozen=True)
class Correspondence:
    """The maps of functional alignment."""

    maps: dict[str, Map] = field(default_factory=dict)
    folds: dict[str, NormFold] = field(default_factory=dict)
    """For every tensor that reads the stream through a norm, the norm."""


def correspond(
    evidence: AxisActivations,
    options: FunctionalOptions,
    *,
    on_axis: Callable[[str], None] = lambda axis: None,
) -> Correspondence:
    """Find a map for every axis that may move."""
    found = Correspondence(folds=evidence.folds)
    free = evidence.architecture.moving()
    parents, stacks = evidence.parent_axes(), expert_stacks(evidence)
    for id, stack in stacks.items():
        on_axis(id)
        found.maps.update(match_experts(stack))
    for space in free:
        apart = space.id not in parents and space.id not in stacks
        if space.parent is None and space.stream is None and apart:
            on_axis(space.id)
            found.maps.update(solve_axis(evidence, space.id, options))
    for id in parents:  # after the axes that all heads share
        on_axis(id)
        found.maps.update(match_heads(evidence, id, options, found.maps))
    branches = dict(found.maps)
    for space in free:  # last, so that weights count too: the axes that they lead to are mapped by now
        if space.stream is not None:
            on_axis(space.id)
            found.maps.update(solve_stream(evidence, space.id, options, branches))
    missing = [space.id for space in free if space.id not in found.maps]
    if missing:
        raise AlignmentError(
            f"no module of {evidence.a.label} shows what the units of {listing(missing, 3)} compute",
            hint='choose a method that compares weights, such as `method="guarded"`',
        )
    return found
