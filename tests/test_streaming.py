"""Models whose weights are in memory one unit at a time compute what whole models compute."""

from __future__ import annotations

import threading

import pytest
import torch

from families import CASES, FIRST, OFTEN, often
from transfusion.data.probes.random_inputs import random_inputs
from transfusion.errors import ArchitectureError
from transfusion.live import streaming
from transfusion.live.lockstep import run_side_by_side
from transfusion.live.running import HowToRun
from transfusion.model.model import Model


def inputs_of(model: Model, module, seed: int) -> dict[str, torch.Tensor]:
    config = getattr(module, "config", None)
    settings = config.to_dict() if config else model.config
    drawn = random_inputs(model.family, settings, batch=2, seed=seed)
    return {name: one.float() if one.is_floating_point() else one for name, one in drawn.items()}


def outputs(model: Model, how: HowToRun, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """The outputs on some batches."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    with how.opened(model) as running:

        def run(number: int) -> None:
            found[number] = running.outputs(inputs_of(model, running.module, number))

        running.each(run, count)
    return [found[number] for number in range(count)]


@pytest.mark.parametrize("family", often(sorted(FIRST), OFTEN))
def test_unit_by_unit_every_family_computes_the_same_bits(family, made):
    model = Model.open(made(FIRST[family]))
    whole, by_unit = (outputs(model, HowToRun(workers=2, by_unit=one)) for one in (False, True))
    for one, other in zip(whole, by_unit, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
