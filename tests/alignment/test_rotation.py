"""Rotations: orthogonal maps with scales; alone, in π, and in files."""

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

from tests.alignment.test_maps import LAYOUTS, PARENTS, SIZES, all_maps, lineage_of, rows, shape_of
from transfusion.alignment.alignment import Alignment, NormFold
from transfusion.alignment.maps import Map
from transfusion.alignment.moves import move_tensor, moves_by_rows
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import Policy
from transfusion.architecture.layouts import parse
from transfusion.errors import AlignmentError, TransfusionError

some = settings(max_examples=15)
ONE = np.zeros(1, dtype=np.int64)
"""The lineage of an axis without a parent."""


def as_rotation(map_: Map) -> Map:
    """A permutation as a rotation."""
    return Map.rotation(map_.matrix, map_.produced, map_.read)


def orthogonal(size: int, rng: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def matrices(name: str, rng: np.random.Generator) -> np.ndarray:
    return np.stack([orthogonal(SIZES[name], rng) for _ in range(rows(name))])


def random_rotation(name: str, rng: np.random.Generator, scaled: bool = True, apart: bool = False) -> Map:
    """A random rotation; with ``apart``, what is written has matrices of its own."""
    count = rows(name)
    scales = np.exp(rng.normal(size=(2, count))) if scaled else np.ones((2, count))
    return Map.rotation(matrices(name, rng), *scales, matrices(name, rng) if apart else None)


@st.composite
def rotations_below_permutations(draw: st.DrawFn) -> dict[str, Map]:
    """A rotation for every axis that nothing lies within, a permutation for the others."""
    rng, apart = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(st.booleans())
    return {
        name: Map.random(size, rows(name), rng)
        if name in PARENTS.values()
        else random_rotation(name, rng, apart=apart)
        for name, size in SIZES.items()
    }


# ── what is one ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "matrix",
    [
        np.ones((1, 2, 2)),
        2 * np.eye(3)[None],
        np.zeros((1, 2, 2)),
        np.full((1, 2, 2), np.nan),
        np.stack([np.eye(2), [[1.0, 0.1], [0.0, 1.0]]]),
        np.eye(2)[None] * [[[1.0], [1.01]]],
    ],
    ids=["ones", "doubled", "nothing", "no numbers", "one of two", "a little longer"],
)
def test_a_matrix_that_is_not_orthogonal_is_refused(matrix):
    with pytest.raises(AlignmentError, match="a matrix that is not orthogonal"):
        Map.rotation(matrix, np.ones(len(matrix)), np.ones(len(matrix)))


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 3), (1, 1, 2, 2), (4,)])
def test_what_is_no_stack_of_square_matrices_is_refused(shape):
    with pytest.raises(AlignmentError, match="not a stack of square matrices"):
        Map.rotation(np.zeros(shape), np.ones(shape[0]), np.ones(shape[0]))


@pytest.mark.parametrize("which", ["produced", "read"])
@pytest.mark.parametrize(
    "scale", [[0.0, 1.0], [1.0, -1.0], [np.nan, 1.0], [1.0, np.inf], [1.0], [1.0, 1.0, 1.0], [[1.0, 1.0]]]
)
def test_scales_are_positive_numbers_one_for_each_row(which, scale):
    scales = {"produced": np.ones(2), "read": np.ones(2), which: np.array(scale)}
    with pytest.raises(AlignmentError, match="scales that are not positive numbers, one for each block"):
        Map.rotation(np.stack([np.eye(3)] * 2), **scales)


def test_a_reflection_is_welcome_and_rounding_forgiven():
    matrix = np.diag([1.0, -1.0])[None]
    assert np.linalg.det(Map.rotation(matrix, [1], [1]).matrix[0]) == -1
    Map.rotation(matrix + 1e-4, [1], [1])


# ── what it does ─────────────────────────────────────────────────────────────────────────────


