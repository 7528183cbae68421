"""Maps: inverses, composition, and two roads to the same tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfusion.alignment.maps import Map
from transfusion.alignment.moves import _move_by_factors, move_tensor
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


def shape_of(text: str) -> tuple[int, ...]:
    from transfusion.architecture.layouts import Name, size_of

    return tuple(2 if item == Name("_") else size_of(item, SIZES) for item in parse(text).items)


def rows(name: str) -> int:
    """How many maps an axis has: one per element of its ancestors."""
    return rows(parent) * SIZES[parent] if (parent := PARENTS.get(name)) else 1


@st.composite
def all_maps(draw: st.DrawFn) -> dict[str, Map]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return {name: Map.random(size, rows(name), rng) for name, size in SIZES.items()}


@pytest.mark.parametrize("text", LAYOUTS)
@given(maps=all_maps())
def test_the_fast_road_and_the_general_one_arrive_at_the_same_tensor(text: str, maps: dict[str, Map]):
    layout, tensor = parse(text), torch.randn(shape_of(text))
    slow = tensor
    for dim, item in enumerate(layout.items):
        slow = _move_by_factors(slow, dim, item, maps, SIZES, PARENTS, layout.outside(dim, PARENTS))
    assert torch.equal(move_tensor(tensor, layout, maps, SIZES, PARENTS), slow)


@given(maps=all_maps())
def test_a_parent_with_a_dimension_of_its_own_moves_like_one_in_a_product(maps: dict[str, Map]):
    tensor = torch.randn(shape_of("group vo x"))
    apart = move_tensor(tensor, parse("group vo x"), maps, SIZES, PARENTS)
    together = move_tensor(tensor.flatten(0, 1), parse("(group vo) x"), maps, SIZES, PARENTS)
    assert torch.equal(apart.flatten(0, 1), together)


def test_a_parent_that_comes_later_is_refused():
    maps = {"vo": Map.random(5, 2, np.random.default_rng(0))}
    with pytest.raises(LayoutError, match="axis vo lies within group, which does not enclose it") as caught:
        move_tensor(torch.randn(5, 2), parse("vo group"), maps, SIZES, PARENTS)
    assert "a dimension of its own before this one" in str(caught.value.hint)


def test_a_permutation_that_takes_a_position_twice_is_refused():
    with pytest.raises(AlignmentError, match="a position occurs twice"):
        Map.permutation(np.array([0, 0, 1]))


def test_a_random_permutation_moves_something():
    rng = np.random.default_rng(0)
    assert not any(Map.random(2, 1, rng).is_identity() for _ in range(50))
    assert Map.random(1, 3, rng).is_identity()


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_composition_is_one_after_the_other(first, second):
    lineage = np.zeros(1, dtype=np.int64)
    one, two = Map.permutation(np.array(first)), Map.permutation(np.array(second))
    tensor = torch.arange(5)
    assert torch.equal(two.after(one, lineage).apply(tensor, 0), two.apply(one.apply(tensor, 0), 0))
    assert one.after(one.inverse(lineage), lineage).is_identity()


# ── plans ────────────────────────────────────────────────────────────────────────────────────


def random_plan(name: str, rng: np.random.Generator) -> Map:
    shares = rng.random((rows(name), SIZES[name], SIZES[name])) ** 4
    return Map.plan(shares / shares.sum(axis=2, keepdims=True))


@st.composite
def plans_below_permutations(draw: st.DrawFn) -> dict[str, Map]:
    """A plan for every axis that nothing lies within, a permutation for the others."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return {
        name: Map.random(size, rows(name), rng) if name in PARENTS.values() else random_plan(name, rng)
        for name, size in SIZES.items()
    }


