"""Maps: inverses, composition, and two roads to the same tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfusion.errors import AlignmentError, LayoutError
from transfusion.layouts import parse
from transfusion.maps import Map, Permutation, _move_by_factors, move

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
    from transfusion.layouts import Name, size_of

    return tuple(2 if item == Name("_") else size_of(item, SIZES) for item in parse(text).items)


def rows(name: str) -> int:
    """How many maps an axis has: one per element of its ancestors."""
    return rows(parent) * SIZES[parent] if (parent := PARENTS.get(name)) else 1


@st.composite
def all_maps(draw: st.DrawFn) -> dict[str, Map]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return {name: Permutation.random(size, rows(name), rng) for name, size in SIZES.items()}


@pytest.mark.parametrize("text", LAYOUTS)
@given(maps=all_maps())
def test_the_fast_road_and_the_general_one_arrive_at_the_same_tensor(text: str, maps: dict[str, Map]):
    layout, tensor = parse(text), torch.randn(shape_of(text))
    slow = tensor
    for dim, item in enumerate(layout.items):
        slow = _move_by_factors(slow, dim, item, maps, SIZES, PARENTS, layout.outside(dim, PARENTS))
    assert torch.equal(move(tensor, layout, maps, SIZES, PARENTS), slow)


@given(maps=all_maps())
def test_a_parent_with_a_dimension_of_its_own_moves_like_one_in_a_product(maps: dict[str, Map]):
    tensor = torch.randn(shape_of("group vo x"))
    apart = move(tensor, parse("group vo x"), maps, SIZES, PARENTS)
    together = move(tensor.flatten(0, 1), parse("(group vo) x"), maps, SIZES, PARENTS)
    assert torch.equal(apart.flatten(0, 1), together)


def test_a_parent_that_comes_later_is_refused():
    maps = {"vo": Permutation.random(5, 2, np.random.default_rng(0))}
    with pytest.raises(LayoutError, match="axis vo lies within group, which does not enclose it") as caught:
        move(torch.randn(5, 2), parse("vo group"), maps, SIZES, PARENTS)
    assert "a dimension of its own before this one" in str(caught.value.hint)


def test_a_permutation_that_takes_a_position_twice_is_refused():
    with pytest.raises(AlignmentError, match="some position is taken twice"):
        Permutation(np.array([0, 0, 1]))


def test_a_random_permutation_moves_something():
    rng = np.random.default_rng(0)
    assert not any(Permutation.random(2, 1, rng).is_identity() for _ in range(50))
    assert Permutation.random(1, 3, rng).is_identity()


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_composition_is_one_after_the_other(first, second):
    lineage = np.zeros(1, dtype=np.int64)
    one, two = Permutation(np.array(first)), Permutation(np.array(second))
    tensor = torch.arange(5)
    assert torch.equal(two.after(one, lineage).apply(tensor, 0), two.apply(one.apply(tensor, 0), 0))
    assert one.after(one.inverse(lineage), lineage).is_identity()
    assert Permutation.from_tensor(one.to_tensor()) == one