@given(seed=st.integers(0, 2**32 - 1))
def test_every_row_of_an_axis_within_others_is_turned_by_its_own_matrix(seed):
    """``unit`` lies within ``rep``, which lies within ``group``."""
    turn = random_rotation("unit", np.random.default_rng(seed))
    tensor = torch.randn(3, SIZES["rep"], SIZES["unit"], SIZES["group"], dtype=torch.float64)
    stacked = torch.from_numpy(turn.matrix).double().reshape(SIZES["group"], SIZES["rep"], 2, 2)
    for reads in (False, True):
        scale = torch.from_numpy(1 / turn.read if reads else turn.produced).double()
        scaled = stacked * scale.reshape(SIZES["group"], SIZES["rep"], 1, 1)
        wanted = torch.einsum("grij,arjg->arig", scaled, tensor)
        found = turn.apply(tensor, 2, (3, 1), reads=reads)
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@given(seed=st.integers(0, 2**32 - 1))
def test_a_change_of_weights_is_turned_at_both_ends_and_sized_by_what_is_written_and_read(seed):
    """Δ_B = s_out · Q_out τ Q_inᵀ / s_in, so that inputs of B's size make outputs of B's size."""
    rng = np.random.default_rng(seed)
    out, given_ = random_rotation("x", rng), random_rotation("ffn", rng)
    tau, inputs = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    q_out, q_in = (torch.from_numpy(one.matrix[0]).double() for one in (out, given_))
    wanted = float(out.produced[0]) * q_out @ tau @ q_in.T / float(given_.read[0])
    maps = {"x": out, "ffn": given_}
    moved = move_tensor(tau, parse("x <- ffn"), maps, SIZES, PARENTS)
    assert torch.allclose(moved, wanted, rtol=1e-5, atol=1e-5)
    transposed = move_tensor(tau.T, parse("ffn -> x"), maps, SIZES, PARENTS)
    assert torch.allclose(transposed, wanted.T, rtol=1e-5, atol=1e-5)
    of_b = float(given_.read[0]) * q_in @ inputs
    made = float(out.produced[0]) * q_out @ (tau @ inputs)
    assert torch.allclose(moved @ of_b, made, rtol=1e-4, atol=1e-4)
    bias = move_tensor(tau @ inputs, parse("x"), maps, SIZES, PARENTS)
    assert torch.allclose(bias, made, rtol=1e-4, atol=1e-4), "what has no inputs is written"


@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_written_may_have_a_matrix_of_its_own(seed):
    """Δ_B = s_out · W_out τ Q_inᵀ / s_in: a writer goes by one matrix of an axis, a reader by the other."""
    rng = np.random.default_rng(seed)
    x, ffn = (random_rotation(name, rng, apart=True) for name in ("x", "ffn"))
    maps = {"x": x, "ffn": ffn}
    for out, given_, text in ((x, ffn, "x <- ffn"), (ffn, x, "ffn <- x")):
        tau = torch.randn(out.size, given_.size, dtype=torch.float64)
        wanted = float(out.produced[0] / given_.read[0]) * out.writing[0] @ tau.numpy() @ given_.matrix[0].T
        moved = move_tensor(tau, parse(text), maps, SIZES, PARENTS)
        assert np.allclose(moved, wanted, rtol=1e-5, atol=1e-5)
        bias = move_tensor(tau[:, 0], parse(text.split()[0]), maps, SIZES, PARENTS)
        assert np.allclose(bias, float(out.produced[0]) * out.writing[0] @ tau[:, 0].numpy(), atol=1e-5)
    activations = torch.randn(x.size, 4, dtype=torch.float64)
    wanted = float(x.produced[0]) * x.matrix[0] @ activations.numpy()
    assert np.allclose(x.reading.apply(activations, 0), wanted, atol=1e-5)


def test_a_matrix_of_its_own_that_is_the_same_is_none():
    turn = random_rotation("vo", np.random.default_rng(0), apart=True)
    same = Map.rotation(turn.matrix, turn.produced, turn.read, turn.matrix.copy())
    assert same.writing is None
    assert same == turn.reading != turn
    assert same != turn
    assert turn == replace(turn)


@pytest.mark.parametrize(
    ("writing", "why"),
    [(2 * np.eye(3)[None], "not orthogonal"), (np.eye(2)[None], "reads by .* and writes by")],
    ids=["not orthogonal", "another size"],
)
def test_a_matrix_of_its_own_must_fit(writing, why):
    with pytest.raises(AlignmentError, match=why):
        Map.rotation(np.eye(3)[None], [1], [1], writing)


