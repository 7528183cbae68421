"""π of rotations and of other shapes: the same after a file; what is damaged is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.alignment.test_maps import PARENTS, SIZES, blocks, random_rotation, shape_of
from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map, NormFold
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import Policy
from transfusion.architecture.layouts import parse
from transfusion.errors import TransfusionError

PROVENANCE = Provenance("tiny", "0" * 64, Policy(), "functional", {}, 0, "a", "1" * 64, "b", "2" * 64)
FOLDS = {"layer.0.q.weight": NormFold("layer.0.norm"), "layer.0.up.weight": NormFold("layer.0.norm2", 1.0)}


@pytest.fixture
def pi() -> Alignment:
    rng = np.random.default_rng(3)
    maps: dict[str, Map] = {
        "group": Map.random(2, 1, rng),
        "vo": random_rotation("vo", rng),
        "x": random_rotation("x", rng),
    }
    return Alignment(maps, SIZES, PARENTS, PROVENANCE, FOLDS)


def test_a_file_holds_rotations_and_folds(pi, tmp_path):
    again = Alignment.load(pi.save(tmp_path / "pi.safetensors"))
    assert again.maps == pi.maps
    assert again.folds == pi.folds
    assert again.digest == pi.digest
    assert again.provenance == pi.provenance


@pytest.fixture
def between() -> Alignment:
    """From an axis of 6 units and two heads of 5 to one of 4 units and three heads of 5."""
    rng = np.random.default_rng(3)
    maps = {
        "x <- x": Map.rectangular(rng.normal(size=(4, 6)), 2.0, 3.0),
        "(group vo) <- (group vo)": Map.rectangular(rng.normal(size=(15, 10))),
    }
    return Alignment(
        maps,
        SIZES,
        PARENTS,
        PROVENANCE,
        FOLDS,
        {**SIZES, "x": 4, "group": 3},
        {},
        {"layer": ((0, 0, 0.5), (0, 1, 0.5))},
    )


def test_a_file_holds_maps_between_shapes(between, tmp_path):
    again = Alignment.load(between.save(tmp_path / "pi.safetensors"))
    assert again == between
    assert again.digest == between.digest
    other = replace(between, paths={"layer": ((0, 0, 0.4), (0, 1, 0.6))})
    assert other.digest != between.digest
    assert again.other_shape


@pytest.mark.parametrize(
    ("text", "onto"), [("(group vo) <- x", "(group vo) <- x"), ("(group vo) <- x", "x -> (group vo)")]
)
def test_a_tensor_is_mapped_dimension_by_dimension_and_stored_as_b_does(between, text, onto):
    tau = torch.randn(10, 6, dtype=torch.float64)
    out, into = (torch.from_numpy(between.maps[f"{one} <- {one}"].matrix[0]) for one in ("(group vo)", "x"))
    wanted = out @ tau @ into.T / 3
    found = between.move(tau, parse(text), parse(onto))
    assert torch.allclose(found, wanted if onto == text else wanted.T)


def test_a_map_between_shapes_must_fit_both_sizes(between, tmp_path):
    path = between.save(tmp_path / "pi.safetensors")
    with pytest.raises(TransfusionError, match="x <- x must be a rectangular of shape .1, 5, 6.*damaged"):
        Alignment.load(damaged(path, change_header=lambda header: header["sizes_b"].update(x=5)))


def header_of(path) -> dict:
    with safe_open(path, framework="pt") as opened:
        return json.loads(opened.metadata()["transfusion"])


@pytest.mark.parametrize(
    "folds",
    [
        {},
        {"layer.0.q.weight": FOLDS["layer.0.q.weight"]},
        {**FOLDS, "layer.0.q.weight": NormFold("layer.0.norm2")},
        {**FOLDS, "layer.0.q.weight": NormFold("layer.0.norm", 1.0)},
        {**FOLDS, "layer.0.k.weight": NormFold("layer.0.norm")},
    ],
    ids=["none", "one less", "another norm", "another offset", "one more"],
)
def test_other_folds_have_another_digest(pi, folds):
    assert replace(pi, folds=folds).digest != pi.digest


@pytest.mark.parametrize("scale", ["produced", "read", "values"])
def test_other_numbers_have_another_digest(pi, scale):
    turned = -pi.maps["vo"].matrix if scale == "values" else np.ones(2)
    other = replace(pi.maps["vo"], **{scale: turned})
    assert replace(pi, maps={**pi.maps, "vo": other}).digest != pi.digest


def test_the_order_of_folds_does_not_matter(pi):
    assert replace(pi, folds=dict(reversed(FOLDS.items()))).digest == pi.digest


@pytest.mark.parametrize("text", ["(group vo) <- x", "x <- (group vo)", "x", "(group vo)"])
def test_there_and_back_is_nothing(pi, text):
    layout, tensor = parse(text), torch.randn(shape_of(text), dtype=torch.float64)
    back = pi.inverse()
    assert back.folds == pi.folds
    assert torch.allclose(back.move(pi.move(tensor, layout), layout), tensor, atol=1e-5)
    assert torch.allclose(back.after(pi).move(tensor, layout), tensor, atol=1e-5)
    assert torch.allclose(pi.after(back).move(tensor, layout), tensor, atol=1e-5)
    assert pi.after(back).folds == pi.folds


@pytest.mark.parametrize("text", ["(group vo) <- x", "x <- (group vo)"])
def test_before_or_after_permutations_it_does_one_after_the_other(pi, text):
    rng = np.random.default_rng(4)
    shuffle = replace(
        pi, maps={name: Map.random(SIZES[name], blocks(name), rng) for name in pi.maps}, folds={}
    )
    layout, tensor = parse(text), torch.randn(shape_of(text), dtype=torch.float64)
    for earlier, later in ((pi, shuffle), (shuffle, pi)):
        chain = later.after(earlier)
        assert chain.folds == FOLDS
        twice = later.move(earlier.move(tensor, layout), layout)
        assert torch.allclose(chain.move(tensor, layout), twice, atol=1e-4)


def test_a_turn_keeps_what_is_written_at_its_size(pi):
    tensor = torch.randn(6, dtype=torch.float64)
    moved = pi.move(tensor, parse("x"))
    assert torch.allclose(moved.norm(), float(pi.maps["x"].produced[0]) * tensor.norm(), rtol=1e-5)


def damaged(path, change_tensors=lambda tensors: None, change_header=lambda provenance: None):
    """A file of π with other content under the same digest."""
    tensors, provenance = load_file(path), header_of(path)
    change_tensors(tensors)
    change_header(provenance)
    save_file(tensors, path, {"transfusion": json.dumps(provenance)})
    return path


def forget(tensors):
    del tensors["x"]


DAMAGES = {
    "a number": (lambda tensors: tensors["x"][0].mul_(-1), None),
    "a scale": (None, lambda header: header["maps"]["vo"].update(read=[1.0, 3.0])),
    "no scale": (None, lambda header: header["maps"]["vo"].update(read=[0.0, 1.0])),
    "a scale too few": (None, lambda header: header["maps"]["vo"].update(produced=[1.0])),
    "not orthogonal": (lambda tensors: tensors["x"][0, 0].mul_(2), None),
    "flat": (lambda tensors: tensors.update(x=tensors["x"][0].clone()), None),
    "too small": (lambda tensors: tensors.update(x=tensors["x"][:, :1].clone()), None),
    "empty": (lambda tensors: tensors.update(x=torch.zeros(1, 0, 0)), None),
    "missing": (forget, None),
    "a kind": (None, lambda header: header["maps"]["x"].update(kind="plan")),
    "an unknown kind": (None, lambda header: header["maps"]["x"].update(kind="spiral")),
    "a permutation's kind": (None, lambda header: header["maps"]["group"].update(kind="rotation")),
    "a fold": (None, lambda provenance: provenance["folds"]["layer.0.q.weight"].update(norm="layer.0.norm2")),
    "an offset": (None, lambda provenance: provenance["folds"]["layer.0.q.weight"].update(offset=1.0)),
    "no folds": (None, lambda provenance: provenance.pop("folds")),
    "strange folds": (
        None,
        lambda provenance: provenance["folds"].update({"layer.0.q.weight": {"scale": 2}}),
    ),
    "a size": (None, lambda provenance: provenance["sizes"].update(x=7)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(damage, pi, tmp_path):
    nothing = lambda content: None  # noqa: E731
    tensors, provenance = (change or nothing for change in DAMAGES[damage])
    path = pi.save(tmp_path / "pi.safetensors")
    assert Alignment.load(damaged(path)).digest == pi.digest, "undamaged"
    with pytest.raises(TransfusionError, match="damaged"):
        Alignment.load(damaged(path, tensors, provenance))


def test_inspect_tells_what_is_turned(pi, cli, tmp_path):
    advice = {"verdict": "predicted", "text": "99% of B's activations", "found": 0.99, "axes": {}}
    info = replace(pi, provenance=replace(pi.provenance, advice=advice))
    path = info.save(tmp_path / "pi.safetensors")
    code, out, err = cli("inspect", path)
    assert code == 0, err
    assert "method functional" in out
    assert "predicted: 99% of B's activations" in out
    assert [line.split() for line in out.splitlines() if "rotation" in line] == [
        ["vo", "rotation", "5", "2"],
        ["x", "rotation", "6", "1"],
    ]
    code, out, err = cli("inspect", path, "--json")
    assert code == 0, err
    described = json.loads(out)
    assert described["blake3"] == pi.digest
    assert described["advice"] == advice
    assert {id: axis["kind"] for id, axis in described["axes"].items()} == {
        id: map_.kind for id, map_ in pi.maps.items()
    }
    assert described["axes"]["x"]["stays"] is None, "of what is turned, nothing has a place"
