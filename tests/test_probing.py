"""Probes: of every family's kind, the same for one seed, and like what the models are made for."""

from __future__ import annotations

import pytest
import torch

from families import CASES, FIRST
from transfusion.live import build
from transfusion.model import Model
from transfusion.probes import run
from transfusion.probing import made_up

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_live_model_reads_its_probes(case, made):
    model = Model.open(made(case))
    module = build(model, torch.float32)
    probes, again, other = (made_up(model, module, 5, seed) for seed in (1, 1, 2))
    for inputs, same, differs in zip(probes.batches, again.batches, other.batches, strict=True):
        assert all(torch.equal(inputs[name], same[name]) for name in inputs)
        assert any(not torch.equal(inputs[name], differs[name]) for name in inputs)
        assert all(one.dtype in (torch.float32, torch.int64) for one in inputs.values())
        outputs = run(module, model.family, inputs, double=False)
        assert all(torch.isfinite(one).all() for one in outputs.values())
    assert "5" in probes.about
