"""Proof by running: agreement is seen, and where two models part is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from small_models import PRINCIPAL
from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map
from transfusion.errors import AlignmentError, LibraryError, SettingError
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.resources import LIBRARY, PROGRAM, Resources
from transfusion.verification.verify import verify


@pytest.mark.parametrize("case", PRINCIPAL)
def test_an_exact_move_is_seen_to_be_exact(case, made):
    a = made(case)
    for residual in ("tied", "untied"):
        pi = align(a, a, method="random", residual=residual)
        found = verify(a, via=pi)
        assert found.equal
        assert found.difference < 1e-9
        assert found.parting is None
        assert found.outputs
        assert (found.shortcuts > 0) == (residual == "untied")


def with_map(pi: Alignment, id: str, index: np.ndarray) -> Alignment:
    """π with one map more, the same in every element of what the axis lies within."""
    every = np.tile(index, (len(pi.lineage(id)), 1))
    return dataclasses.replace(pi, maps={**pi.maps, id: Map.permutation(every)})


@pytest.mark.parametrize(
    ("case", "id", "parting"),
    [
        ("llama", "layer.1.qk", "layers.1.self_attn.o_proj"),
        ("gpt2", "vocab", "wte"),
        ("bert-pretraining", "layer.position", "embeddings.position_embeddings"),
        ("vit-classifier", "layer.channel", "embeddings.patch_embeddings.projection"),
        ("clip", "joint", None),
    ],
)
def test_a_move_that_is_not_allowed_is_found_and_located(case, id, parting, made):
    """After moving an axis that must stay, the outputs differ, and the first module that does is named."""
    a = made(case)
    size = Model.open(a).architecture.sizes[id]
    pi = with_map(align(a, a, method="random", residual="tied"), id, np.roll(np.arange(size), 1))
    found = verify(a, via=pi)
    assert not found.equal
    assert found.difference > 1e-3
    assert found.parting == parting


def test_outputs_of_modules_are_recorded_only_where_models_differ(made, monkeypatch):
    a = made("vit")
    pi = align(a, a, method="random", residual="tied")
    monkeypatch.setattr("transfusion.verification.verify.record_outputs", None)
    assert verify(a, via=pi).equal


def test_too_little_memory_is_refused(made):
    a = made("llama")
    pi = align(a, a, method="random", residual="tied")
    with pytest.raises(
        SettingError, match="is too little: a layer of the model in float64, moved by π, takes"
    ):
        verify(a, via=pi, resources=Resources(memory=PROGRAM + LIBRARY))
    assert verify(a, via=pi, resources=Resources(memory=2 * (PROGRAM + LIBRARY))).equal


def test_a_pi_of_other_weights_is_refused(made):
    pi = align(made("vit", 1), made("vit", 1), method="random", residual="tied")
    with pytest.raises(AlignmentError, match="was made from the weights of"):
        verify(made("vit", 2), via=pi)


def test_weights_without_a_folder_are_run_by_the_configuration_given(made, tmp_path):
    a = made("vit")
    lonely = tmp_path / "alone.safetensors"
    lonely.write_bytes((a / "model.safetensors").read_bytes())
    pi = align(a, a, method="random", residual="tied")
    assert verify(Model.open(lonely, config=a / "config.json"), via=pi).equal


def test_a_library_that_is_not_installed_is_named_with_its_extra():
    with pytest.raises(LibraryError, match="this needs no_such_library") as caught:
        require_library("no_such_library")
    assert caught.value.hint == "pip install 'transfusion-rebasin[no-such-library]'"
