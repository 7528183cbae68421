"""How many inputs pass through a student together, and layers that compute their activations again."""

from __future__ import annotations

import pytest
import torch

from small_models import CASES
from transfusion.transport.refinement import room


@pytest.mark.parametrize("name", ["opt", "llama", "gpt2"])
def test_layers_that_compute_again_have_no_dropout(name, monkeypatch):
    """A layer of OPT has dropout of its own, and not only that of its parts."""
    for limit in ("FLOOR", "SHARE"):
        monkeypatch.setattr(room, limit, 0)
    student, ids = CASES[name].build(1), torch.arange(8)[None]
    for setting in ("dropout", "attention_dropout", "resid_pdrop", "embd_pdrop"):
        for part in student.modules():
            if isinstance(getattr(part, setting, None), float):
                setattr(part, setting, 0.5)

    runs: list[int] = []
    layer = next(part for part in student.modules() if isinstance(part, torch.nn.ModuleList))[0]
    layer.register_forward_pre_hook(lambda *_: runs.append(1))

    def gradients() -> list[torch.Tensor]:
        runs.clear()
        student.zero_grad()
        student(input_ids=ids).logits.square().mean().backward()
        return [one.grad.clone() for one in student.parameters() if one.grad is not None]

    logits, slopes = student(input_ids=ids).logits, gradients()
    assert room.inputs_in_a_pass(student, lambda: student(input_ids=ids).logits) == 1
    assert torch.equal(student(input_ids=ids).logits, logits)
    assert all(torch.allclose(one, other) for one, other in zip(gradients(), slopes, strict=True))
    assert len(runs) == 2, "layers compute again on the way back"
