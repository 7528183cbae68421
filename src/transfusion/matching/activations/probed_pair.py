"""Two models on the same probes: the evidence of functional alignment.

`running.activations` records samples of the inputs and outputs of modules, `axis_activations` sorts them by
axis, and `matching.functional` finds the maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from transfusion.architecture.architecture import Policy
from transfusion.architecture.layouts import ANONYMOUS, names_in
from transfusion.matching.activations.axis_activations import AxisActivations
from transfusion.matching.methods import FunctionalOptions
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.activations import HELD_OUT, ActivationStore, record_activations
from transfusion.running.building import skeleton
from transfusion.running.live_model import WHOLE, HowToRun
from transfusion.running.probes import calibration_probes, synthetic_probes
from transfusion.running.probes.pairs import enough_probes, tokens_of_a_probe
from transfusion.running.probes.probed_model import ProbedModel, Probes
from transfusion.running.streaming import unit_sizes
from transfusion.runtime.resources import LIBRARY, Resources
from transfusion.runtime.scratch import scratch_folder

MATRICES = 44
"""Bytes for every entry of an axis's square matrix: the covariance, and four matrices in float64 with one in
float32 while its polar factor is found."""
KEPT_STATES = 4
"""Tensors of the size of the hidden states that a pass keeps between two layers."""


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


def bytes_of_samples(model: Model, options: FunctionalOptions) -> int:
    """Return the bytes of the samples of two models of this shape, about."""
    architecture = model.architecture
    recorded = 0
    for name, layout in architecture.tensors.items():
        if name in architecture.scales:
            recorded += 2 * torch.Size(model.info(name).shape).numel()  # what a norm reads and writes
        elif layout.arrow is not None and VOCABULARY not in layout.names():
            for dim in (*layout.outputs[:1], *layout.inputs[:1]):
                axes = [architecture.spaces[one] for one in names_in(layout.items[dim]) if one != ANONYMOUS]
                if all(axis.stream is None for axis in axes):
                    recorded += model.info(name).shape[dim]
    return 2 * torch.float32.itemsize * recorded * options.samples


def running_within_memory(a: Model, b: Model, options: FunctionalOptions, resources: Resources) -> Resources:
    """Return the resources with as many threads as fit, where models run layer by layer.

    In memory are the library, the largest layer, and the hidden states of all probes; then, for every thread,
    the matrices of an axis while its map is found.
    """
    if resources.memory is None:
        return resources
    layers, states = [], []
    for model in (a, b):
        module = skeleton(model)
        subject = ProbedModel(model, module)
        tokens = enough_probes(subject, options.probes, options.samples) * tokens_of_a_probe(subject)
        width = max((space.size for space in model.architecture.spaces.values() if space.stream), default=0)
        layers.append(unit_sizes(model, module))
        states.append(KEPT_STATES * torch.float32.itemsize * tokens * width)
    units = max((space.size for space in a.architecture.moving()), default=0)
    fixed = LIBRARY + max(layers) + max(states)
    return resources.within_memory(MATRICES * units**2, "running a model layer by layer", fixed)


@contextmanager
def run_on_probes(
    a: Model, b: Model, options: FunctionalOptions, seed: int = 0, how: HowToRun = WHOLE
) -> Iterator[ProbedPair]:
    """Run two models one after the other; yield their activations, on disk for the ``with`` block."""
    with scratch_folder(bytes_of_samples(a, options), on_disk=how.by_unit or not how.shared) as folder:
        of_a, probes = _recorded(a, options, seed, how, folder / "a", None)
        of_b, _ = _recorded(b, options, seed, how, folder / "b", probes)
        yield ProbedPair(
            AxisActivations(a, b, of_a, of_b, how.device),
            AxisActivations(a, b, of_a.others, of_b.others, how.device),
            probes.about,
        )


def _recorded(
    model: Model, options: FunctionalOptions, seed: int, how: HowToRun, folder: Path, probes: Probes | None
) -> tuple[ActivationStore, Probes]:
    """Run one model; the first one decides on the probes."""
    folder.mkdir()
    with how.opened(model) as running:
        if probes is None:
            make = (
                partial(calibration_probes, Path(options.calibrate))
                if options.calibrate
                else synthetic_probes
            )
            subject = ProbedModel(model, running.module)
            count = enough_probes(subject, options.probes, options.samples)
            probes = make(model, running.module, count, seed, running.each)
        batches, asked = split_batches(probes.batches), options.gradients > 0
        store = record_activations(model, running, batches, folder, options.samples, gradients=asked)
    return store, probes
