"""Functional alignment: how A's units correspond to B's, from what both compute on the same probes.

`listening` runs a model and keeps samples of what its modules read and put out, `axes` turns them into the
activations of an axis in both models, and `solving` finds the nearest map between two sets of activations:
with `households` for heads and what lies within them, and `experts` for mixtures.
The two models are never in memory together: each is run once, and its samples wait on the disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from transfusion.alignment import Fold
from transfusion.errors import AlignmentError, listing
from transfusion.functional.axes import Evidence
from transfusion.functional.experts import mixture, mixtures
from transfusion.functional.households import household
from transfusion.functional.listening import Heard, listen
from transfusion.functional.probing import made_up
from transfusion.functional.solving import Quality, alone, stream
from transfusion.live import build
from transfusion.maps import Map
from transfusion.methods import Functional
from transfusion.model import Model

Probes = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Correspondence:
    """What was found."""

    maps: dict[str, Map] = field(default_factory=dict)
    folds: dict[str, Fold] = field(default_factory=dict)
    """For every tensor that reads the stream through a norm, the norm."""
    quality: dict[str, Quality] = field(default_factory=dict)
    """For every axis, how well B's activations are predicted from A's."""


def correspond(
    a: Model,
    b: Model,
    options: Functional,
    *,
    probes: Probes | None = None,
    seed: int = 0,
    on_axis: Callable[[str], None] = lambda axis: None,
) -> Correspondence:
    """Find a map for every axis that may move; without probes, they are made up."""
    with tempfile.TemporaryDirectory() as folder:
        heard: list[Heard] = []
        for number, model in enumerate((a, b)):
            module = build(model, torch.float32)
            probes = probes or made_up(model, module, options.probes, seed)
            file = Path(folder) / f"{number}.safetensors"
            heard.append(listen(model, module, probes, file, options.samples))
        return _found(a, b, heard[0], heard[1], options, on_axis)


def _found(
    a: Model, b: Model, of_a: Heard, of_b: Heard, options: Functional, on_axis: Callable[[str], None]
) -> Correspondence:
    evidence = Evidence(a, b, of_a, of_b)
    found = Correspondence(folds=evidence.folds)
    architecture = a.architecture
    free = architecture.moving()
    holders, stacks = evidence.holders(), mixtures(evidence)
    for id, stack in stacks.items():
        on_axis(id)
        found.maps.update(mixture(stack))
    for space in free:
        apart = space.id not in holders and space.id not in stacks
        if space.parent is None and space.stream is None and apart:
            on_axis(space.id)
            found.maps.update(alone(evidence, space.id, options, found.quality))
    for id in holders:  # after what all heads share
        on_axis(id)
        found.maps.update(household(evidence, id, options, found.maps))
    branches = dict(found.maps)
    for space in (
        space for space in free if space.stream is not None
    ):  # last, so that weights can speak, too: all that they lead to is known by now
        on_axis(space.id)
        found.maps.update(stream(evidence, space.id, options, found.quality, branches))
    silent = [space.id for space in free if space.id not in found.maps]
    if silent:
        raise AlignmentError(
            f"no module of {a.label} shows what the units of {listing(silent, 3)} compute",
            hint="choose a method that compares weights, such as --method guarded",
        )
    return found
