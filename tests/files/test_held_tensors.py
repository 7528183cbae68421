"""Tensors that are held whole while scattered rows of them are read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from transfusion.files import held_tensors
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.held_tensors import HELD


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> Checkpoint:
    monkeypatch.setattr(held_tensors, "SPAN", 64)
    tensors = {
        f"t{i}": torch.randn(8 + i, 5).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(6)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path / "model.safetensors")


def reads(monkeypatch) -> list[str]:
    """Note every read: of whole tensors that are held, and others."""
    found, read = [], held_tensors.read_tensor

    def noted(info, rows=None):
        found.append(info.name)
        return read(info, rows)

    monkeypatch.setattr(held_tensors, "read_tensor", noted)
    return found


def test_scattered_rows_are_those_of_the_file_and_read_once(checkpoint, monkeypatch):
    found = reads(monkeypatch)
    rows = torch.tensor([7, 0, 3])
    plain = {name: checkpoint.read(name, rows) for name in checkpoint.tensors}
    with checkpoint.holding_tensors():
        for name, wanted in plain.items():
            for _ in range(3):
                assert torch.equal(checkpoint.read(name, rows), wanted)
    assert found == list(plain)


def test_threads_share_the_tensors_that_are_held(checkpoint):
    rows = torch.tensor([7, 0, 3])
    names = list(checkpoint.tensors) * 50
    plain = {name: checkpoint.read(name, rows) for name in checkpoint.tensors}
    with checkpoint.holding_tensors(), ThreadPoolExecutor(2 * HELD) as pool:
        found = list(pool.map(lambda name: checkpoint.read(name, rows), names))
    assert all(torch.equal(one, plain[name]) for name, one in zip(names, found, strict=True))


def test_small_tensors_are_held_whatever_the_rows(checkpoint, monkeypatch):
    monkeypatch.setattr(held_tensors, "SPAN", 10_000)
    found = reads(monkeypatch)
    with checkpoint.holding_tensors():
        for _ in range(2):
            checkpoint.read("t0", torch.tensor([2, 1]))
    assert found == ["t0"]


def test_large_tensors_and_neighbouring_rows_are_not_held(checkpoint, monkeypatch):
    found = reads(monkeypatch)
    with checkpoint.holding_tensors():
        for _ in range(2):
            checkpoint.read("t0", torch.tensor([2, 1]))
        monkeypatch.setattr(held_tensors, "LARGEST", 100)
        for _ in range(2):
            checkpoint.read("t0", torch.tensor([7, 0]))
    assert found == ["t0"] * 4


def test_a_file_that_changes_is_noticed(checkpoint, tmp_path):
    rows = torch.tensor([7, 0, 3])
    with checkpoint.holding_tensors():
        checkpoint.read("t0", rows)
        with (tmp_path / "model.safetensors").open("ab") as file:
            file.write(b"more")
        with pytest.raises(Exception, match="changed while it was being read"):
            checkpoint.read("t1", rows)