@some
@pytest.mark.parametrize("text", LAYOUTS)
@given(maps=all_maps())
def test_a_rotation_made_from_a_permutation_moves_like_it(text: str, maps: dict[str, Map]):
    layout, tensor = parse(text), torch.randn(shape_of(text), dtype=torch.float64)
    rotated = {name: as_rotation(map_) for name, map_ in maps.items()}
    assert rotated == maps
    moved = move_tensor(tensor, layout, maps, SIZES, PARENTS)
    assert torch.equal(move_tensor(tensor, layout, rotated, SIZES, PARENTS), moved)


@some
@pytest.mark.parametrize("text", LAYOUTS)
@given(maps=rotations_below_permutations())
def test_the_way_back_leads_home(text: str, maps: dict[str, Map]):
    layout, tensor = parse(text), torch.randn(shape_of(text), dtype=torch.float64)
    back = {name: map_.inverse(lineage_of(name, maps)) for name, map_ in maps.items()}
    there = move_tensor(tensor, layout, maps, SIZES, PARENTS)
    home = move_tensor(there, layout, back, SIZES, PARENTS)
    assert torch.allclose(home, tensor, rtol=1e-4, atol=1e-5)


@some
@pytest.mark.parametrize("text", LAYOUTS)
@given(first=rotations_below_permutations(), second=rotations_below_permutations(), third=all_maps())
def test_chained_rotations_do_one_after_the_other(text: str, first, second, third):
    """Rotations after rotations, permutations after rotations and rotations after permutations."""
    layout, tensor = parse(text), torch.randn(shape_of(text), dtype=torch.float64)
    for earlier, later in ((first, second), (first, third), (third, first)):
        chain = {name: later[name].after(earlier[name], lineage_of(name, later)) for name in SIZES}
        twice = move_tensor(
            move_tensor(tensor, layout, earlier, SIZES, PARENTS), layout, later, SIZES, PARENTS
        )
        found = move_tensor(tensor, layout, chain, SIZES, PARENTS)
        assert torch.allclose(found, twice, rtol=1e-4, atol=1e-4 * float(twice.abs().max()))


@given(seed=st.integers(0, 2**32 - 1))
def test_lengths_and_angles_stay(seed):
    turn = random_rotation("x", np.random.default_rng(seed), scaled=False)
    tensor = torch.randn(6, 5, dtype=torch.float64)
    moved = turn.apply(tensor, 0)
    assert torch.allclose(moved.T @ moved, tensor.T @ tensor, atol=1e-4)


def test_the_type_that_came_is_the_type_that_goes():
    turn = random_rotation("x", np.random.default_rng(0))
    tensor = torch.randn(6, 2)
    wide = turn.apply(tensor, 0)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = turn.apply(tensor.to(dtype), 0)
        assert narrow.dtype is dtype
        assert torch.allclose(narrow.float(), wide, atol=0.1)
    assert turn.apply(torch.arange(6), 0).dtype is torch.float32


def test_what_is_turned_does_not_move_row_by_row():
    maps = {"x": random_rotation("x", np.random.default_rng(0))}
    assert not moves_by_rows(parse("x <- ffn"), maps, PARENTS)
    assert moves_by_rows(parse("ffn <- x"), maps, PARENTS)


# ── what is equal ────────────────────────────────────────────────────────────────────────────


def test_equal_is_what_does_the_same():
    swap = Map.permutation(np.array([1, 0]))
    turn = as_rotation(swap)
    assert turn == swap
    assert swap == turn
    assert turn != Map.identity(2)
    assert Map.identity(2) != turn
    assert turn != Map.rotation(turn.matrix, [2], [1])
    assert turn != Map.rotation(turn.matrix, [1], [2])
    assert turn != Map.rotation(-turn.matrix, [1], [1])
    assert turn != as_rotation(Map.permutation(np.array([[1, 0], [1, 0]])))
    assert turn != "a rotation"


