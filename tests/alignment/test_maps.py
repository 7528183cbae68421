"""Maps of every kind: what they do, inverses, composition, and two roads to the same tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Kind, Map, Mover, move_tensor
from transfusion.architecture.layouts import parse
from transfusion.errors import AlignmentError, LayoutError

SIZES = {"group": 2, "rep": 3, "qk": 4, "vo": 5, "x": 6, "ffn": 3, "unit": 2}
PARENTS = {"rep": "group", "qk": "group", "vo": "group", "unit": "rep"}
LAYOUTS = (
    "(group rep qk) <- x",
    "x -> [(group qk)|(group qk)|(group vo)]",
    "x <- (group rep vo)",
    "(group [qk|vo]) <- x",
    "[ffn|ffn] <- x",
    "_ x",
    "group [qk|qk] <- x",
    "group x <- vo",
    "x group (rep qk)",
    "group x rep [unit|unit] _",
)
ONE = np.zeros(1, dtype=np.int64)
"""The lineage of an axis without a parent."""
some = settings(max_examples=15)
seeds = st.integers(0, 2**32 - 1)


def shape_of(text: str) -> tuple[int, ...]:
    from transfusion.architecture.layouts import Name, size_of

    return tuple(2 if item == Name("_") else size_of(item, SIZES) for item in parse(text).items)


def blocks(name: str) -> int:
    """How many maps an axis has: one per element of its ancestors."""
    return blocks(parent) * SIZES[parent] if (parent := PARENTS.get(name)) else 1


def orthogonal(name: str, rng: np.random.Generator) -> np.ndarray:
    size = SIZES[name]
    return np.stack([np.linalg.qr(rng.normal(size=(size, size)))[0] for _ in range(blocks(name))])


def random_rotation(name: str, rng: np.random.Generator) -> Map:
    scales = np.exp(rng.normal(size=(2, blocks(name))))
    return Map.rotation(orthogonal(name, rng), *scales)


def random_plan(name: str, rng: np.random.Generator) -> Map:
    shares = rng.random((blocks(name), SIZES[name], SIZES[name])) ** 4
    return Map.plan(shares / shares.sum(axis=2, keepdims=True))


def as_kind(map_: Map, kind: Kind) -> Map:
    """A permutation, written as another kind."""
    return Map.of(kind, map_.matrix, map_.produced, map_.read)


MAKE = {
    "permutation": lambda name, rng: Map.random(SIZES[name], blocks(name), rng),
    "plan": random_plan,
    "rotation": random_rotation,
}


def all_maps(kind: str, seed: int) -> dict[str, Map]:
    """A map for every axis; of the kind for those that nothing lies within, otherwise a permutation."""
    rng = np.random.default_rng(seed)
    return {name: MAKE["permutation" if name in PARENTS.values() else kind](name, rng) for name in SIZES}


def lineage_of(name: str, maps: dict[str, Map]) -> np.ndarray:
    return Alignment(maps, SIZES, PARENTS, provenance=None).lineage(name)  # type: ignore[arg-type]


def moved_by(maps: dict[str, Map], tensor: torch.Tensor, text: str) -> torch.Tensor:
    return move_tensor(tensor, parse(text), maps, SIZES, PARENTS)


def drawn(text: str) -> torch.Tensor:
    return torch.randn(shape_of(text), dtype=torch.float64)


# ── the algebra ──────────────────────────────────────────────────────────────────────────────


@some
@pytest.mark.parametrize("text", LAYOUTS)
@given(seed=seeds)
def test_all_roads_lead_to_the_same_tensor(text: str, seed: int):
    """By index, by unfolding, and by matrices of every kind."""
    maps, layout, tensor = all_maps("permutation", seed), parse(text), drawn(text)
    moved, slow = moved_by(maps, tensor, text), tensor
    mover = Mover(layout, maps, SIZES, PARENTS)
    for dim, item in enumerate(layout.items):
        slow = mover._move_by_factors(slow, dim, item, layout.outside(dim, PARENTS), reads=False)
    assert torch.equal(moved, slow)
    for kind in (Kind.PLAN, Kind.ROTATION):
        written = {name: as_kind(map_, kind) for name, map_ in maps.items()}
        assert written == maps
        assert torch.equal(moved_by(written, tensor, text), moved)
        mixed = {name: written[name] if place % 2 else maps[name] for place, name in enumerate(maps)}
        assert torch.equal(moved_by(mixed, tensor, text), moved)


@some
@pytest.mark.parametrize(
    "kinds",
    [
        (one, other)
        for one in MAKE
        for other in MAKE
        if "plan" not in (one, other) or {one, other} <= {"plan", "permutation"}
    ],
)
@pytest.mark.parametrize("text", LAYOUTS)
@given(seed=seeds)
def test_a_chain_does_one_after_the_other(text: str, kinds: tuple[str, str], seed: int):
    first, second = (all_maps(kind, seed + number) for number, kind in enumerate(kinds))
    chain = {name: second[name].after(first[name], lineage_of(name, second)) for name in SIZES}
    tensor = drawn(text)
    twice = moved_by(second, moved_by(first, tensor, text), text)
    atol = 1e-4 * float(twice.abs().max())
    assert torch.allclose(moved_by(chain, tensor, text), twice, rtol=1e-4, atol=atol)


@some
@pytest.mark.parametrize("kind", ["permutation", "rotation"])
@pytest.mark.parametrize("text", LAYOUTS)
@given(seed=seeds)
def test_the_way_back_leads_home(text: str, kind: str, seed: int):
    maps, tensor = all_maps(kind, seed), drawn(text)
    back = {name: map_.inverse(lineage_of(name, maps)) for name, map_ in maps.items()}
    home = moved_by(back, moved_by(maps, tensor, text), text)
    assert torch.allclose(home, tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", LAYOUTS)
@given(seed=seeds, factor=st.floats(-3, 3))
def test_plans_are_linear_and_keep_what_is_constant(text: str, seed: int, factor: float):
    maps, one, two = all_maps("plan", seed), drawn(text), drawn(text)
    both = moved_by(maps, one, text) + factor * moved_by(maps, two, text)
    assert torch.allclose(moved_by(maps, one + factor * two, text), both, atol=1e-12)
    assert torch.allclose(moved_by(maps, torch.ones_like(one), text), torch.ones_like(one), atol=1e-6)


@given(seed=seeds)
def test_the_inverse_of_a_plan_is_one_only_for_permutations(seed: int):
    maps = all_maps("permutation", seed)
    for name, map_ in maps.items():
        lineage = lineage_of(name, maps)
        assert as_kind(map_, Kind.PLAN).inverse(lineage) == map_.inverse(lineage)
        soft = random_plan(name, np.random.default_rng(0))
        assert np.allclose(soft.inverse(lineage).matrix.sum(axis=2), 1, atol=1e-6)
        assert not soft.after(soft.inverse(lineage), lineage).is_identity()
    plan = Map.plan(np.array([[[1.0, 0.0], [1.0, 0.0]]]))
    assert plan.inverse(ONE).matrix.tolist() == [[[0.5, 0.5], [0.5, 0.5]]], "a unit without a share"


def test_a_plan_is_no_rotation_and_nothing_undoes_a_projection():
    plan, turn = Map.plan(np.full((1, 2, 2), 0.5)), Map.rotation(np.eye(2)[None], [1], [1])
    for later, earlier in ((turn, plan), (plan, turn)):
        with pytest.raises(AlignmentError, match=f"a {later.kind} cannot be applied after a {earlier.kind}"):
            later.after(earlier, ONE)
    with pytest.raises(AlignmentError, match="has no inverse"):
        Map.rectangular(np.eye(2, 3)).inverse(ONE)


# ── what they do ─────────────────────────────────────────────────────────────────────────────


@given(seed=seeds)
def test_every_block_of_an_axis_within_others_has_its_own_matrix(seed: int):
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


@given(seed=seeds)
def test_a_change_of_weights_is_mapped_at_both_ends(seed: int):
    """Δ_B = s_out · W_out τ Q_inᵀ / s_in, so that inputs of B's size make outputs of B's size."""
    rng = np.random.default_rng(seed)
    out, into = random_rotation("x", rng), random_rotation("ffn", rng)
    maps, tau, inputs = {"x": out, "ffn": into}, rng.normal(size=(6, 3)), rng.normal(size=3)
    wanted = float(out.produced[0] / into.read[0]) * out.matrix[0] @ tau @ into.matrix[0].T
    moved = moved_by(maps, torch.from_numpy(tau), "x <- ffn")
    assert np.allclose(moved, wanted, rtol=1e-5, atol=1e-5)
    assert np.allclose(moved_by(maps, torch.from_numpy(tau.T), "ffn -> x"), wanted.T, rtol=1e-5, atol=1e-5)
    of_b = into.read[0] * into.matrix[0] @ inputs
    made = out.produced[0] * out.matrix[0] @ (tau @ inputs)
    assert np.allclose(moved.numpy() @ of_b, made, rtol=1e-4, atol=1e-4)
    bias = moved_by(maps, torch.from_numpy(tau @ inputs), "x")
    assert np.allclose(bias, made, rtol=1e-4, atol=1e-4), "what has no inputs is written"


@given(seed=seeds, ours=st.integers(1, 5), theirs=st.integers(1, 5))
def test_between_axes_of_different_sizes_the_same_is_computed(seed: int, ours: int, theirs: int):
    rng = np.random.default_rng(seed)
    matrix, tensor = rng.normal(size=(theirs, ours)), rng.normal(size=(2, ours, 3))
    map_ = Map.rectangular(matrix, 2.0, 4.0)
    wanted = np.einsum("ij,ajb->aib", matrix, tensor)
    assert np.allclose(map_.apply(torch.from_numpy(tensor), 1), 2 * wanted)
    assert np.allclose(map_.apply(torch.from_numpy(tensor), 1, reads=True), wanted / 4)
    assert (map_.size, map_.source_size) == (theirs, ours)


@given(seed=seeds)
def test_a_parent_with_a_dimension_of_its_own_moves_like_one_in_a_product(seed: int):
    maps, tensor = all_maps("permutation", seed), drawn("group vo x")
    apart = moved_by(maps, tensor, "group vo x")
    assert torch.equal(apart.flatten(0, 1), moved_by(maps, tensor.flatten(0, 1), "(group vo) x"))


@pytest.mark.parametrize("kind", MAKE)
def test_a_parent_that_comes_later_is_refused(kind: str):
    maps = {"vo": MAKE[kind]("vo", np.random.default_rng(0))}
    with pytest.raises(LayoutError, match="axis vo lies within group, which does not enclose it") as caught:
        moved_by(maps, torch.randn(5, 2), "vo group")
    assert "own before this one" in str(caught.value.hint)


@pytest.mark.parametrize("kind", ["plan", "rotation"])
def test_the_type_that_came_is_the_type_that_goes(kind: str):
    map_, tensor = MAKE[kind]("x", np.random.default_rng(0)), torch.randn(6, 2)
    wide = map_.apply(tensor, 0)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = map_.apply(tensor.to(dtype), 0)
        assert narrow.dtype is dtype
        assert torch.allclose(narrow.float(), wide, atol=0.1)
    assert map_.apply(torch.arange(6), 0).dtype is torch.float32


def test_only_permutations_of_rows_move_row_by_row():
    maps = {"x": random_rotation("x", np.random.default_rng(0))}
    assert not Mover(parse("x <- ffn"), maps, SIZES, PARENTS).by_rows
    assert Mover(parse("ffn <- x"), maps, SIZES, PARENTS).by_rows


# ── what is equal ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [Kind.PLAN, Kind.ROTATION])
def test_equal_is_what_does_the_same(kind: Kind):
    swap = Map.permutation(np.array([1, 0]))
    same = as_kind(swap, kind)
    assert same == swap == same
    assert same != Map.identity(2) != same
    assert as_kind(Map.identity(2), kind).is_identity()
    assert same != as_kind(Map.permutation(np.array([[1, 0], [1, 0]])), kind)
    assert same != "a map"


def test_nothing_moves_only_where_nothing_grows():
    eye = np.stack([np.eye(3)] * 2)
    assert Map.rotation(eye, [1, 1], [1, 1]).is_identity()
    assert not Map.rotation(eye, [1, 2], [1, 1]).is_identity()
    assert not Map.rotation(eye, [1, 1], [1, 2]).is_identity()
    assert not Map.rectangular(np.eye(2, 3)).is_identity()


def test_a_random_permutation_moves_something():
    rng = np.random.default_rng(0)
    assert not any(Map.random(2, 1, rng).is_identity() for _ in range(50))
    assert Map.random(1, 3, rng).is_identity()


# ── refusals ─────────────────────────────────────────────────────────────────────────────────


def test_a_permutation_that_takes_a_position_twice_is_refused():
    with pytest.raises(AlignmentError, match="a position occurs twice"):
        Map.permutation(np.array([0, 0, 1]))


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        (np.eye(2), "not a stack of square matrices"),
        (np.full((1, 2, 3), 1 / 3), "not a stack of square matrices"),
        (np.array([[[2.0, -1.0], [0.0, 1.0]]]), "negative or not numbers"),
        (np.array([[[np.nan, 1.0], [0.0, 1.0]]]), "negative or not numbers"),
        (np.array([[[0.5, 0.4], [0.0, 1.0]]]), "do not sum to 1"),
    ],
)
def test_a_matrix_that_is_no_plan_is_refused(matrix, reason):
    with pytest.raises(AlignmentError, match=reason):
        Map.plan(matrix)


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        (2 * np.eye(3)[None], "not orthogonal"),
        (np.full((1, 2, 2), np.nan), "not orthogonal"),
        (np.stack([np.eye(2), [[1.0, 0.1], [0.0, 1.0]]]), "not orthogonal"),
        (np.zeros((2, 2)), "not a stack of square matrices"),
        (np.zeros((1, 2, 3)), "not a stack of square matrices"),
    ],
)
def test_a_matrix_that_is_no_rotation_is_refused(matrix, reason):
    with pytest.raises(AlignmentError, match=reason):
        Map.rotation(matrix, np.ones(len(matrix)), np.ones(len(matrix)))


def test_a_reflection_is_welcome_and_rounding_forgiven():
    matrix = np.diag([1.0, -1.0])[None]
    assert np.linalg.det(Map.rotation(matrix, [1], [1]).matrix[0]) == -1
    Map.rotation(matrix + 1e-4, [1], [1])


@pytest.mark.parametrize("which", ["produced", "read"])
@pytest.mark.parametrize(
    "scale", [[0.0, 1.0], [1.0, -1.0], [np.nan, 1.0], [1.0, np.inf], [1.0], [[1.0, 1.0]]]
)
def test_scales_are_positive_numbers_one_for_each_block(which, scale):
    scales = {"produced": np.ones(2), "read": np.ones(2), which: np.array(scale)}
    with pytest.raises(AlignmentError, match="scales that are not positive numbers, one for each block"):
        Map.rotation(np.stack([np.eye(3)] * 2), **scales)


@pytest.mark.parametrize("matrix", [np.full((2, 3), np.inf), np.zeros((1, 2, 3)), np.zeros((0, 3))])
def test_between_axes_of_different_sizes_a_matrix_of_finite_numbers_is_wanted(matrix):
    with pytest.raises(AlignmentError, match="not a matrix of finite numbers"):
        Map.rectangular(matrix)
