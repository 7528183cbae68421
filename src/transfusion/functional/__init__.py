"""Functional alignment: how A's units correspond to B's, from what both compute on the same probes.

`listening` runs a model and keeps samples of what its modules read and put out, `axes` turns them into the
activations of an axis in both models, `solving`, `households` and `experts` find the nearest maps between two
sets of activations, and `quality` tells what maps are worth, on samples that nothing was learned from.
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

from transfusion.alignment import Fold
from transfusion.architecture import Policy
from transfusion.errors import AlignmentError, listing
from transfusion.functional.axes import Evidence
from transfusion.functional.experts import mixture, mixtures
from transfusion.functional.households import household
from transfusion.functional.listening import HELD_OUT, Heard, listen
from transfusion.functional.quality import Quality, mean, qualities
from transfusion.functional.solving import alone, stream
from transfusion.live import build
from transfusion.maps import Map
from transfusion.methods import Functional
from transfusion.model import Model
from transfusion.probing import Probes, made_up, real

__all__ = ["Correspondence", "Hearing", "Quality", "correspond", "hearing", "mean", "qualities"]


@dataclass(frozen=True)
class Hearing:
    """What two models computed from the same probes."""

    evidence: Evidence
    held_out: Evidence
    """From probes that are not to be learned from."""
    about: str
    """What the probes were."""

    def under(self, policy: Policy) -> Hearing:
        """The same samples, for axes that a policy asks for."""
        return replace(self, evidence=self.evidence.under(policy), held_out=self.held_out.under(policy))


def divided(batches: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
    """The same inputs in at least two batches for every fifth of them: a fifth is to be held out."""
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
def hearing(a: Model, b: Model, options: Functional, seed: int = 0) -> Iterator[Hearing]:
    """Run two models, one after the other; their samples are on the disk within the block."""
    with tempfile.TemporaryDirectory() as folder:
        heard: list[Heard] = []
        probes: Probes | None = None
        for side, model in zip("ab", (a, b), strict=True):
            place = Path(folder) / side
            place.mkdir()
            module = build(model, torch.float32)
            if probes is None:
                make = partial(real, Path(options.calibrate)) if options.calibrate else made_up
                probes = make(model, module, options.probes, seed)
            heard.append(listen(model, module, divided(probes.batches), place, options.samples))
            del module
        assert probes is not None
        of_a, of_b = heard
        yield Hearing(Evidence(a, b, of_a, of_b), Evidence(a, b, of_a.others, of_b.others), probes.about)


@dataclass(frozen=True)
class Correspondence:
    """What was found."""

    maps: dict[str, Map] = field(default_factory=dict)
    folds: dict[str, Fold] = field(default_factory=dict)
    """For every tensor that reads the stream through a norm, the norm."""


def correspond(
    evidence: Evidence, options: Functional, *, on_axis: Callable[[str], None] = lambda axis: None
) -> Correspondence:
    """Find a map for every axis that may move."""
    found = Correspondence(folds=evidence.folds)
    free = evidence.architecture.moving()
    holders, stacks = evidence.holders(), mixtures(evidence)
    for id, stack in stacks.items():
        on_axis(id)
        found.maps.update(mixture(stack))
    for space in free:
        apart = space.id not in holders and space.id not in stacks
        if space.parent is None and space.stream is None and apart:
            on_axis(space.id)
            found.maps.update(alone(evidence, space.id, options))
    for id in holders:  # after what all heads share
        on_axis(id)
        found.maps.update(household(evidence, id, options, found.maps))
    branches = dict(found.maps)
    for space in free:  # last, so that weights can speak, too: all that they lead to is known by now
        if space.stream is not None:
            on_axis(space.id)
            found.maps.update(stream(evidence, space.id, options, branches))
    silent = [space.id for space in free if space.id not in found.maps]
    if silent:
        raise AlignmentError(
            f"no module of {evidence.a.label} shows what the units of {listing(silent, 3)} compute",
            hint="choose a method that compares weights, such as --method guarded",
        )
    return found
