"""A file of π: what goes in comes out, and what is damaged or foreign is refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from small_models import PRINCIPAL
from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map
from transfusion.alignment.pi_file import is_alignment
from transfusion.errors import AlignmentError, CheckpointError, MismatchError, OutputError
from transfusion.matching.align import align
from transfusion.model.model import Model


@pytest.fixture(scope="module")
def pi(made) -> Alignment:
    return align(made("llama", 1), made("llama", 2), method="guarded")


def test_saving_and_loading_returns_the_same_alignment(pi, tmp_path):
    path = pi.save(tmp_path / "pi.safetensors")
    loaded = Alignment.load(path)
    assert loaded.maps == pi.maps
    assert loaded.provenance == pi.provenance
    assert (loaded.sizes, loaded.parents) == (dict(pi.sizes), dict(pi.parents))
    assert is_alignment(path)


def test_the_provenance_tells_where_it_comes_from(pi, made, tmp_path):
    with safe_open(pi.save(tmp_path / "pi.safetensors"), "pt") as opened:
        provenance = json.loads(opened.metadata()["transfusion"])["provenance"]
    assert provenance["family"] == "llama"
    assert provenance["method"] == "guarded"
    assert provenance["policy"]["residual"] == "untied"
    assert provenance["source_fingerprint"] == Model.open(made("llama", 1)).fingerprint
    assert provenance["target_fingerprint"] == Model.open(made("llama", 2)).fingerprint
    assert len(provenance["objective"]) >= 3
    assert provenance["version"]


@pytest.mark.parametrize("case", PRINCIPAL)
@settings(max_examples=settings.default.max_examples // 12)
@given(seed=st.integers(0, 10**6))
def test_an_inverse_undoes_and_a_composition_does_both(case, seed, made):
    a = made(case)
    model = Model.open(a)
    first = align(a, a, method="random", residual="untied", seed=seed)
    second = align(a, a, method="random", residual="untied", seed=seed + 1)
    under = model.under(first.provenance.policy)
    both, nothing = second.after(first), first.inverse().after(first)
    assert all(map_.is_identity() for map_ in nothing.maps.values())
    for name, layout in under.architecture.tensors.items():
        tensor = model.read(name)
        assert torch.equal(first.inverse().move(first.move(tensor, layout), layout), tensor)
        assert torch.equal(both.move(tensor, layout), second.move(first.move(tensor, layout), layout))


def test_alignments_of_different_policies_cannot_be_chained(made):
    one = align(made("vit"), made("vit"), method="random", residual="tied")
    two = align(made("vit"), made("vit"), method="random", residual="untied")
    with pytest.raises(MismatchError, match="cannot be chained"):
        one.after(two)


def test_the_same_weights_under_other_names_have_the_same_fingerprint(made, tmp_path):
    folder = made("bert")
    state = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert Model.open(tmp_path).fingerprint == Model.open(folder).fingerprint


# ── refusals ─────────────────────────────────────────────────────────────────────────────────


def test_a_truncated_file_is_refused(pi, tmp_path):
    path = pi.save(tmp_path / "pi.safetensors")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(AlignmentError, match="not a readable file of π"):
        Alignment.load(path)


@pytest.mark.parametrize("damage", ["swap", "drop", "twice"])
def test_a_file_with_other_maps_than_were_saved_is_refused(damage, pi, tmp_path):
    path = pi.save(tmp_path / "pi.safetensors")
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    ffn = tensors["layer.0.ffn"]
    if damage == "swap":
        tensors["layer.0.ffn"] = ffn.flip(1).contiguous()
    elif damage == "drop":
        del tensors["layer.0.ffn"]
    else:
        ffn[0, 0] = ffn[0, 1]
    save_file(tensors, path, metadata)
    with pytest.raises(AlignmentError, match="the file is damaged"):
        Alignment.load(path)


@pytest.mark.parametrize("provenance", ["{", "{}", '{"format": 7}', "[]"])
def test_metadata_that_cannot_be_read_is_refused(provenance, pi, tmp_path):
    path = pi.save(tmp_path / "pi.safetensors")
    save_file(load_file(path), path, {"transfusion": provenance})
    with pytest.raises(AlignmentError, match="its metadata cannot be read"):
        Alignment.load(path)


def test_a_folder_or_nothing_is_no_pi(made, tmp_path):
    with pytest.raises(AlignmentError, match="a folder, not a file of π"):
        Alignment.load(made("vit"))
    with pytest.raises(AlignmentError, match="no such file of π"):
        Alignment.load(tmp_path / "none")


def test_a_pi_is_no_model(pi, tmp_path):
    with pytest.raises(CheckpointError, match="a file of π, not a model"):
        Model.open(pi.save(tmp_path / "pi.safetensors"))


def test_maps_that_do_not_fit_their_axes_are_refused(pi, tmp_path):
    """Even if the digest agrees: somebody put this file together."""
    twice = Map.permutation(np.tile(pi.maps["layer.0.ffn"].index, (2, 1)))
    path = replace(pi, maps={**pi.maps, "layer.0.ffn": twice}).save(tmp_path / "pi.safetensors")
    with pytest.raises(AlignmentError, match="the file is damaged"):
        Alignment.load(path)


def test_another_safetensors_file_is_refused(made):
    path = made("vit") / "model.safetensors"
    assert not is_alignment(path)
    with pytest.raises(AlignmentError, match="but not one of π"):
        Alignment.load(path)


def test_a_file_of_a_later_format_is_refused(pi, tmp_path):
    path = pi.save(tmp_path / "pi.safetensors")
    with safe_open(path, "pt") as opened:
        provenance = json.loads(opened.metadata()["transfusion"])
    save_file(load_file(path), path, {"transfusion": json.dumps({**provenance, "format": 99})})
    with pytest.raises(AlignmentError, match="written in format 99, but this version reads format 7"):
        Alignment.load(path)


def test_an_alignment_of_another_family_is_refused(pi, made):
    with pytest.raises(AlignmentError, match="this π is for a llama, but the model is a vit"):
        pi.require_for(Model.open(made("vit")).architecture)


def test_an_alignment_of_another_shape_is_refused(pi, made):
    architecture = Model.open(made("mistral-tied")).architecture
    with pytest.raises(AlignmentError, match=r"other sizes of the architecture"):
        pi.require_for(architecture)


def test_an_existing_file_is_kept_unless_forced(pi, tmp_path):
    path = tmp_path / "pi.safetensors"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        pi.save(path)
    assert path.read_text() == "mine"
    pi.save(path, force=True)
    assert Alignment.load(path).maps == pi.maps
    assert [p.name for p in tmp_path.iterdir()] == ["pi.safetensors"]
