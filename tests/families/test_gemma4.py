"""Gemma 4: what released files have beyond what the library reads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned
from transfusion.model.model import Model
from transfusion.transport.transport import transport

DEAD = {
    f"layers.{block}.self_attn.{name}": shape
    for block, size in ((4, 8), (5, 16))
    for name, shape in (
        ("k_proj.weight", (2 * size, 36)),
        ("v_proj.weight", (2 * size, 36)),
        ("k_norm.weight", (size,)),
    )
}
"""Of the blocks that read keys and values of others."""


def with_dead_keys(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    extra = {f"model.{name}": torch.ones(shape) for name, shape in DEAD.items()}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    return folder


def test_keys_of_blocks_that_read_those_of_others_stay_those_of_b(tmp_path):
    case = CASES["gemma4"]
    a, b = (with_dead_keys(case.save(tmp_path / str(seed), seed)) for seed in (1, 2))
    tuned = finetuned(case, a, tmp_path / "tuned")
    assert Model.open(a).architecture.unread == DEAD.keys()
    out = Model.open(transport(tuned, base=a, onto=b, force_unrelated=True).save(tmp_path / "out"))
    assert out.architecture.unread == DEAD.keys()
    assert all(torch.equal(out.read(name), Model.open(b).read(name)) for name in DEAD)