def lineage_of(name: str, maps: dict[str, Map]) -> np.ndarray:
    from transfusion.alignment.alignment import Alignment

    return Alignment(maps, SIZES, PARENTS, provenance=None).lineage(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", LAYOUTS)
@given(maps=all_maps())
def test_a_plan_made_from_a_permutation_moves_like_it(text: str, maps: dict[str, Map]):
    layout, tensor = parse(text), torch.randn(shape_of(text), dtype=torch.float64)
    plans = {name: Map.plan(map_.matrix) for name, map_ in maps.items()}
    assert plans == maps
    moved = move_tensor(tensor, layout, maps, SIZES, PARENTS)
    assert torch.equal(move_tensor(tensor, layout, plans, SIZES, PARENTS), moved)
    mixed = {name: plans[name] if place % 2 else maps[name] for place, name in enumerate(maps)}
    assert torch.equal(move_tensor(tensor, layout, mixed, SIZES, PARENTS), moved)


@pytest.mark.parametrize("text", LAYOUTS)
@given(maps=plans_below_permutations(), factor=st.floats(-3, 3))
def test_plans_are_linear(text: str, maps: dict[str, Map], factor: float):
    layout = parse(text)
    one, two = torch.randn(2, *shape_of(text), dtype=torch.float64)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return move_tensor(tensor, layout, maps, SIZES, PARENTS)

    assert torch.allclose(moved(one + factor * two), moved(one) + factor * moved(two), atol=1e-12)
    assert torch.allclose(moved(torch.ones_like(one)), torch.ones_like(one), atol=1e-6)


@pytest.mark.parametrize("text", LAYOUTS)
@given(first=plans_below_permutations(), second=plans_below_permutations(), third=all_maps())
def test_chained_plans_do_one_after_the_other(text: str, first, second, third):
    layout, tensor = parse(text), torch.randn(shape_of(text), dtype=torch.float64)
    for earlier, later in ((first, second), (first, third), (third, first)):
        chain = {name: later[name].after(earlier[name], lineage_of(name, later)) for name in SIZES}
        twice = move_tensor(
            move_tensor(tensor, layout, earlier, SIZES, PARENTS), layout, later, SIZES, PARENTS
        )
        assert torch.allclose(move_tensor(tensor, layout, chain, SIZES, PARENTS), twice, atol=1e-5)


@given(maps=all_maps())
def test_the_inverse_of_a_plan_is_one_only_for_permutations(maps: dict[str, Map]):
    for name, map_ in maps.items():
        lineage = lineage_of(name, maps)
        assert Map.plan(map_.matrix).inverse(lineage) == map_.inverse(lineage)
        soft = random_plan(name, np.random.default_rng(0))
        assert np.allclose(soft.inverse(lineage).matrix.sum(axis=2), 1, atol=1e-6)
        assert not soft.after(soft.inverse(lineage), lineage).is_identity()


def test_a_unit_that_nothing_is_made_of_comes_back_as_the_mean_of_all():
    plan = Map.plan(np.array([[[1.0, 0.0], [1.0, 0.0]]]))
    assert plan.inverse(np.zeros(1, dtype=np.int64)).matrix.tolist() == [[[0.5, 0.5], [0.5, 0.5]]]


def test_plans_are_equal_to_what_does_the_same():
    turn = Map.permutation(np.array([1, 0]))
    assert Map.plan(turn.matrix) == turn
    assert turn == Map.plan(turn.matrix)
    assert turn != Map.plan(Map.identity(2).matrix)
    assert Map.plan(Map.identity(2).matrix).is_identity()


def test_a_plan_computes_in_float32_and_gives_back_the_type_it_got():
    plan = random_plan("x", np.random.default_rng(0))
    tensor = torch.randn(6, 2)
    wide = plan.apply(tensor, 0)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = plan.apply(tensor.to(dtype), 0)
        assert narrow.dtype is dtype
        assert torch.allclose(narrow.float(), wide, atol=0.05)


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


def test_a_plan_within_a_parent_that_comes_later_is_refused():
    maps = {"vo": random_plan("vo", np.random.default_rng(0))}
    with pytest.raises(LayoutError, match="axis vo lies within group, which does not enclose it"):
        move_tensor(torch.randn(5, 2), parse("vo group"), maps, SIZES, PARENTS)
