"""Hashes that are taken while tensors are read."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from tests.families.test_original_names import ORIGINAL, in_original_names
from transfusion.files import read_hashes
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.read_hashes import HashedSection, TensorHash
from transfusion.model.input_digests import InputDigests
from transfusion.model.model import Model
from transfusion.runtime.engines import open_engine

HEAD = b"float32(100,)"


@given(content=some.binary(max_size=200), size=some.integers(1, 50), seed=some.integers(0, 5))
def test_pieces_in_any_order_give_the_hash_of_all_bytes(content, size, seed):
    starts = list(range(0, len(content), size))
    random.Random(seed).shuffle(starts)
    found = TensorHash(HEAD, len(content))
    for start in starts:
        assert found.digest() is None
        found.update(start, memoryview(content)[start : start + size])
        found.update(start, memoryview(content)[start : start + size])  # read a second time
    assert found.digest() == blake3(HEAD + content).digest()


def test_threads_hash_pieces_together():
    content = random.Random(0).randbytes(200_000)
    found = TensorHash(HEAD, len(content))
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda at: found.update(at, memoryview(content)[at : at + 500]), range(0, 200_000, 500))
        )
    assert found.digest() == blake3(HEAD + content).digest()


def test_a_tensor_that_is_read_in_part_has_no_hash():
    found = TensorHash(HEAD, 10)
    found.update(5, memoryview(b"later"))
    assert found.digest() is None


def test_little_is_kept_for_later(monkeypatch):
    monkeypatch.setattr(read_hashes, "_WAITING", 8)
    kept, given_up = TensorHash(HEAD, 20), TensorHash(HEAD, 20)
    for one, held in ((kept, True), (given_up, False)):
        one.update(10, memoryview(b"0123456789"), held=held)
        one.update(0, memoryview(b"0123456789"), held=held)
    assert kept.digest() == blake3(HEAD + b"01234567890123456789").digest()
    assert given_up.digest() is None


def test_sections_of_a_stored_tensor_are_hashed_apart():
    stored = memoryview(b"aaaabbbbbb")
    first, second = TensorHash(b"", 4), TensorHash(b"", 8)
    sections = HashedSection(first, 0, 4), HashedSection(second, 4, 6, place=2)
    second.update(0, memoryview(b"__"))
    for start in (0, 3, 6, 9):
        for section in sections:
            section.update(start, stored[start : start + 3])
    assert first.digest() == blake3(b"aaaa").digest()
    assert second.digest() == blake3(b"__bbbbbb").digest()


def read_all(model: Model, rows: Callable[[int], slice | Tensor | None]) -> dict[str, str]:
    """Read all tensors of a model; return what was hashed on the way."""
    with model.checkpoint.holding_tensors(), open_engine() as engine:
        inputs = InputDigests([model], engine, while_reading=True)
        assert inputs.used() == {}
        for name in model.architecture.tensors:
            shape = model.info(name).shape
            model.raw(name, rows(shape[0]) if shape else None)
        return inputs.used()


def hashes(model: Model) -> dict[str, str]:
    return {f"0 {name}": model.digest_of(name).hex() for name in model.architecture.tensors}


@pytest.mark.parametrize(
    "rows",
    [lambda height: slice(0, height), lambda height: torch.arange(height).flip(0), lambda height: None],
    ids=["slices", "scattered", "whole"],
)
def test_a_model_is_hashed_while_it_is_read(rows, made, monkeypatch):
    folder = made("vit")
    wanted = hashes(Model.open(folder))
    monkeypatch.setattr(Checkpoint, "blocks", None)  # nothing is read a second time
    assert read_all(Model.open(folder), rows) == wanted


def test_experts_in_pieces_are_hashed_while_they_are_read(made, monkeypatch):
    folder = made("mixtral")
    wanted = hashes(Model.open(folder))
    assert read_all(Model.open(folder), lambda height: torch.arange(height).flip(0)) == wanted
    monkeypatch.setattr(Checkpoint, "blocks", None)
    assert read_all(Model.open(folder), lambda height: slice(0, height)) == wanted


def test_parts_of_fused_tensors_are_hashed_apart(made, tmp_path, monkeypatch):
    file = in_original_names(made(ORIGINAL["flux"]), tmp_path / "one.safetensors")
    wanted = hashes(Model.open(file))
    monkeypatch.setattr(Checkpoint, "blocks", None)
    monkeypatch.setattr("transfusion.model.original_files.OriginalCheckpoint.blocks", None)
    for rows in (lambda height: slice(0, height), lambda height: torch.arange(height).flip(0)):
        assert read_all(Model.open(file), rows) == wanted


def test_what_was_not_read_whole_is_hashed_again(made):
    folder = made("vit")
    wanted, model = hashes(Model.open(folder)), Model.open(folder)
    used = read_all(model, lambda height: slice(height - 1, height))
    assert used.items() <= wanted.items()
    assert hashes(model) == wanted


def test_inputs_are_compared_tensor_by_tensor_or_as_a_whole(made):
    model, other = Model.open(made("vit")), Model.open(made("vit", 2))
    with open_engine() as engine:
        inputs = InputDigests([model], engine, while_reading=False)
        whole, each = inputs.used(), hashes(model)
        assert inputs.same(whole)
        assert inputs.same(each)
        assert inputs.same({})
        assert not inputs.same({**each, "0 unknown": "00"})
        assert not inputs.same({**each, "1 unknown": "00"})
        theirs = InputDigests([other], engine, while_reading=False)
        assert not theirs.same(whole)
        assert not theirs.same(each)