def test_nothing_moves_only_where_nothing_grows():
    still = as_rotation(Map.identity(3, 2))
    assert still.is_identity()
    assert not Map.rotation(still.matrix, [1, 2], [1, 1]).is_identity()
    assert not Map.rotation(still.matrix, [1, 1], [1, 2]).is_identity()
    assert not Map.rotation(-still.matrix, [1, 1], [1, 1]).is_identity()


def test_a_plan_is_no_rotation_and_a_rotation_no_plan():
    plan, turn = Map.plan(np.full((1, 2, 2), 0.5)), as_rotation(Map.permutation(np.array([1, 0])))
    with pytest.raises(AlignmentError, match="a rotation cannot be applied after a plan"):
        turn.after(plan, ONE)
    with pytest.raises(AlignmentError, match="a plan cannot be applied after a rotation"):
        plan.after(turn, ONE)
    assert turn != plan
    assert plan != turn


# ── in π, and in files ───────────────────────────────────────────────────────────────────────

PROVENANCE = Provenance("tiny", "0" * 64, Policy(), "functional", {}, 0, "a", "1" * 64, "b", "2" * 64)
FOLDS = {"layer.0.q.weight": NormFold("layer.0.norm"), "layer.0.up.weight": NormFold("layer.0.norm2", 1.0)}


@pytest.fixture(params=[False, True], ids=["together", "apart"])
def pi(request) -> Alignment:
    """With one matrix for each axis, and with two."""
    rng = np.random.default_rng(3)
    maps: dict[str, Map] = {
        "group": Map.random(2, 1, rng),
        "vo": random_rotation("vo", rng, apart=request.param),
        "x": random_rotation("x", rng, apart=request.param),
    }
    return Alignment(maps, SIZES, PARENTS, PROVENANCE, FOLDS)


def test_a_file_holds_rotations_and_folds(pi, tmp_path):
    again = Alignment.load(pi.save(tmp_path / "pi.safetensors"))
    assert again.maps == pi.maps
    assert again.folds == pi.folds
    assert again.digest == pi.digest
    assert again.provenance == pi.provenance


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


@pytest.mark.parametrize("scale", ["produced", "read", "values", "writing"])
def test_other_numbers_have_another_digest(pi, scale):
    turned = scale in ("values", "writing")
    other = replace(pi.maps["vo"], **{scale: -pi.maps["vo"].matrix if turned else np.ones(2)})
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
    shuffle = replace(pi, maps={name: Map.random(SIZES[name], rows(name), rng) for name in pi.maps}, folds={})
    layout, tensor = parse(text), torch.randn(shape_of(text), dtype=torch.float64)
    for earlier, later in ((pi, shuffle), (shuffle, pi)):
        chain = later.after(earlier)
        assert chain.folds == FOLDS
        twice = later.move(earlier.move(tensor, layout), layout)
        assert torch.allclose(chain.move(tensor, layout), twice, atol=1e-4)


def test_a_turn_keeps_what_is_written_at_its_size(pi):
    tensor = torch.randn(6, dtype=torch.float64)
    rotated = pi.rotate(tensor, parse("x"))
    assert torch.allclose(rotated.norm(), tensor.norm(), rtol=1e-5)
    assert torch.allclose(float(pi.maps["x"].produced[0]) * rotated, pi.move(tensor, parse("x")), atol=1e-5)


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
    kind = ["rotation,", "writes", "apart"] if (pi.maps["x"].writing is not None) else ["rotation"]
    assert [line.split() for line in out.splitlines() if "rotation" in line] == [
        ["vo", *kind, "5", "2"],
        ["x", *kind, "6", "1"],
    ]
    code, out, err = cli("inspect", path, "--json")
    assert code == 0, err
    described = json.loads(out)
    assert described["blake3"] == pi.digest
    assert described["advice"] == advice
    assert {id: axis["kind"] for id, axis in described["axes"].items()} == {
        id: map_.kind for id, map_ in pi.maps.items()
    }
    assert described["axes"]["x"]["writes_apart"] is (pi.maps["x"].writing is not None)
    assert described["axes"]["x"]["stays"] is None, "of what is turned, nothing has a place"
