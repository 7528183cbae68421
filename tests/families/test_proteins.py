"""What models of proteins compute beside their outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from small_models import CASES
from transfusion.alignment.alignment import Alignment
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.probes.inputs import in_double
from transfusion.transport.apply import apply


def contacts(folder: Any) -> torch.Tensor:
    """Which parts of a protein touch, as an ESM-2 says."""
    module: Any = build(Model.open(folder))
    module.set_attn_implementation("eager")
    tokens = torch.tensor([[5, 9, 11, 4, 17, 8, 23, 2]])
    with torch.no_grad(), in_double(True):
        return module.predict_contacts(tokens, torch.ones_like(tokens))


def test_contacts_are_told_from_the_same_heads(tmp_path):
    case = CASES["esm-masked"]
    a = case.save(tmp_path / "a", 1)
    pi = align(a, a, method="random", residual="tied", seed=3)
    b = apply(pi, a).save(tmp_path / "b")
    wanted = contacts(a)
    assert wanted.std() > 1e-3
    assert torch.allclose(contacts(b), wanted, atol=1e-9)


@pytest.mark.parametrize("block", range(3))
def test_the_heads_of_every_block_have_a_place_of_their_own(block, tmp_path):
    a = CASES["esm-masked"].save(tmp_path / "a", 1)
    pi: Alignment = align(a, a, method="random", residual="tied", seed=3)
    model = Model.open(a).under(pi.provenance.policy)
    layout = model.architecture.tensors["contact_head.regression.weight"]
    assert layout.names() == tuple(f"layer.{i}.head" for i in range(3))
    before = model.read("contact_head.regression.weight")
    after = pi.move(before, layout)
    place = slice(4 * block, 4 * block + 4)
    order = pi.maps[f"layer.{block}.head"].index[0]
    assert torch.equal(after[0, place], before[0, place][order])
