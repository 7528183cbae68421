"""Files in the names of a model's authors: read, moved and written without conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import CASES, finetuned
from transfusion.architecture.families import all_families
from transfusion.architecture.original_names import OriginalNames
from transfusion.matching.alignment_run import align
from transfusion.model.model import Model
from transfusion.transportation.transport_run import transport

ORIGINAL = {"flux": "flux"}
"""A case of every family whose authors have names of their own."""


def in_original_names(folder: Path, file: Path, prefix: str = "") -> Path:
    """Write a model of diffusers as its authors would: independent of what reads it here."""
    model = Model.open(folder)
    names = OriginalNames(model.family)
    left = load_file(next(folder.glob("*.safetensors")))
    stored: dict[str, torch.Tensor] = {}
    for pattern, module in names.modules.items():
        for block in range(8 if "{}" in pattern else 1):
            for ending in ("", ".weight", ".bias"):
                wanted = [part.replace("{}", str(block)) + ending for part in module.parts]
                whole = [part.replace("[0]", "").replace("[1]", "") for part in wanted]
                if all(name in left for name in whole):
                    name = prefix + pattern.replace("{}", str(block)) + ending
                    halves = [
                        left[name].chunk(2)[int("[1]" in part)]
                        for name, part in zip(whole, wanted, strict=True)
                    ]
                    parts = halves if whole != wanted else [left[name] for name in whole]
                    stored[name] = torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].clone()
    save_file(stored, file)
    return file


def test_every_list_of_names_is_tested():
    assert {family.name for family in all_families() if family.original} == set(ORIGINAL)


@pytest.mark.parametrize("family", ORIGINAL)
def test_a_file_in_original_names_is_the_same_model(family: str, made, tmp_path):
    folder = made(ORIGINAL[family])
    file = in_original_names(folder, tmp_path / "one.safetensors", "model.diffusion_model.")
    theirs, ours = Model.open(file), Model.open(folder)
    assert set(theirs.names) == set(ours.names)
    for name in ours.names:
        assert torch.equal(theirs.read(name), ours.read(name)), name
    assert theirs.architecture.digest() == ours.architecture.digest()


@pytest.mark.parametrize("family", ORIGINAL)
def test_a_file_in_original_names_is_moved_onto_one_of_the_library_and_back(family: str, made, tmp_path):
    case = ORIGINAL[family]
    folders = made(case), made(case, seed=2), finetuned(CASES[case], made(case), tmp_path / "tuned")
    files = [
        in_original_names(folder, tmp_path / f"{number}.safetensors") for number, folder in enumerate(folders)
    ]
    pi = align(folders[0], folders[1], advice=False)
    expected = transport(folders[2], base=folders[0], onto=folders[1], via=pi).state_dict()
    into_ours = transport(files[2], base=files[0], onto=folders[1], via=pi).state_dict()
    assert all(torch.equal(into_ours[name], expected[name]) for name in expected)
    moved = transport(folders[2], base=folders[0], onto=files[1], via=pi).save(tmp_path / "out.safetensors")
    written, before = load_file(moved), load_file(files[1])
    assert {name: one.shape for name, one in written.items()} == {
        name: one.shape for name, one in before.items()
    }
    back = Model.open(moved)
    assert all(torch.equal(back.read(name), expected[name]) for name in expected)
