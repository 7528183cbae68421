"""The notation: strings right and wrong, sizes, index maps, pieces; the algebra as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfusion.architecture.layouts import (
    Concat,
    Layout,
    Name,
    Product,
    explode,
    index_map,
    names_in,
    parse,
    size_of,
    solve_sizes,
)
from transfusion.errors import LayoutError

AXES = ("a", "b", "c", "head", "x@next", "layer.3.qk")
names = st.sampled_from(AXES).map(Name)
items = st.recursive(
    names,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Product(tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Concat(tuple(parts))),
    ),
    max_leaves=5,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    drawn = tuple(draw(st.lists(st.one_of(items, st.just(Name("_"))), min_size=0, max_size=4)))
    arrow = draw(st.sampled_from([None, "<-", "->"])) if len(drawn) > 1 else None
    split = draw(st.integers(1, len(drawn) - 1)) if arrow else 0
    return Layout(drawn, arrow, split)


sizes_of_axes = st.fixed_dictionaries({name: st.integers(1, 4) for name in AXES})


@st.composite
def items_with_permutations(draw: st.DrawFn) -> tuple[Name | Product | Concat, dict, dict]:
    item = draw(items)
    sizes = draw(sizes_of_axes)
    permutations = {
        name: np.array([draw(st.permutations(range(sizes[name])))], dtype=np.int64)
        for name in dict.fromkeys(names_in(item))
    }
    return item, sizes, permutations


def column(item: Name | Product | Concat, sizes: dict) -> np.ndarray:
    return np.arange(size_of(item, sizes))


# ── parse ────────────────────────────────────────────────────────────────────────────────────


@given(layouts())
def test_printing_and_parsing_return_the_same_layout(layout: Layout):
    assert parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Layout(())),
        ("x", Layout((Name("x"),))),
        ("_ position x@first", Layout((Name("_"), Name("position"), Name("x@first")))),
        ("(head qk) <- x", Layout((Product((Name("head"), Name("qk"))), Name("x")), "<-", 1)),
        ("ffn -> x@next", Layout((Name("ffn"), Name("x@next")), "->", 1)),
        ("[ffn|ffn] y", Layout((Concat((Name("ffn"), Name("ffn"))), Name("y")))),
        (
            "(head [qk|qk|vo]) x",
            Layout((Product((Name("head"), Concat((Name("qk"), Name("qk"), Name("vo"))))), Name("x"))),
        ),
        ("layer.3.x", Layout((Name("layer.3.x"),))),
    ],
)
def test_what_layouts_mean(text: str, expected: Layout):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("(head qk", 9, "'(' is never closed; add ')'"),
        ("[a|b", 5, "'[' is never closed; add ']'"),
        ("[a b]", 4, "expected '|' or ']'"),
        ("(a|b)", 3, "expected an axis name, '(' or '['"),
        ("head)", 5, "expected an axis name, '(' or '['"),
        ("(head)", 6, "'()' needs at least two items"),
        ("a <- b <- c", 8, "a layout has at most one arrow"),
        ("<- a", 1, "an arrow needs an axis before it"),
        ("a ->", 5, "an arrow needs an axis after it"),
        ("(a _)", 4, "'_' stands for a whole dimension"),
        ("a, b", 2, "expected an axis name"),
        ("3 b", 1, "expected an axis name"),
        ("x@", 2, "expected an axis name"),
    ],
)
def test_wrong_strings_are_pointed_at(text: str, column: int, reason: str):
    with pytest.raises(LayoutError) as caught:
        parse(text)
    assert (
        caught.value.message == f"layout {text!r}, column {column}: " + caught.value.message.split(": ", 1)[1]
    )
    assert reason in caught.value.message
    assert caught.value.hint == f"{text}\n      {' ' * (column - 1)}^"


def test_an_arrow_tells_inputs_from_outputs():
    linear, conv1d = parse("(head qk) <- x"), parse("x -> (head qk)")
    assert (list(linear.outputs), list(linear.inputs)) == ([0], [1])
    assert (list(conv1d.outputs), list(conv1d.inputs)) == ([1], [0])
    assert str(linear.part(linear.outputs)) == str(conv1d.part(conv1d.outputs)) == "(head qk)"
    assert list(parse("x").outputs) == list(parse("x").inputs) == []


# ── sizes ────────────────────────────────────────────────────────────────────────────────────


@given(items, sizes_of_axes)
def test_sizes_agree_with_the_shape_they_came_from(item, sizes):
    layout = Layout((item,))
    assert solve_sizes(layout, (size_of(item, sizes),), sizes) == {}


@pytest.mark.parametrize(
    ("text", "shape", "known", "found"),
    [
        ("(head qk) <- x", (12, 8), {"head": 3}, {"qk": 4, "x": 8}),
        ("[(head qk)|(head qk)|(head vo)] x", (30, 8), {"head": 2, "vo": 3}, {"qk": 6, "x": 8}),
        ("[ffn|ffn] y", (10, 3), {}, {"ffn": 5, "y": 3}),
        ("(head qk) (head vo)", (12, 6), {"qk": 4}, {"head": 3, "vo": 2}),
        ("(head qk) x", (12, 8), {}, {"x": 8}),
        ("_ _ x", (1, 1, 5), {}, {"x": 5}),
        ("", (), {}, {}),
    ],
)
def test_sizes_are_inferred(text, shape, known, found):
    assert solve_sizes(parse(text), shape, known) == found


@pytest.mark.parametrize(
    ("text", "shape", "known", "reason"),
    [
        (
            "(head qk) <- x", (13, 8), {"head": 3},
            "q.weight of shape (13, 8) does not fit its layout '(head qk) <- x': dimension 0 is (head qk),"
            " and no size of qk makes it 13 (known sizes: head=3)",
        ),
        (
            "(head qk) <- x", (12, 8), {"head": 3, "qk": 4, "x": 9},
            "q.weight of shape (12, 8) does not fit its layout '(head qk) <- x': dimension 1 is x = 9, the"
            " tensor has 8 (known sizes: head=3, qk=4, x=9)",
        ),
        (
            "x", (12, 8), {},
            "q.weight of shape (12, 8) does not fit its layout 'x': the layout has 1 dimensions and the"
            " tensor 2",
        ),
    ],
)  # fmt: skip
def test_misfits_show_layout_tensor_shape_and_sizes(text, shape, known, reason):
    with pytest.raises(LayoutError) as caught:
        solve_sizes(parse(text), shape, known, "q.weight")
    assert caught.value.message == reason
    assert "config.json" in str(caught.value.hint)


# ── index maps ───────────────────────────────────────────────────────────────────────────────


@given(items_with_permutations())
def test_an_index_map_is_a_permutation_and_undone_by_the_inverse(drawn):
    item, sizes, permutations = drawn
    index = index_map(item, sizes, permutations, {})
    assert sorted(index) == list(column(item, sizes))
    inverse = {name: np.argsort(one, axis=1) for name, one in permutations.items()}
    assert np.array_equal(index[index_map(item, sizes, inverse, {})], column(item, sizes))


@given(items_with_permutations())
def test_moving_axes_one_after_the_other_in_any_order_is_moving_them_at_once(drawn):
    item, sizes, permutations = drawn
    together = index_map(item, sizes, permutations, {})
    for order in (sorted(permutations), sorted(permutations, reverse=True)):
        moved = column(item, sizes)
        for name in order:
            moved = moved[index_map(item, sizes, {name: permutations[name]}, {})]
        assert np.array_equal(moved, together)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_fused_layout_equals_moving_its_parts(head, qk, vo, random):
    sizes = {"head": head, "qk": qk, "vo": vo}
    shuffled = {name: np.array([random.sample(range(size), size)]) for name, size in sizes.items()}
    fused = parse("[(head qk)|(head qk)|(head vo)]").items[0]
    parts = fused.parts
    blocks = np.split(np.arange(size_of(fused, sizes)), np.cumsum([size_of(p, sizes) for p in parts])[:-1])
    apart = [block[index_map(part, sizes, shuffled, {})] for block, part in zip(blocks, parts, strict=True)]
    assert np.array_equal(index_map(fused, sizes, shuffled, {}), np.concatenate(apart))


def test_a_child_has_one_permutation_for_each_place_of_its_parent():
    sizes = {"head": 2, "qk": 3}
    swap_heads_and_turn_within = {"head": np.array([[1, 0]]), "qk": np.array([[0, 1, 2], [1, 2, 0]])}
    index = index_map(parse("(head qk)").items[0], sizes, swap_heads_and_turn_within, {"qk": "head"})
    assert index.tolist() == [3, 4, 5, 1, 2, 0]


def test_grouped_heads_share_a_child_across_what_stands_between():
    """In (group rep vo) the map of vo follows the group, whichever rep it is in."""
    sizes = {"group": 2, "rep": 2, "vo": 2}
    maps = {
        "group": np.array([[1, 0]]),
        "rep": np.array([[1, 0], [0, 1]]),
        "vo": np.array([[0, 1], [1, 0]]),
    }
    parents = {"rep": "group", "vo": "group"}
    index = index_map(parse("(group rep vo)").items[0], sizes, maps, parents)
    assert index.tolist() == [6, 7, 4, 5, 1, 0, 3, 2]


def test_interleaved_heads_move_like_separate_ones():
    sizes = {"head": 2, "qk": 2, "vo": 3}
    rng = np.random.default_rng(0)
    maps = {
        "head": np.array([[1, 0]]),
        "qk": np.stack([rng.permutation(2) for _ in range(2)]),
        "vo": np.stack([rng.permutation(3) for _ in range(2)]),
    }
    parents = {"qk": "head", "vo": "head"}
    interleaved = index_map(parse("(head [qk|qk|vo])").items[0], sizes, maps, parents)
    values = np.arange(14).reshape(2, 7)[index_map(Name("head"), sizes, maps, {})]
    separate = [index_map(parse("(head vo)").items[0], sizes, {"vo": maps["vo"]}, parents) % 3]
    assert np.array_equal(
        interleaved.reshape(2, 7)[:, 4:], np.take_along_axis(values[:, 4:], separate[0].reshape(2, 3), 1)
    )


def test_nothing_moves_where_no_axis_has_a_map():
    assert index_map(parse("(head qk)").items[0], {"head": 2, "qk": 3}, {"x": np.array([[1, 0]])}, {}) is None


def test_a_child_outside_its_parent_is_refused():
    with pytest.raises(LayoutError, match="axis qk lies within head, which does not enclose it"):
        index_map(Name("qk"), {"qk": 2, "head": 2}, {"qk": np.array([[1, 0], [0, 1]])}, {"qk": "head"})


# ── pieces ───────────────────────────────────────────────────────────────────────────────────


def test_pieces_have_one_axis_per_dimension():
    layout = parse("x -> [(head qk)|(head vo)]")
    sizes = {"x": 2, "head": 3, "qk": 4, "vo": 5}
    array = np.arange(2 * 27).reshape(2, 27)
    (first, factors), (second, others) = explode(array, layout, sizes)
    assert [(f.name, f.dim) for f in factors] == [("x", 0), ("head", 1), ("qk", 1)]
    assert [(f.name, f.dim) for f in others] == [("x", 0), ("head", 1), ("vo", 1)]
    assert np.array_equal(first, array[:, :12].reshape(2, 3, 4))
    assert np.array_equal(second, array[:, 12:].reshape(2, 3, 5))


@given(items, sizes_of_axes)
def test_pieces_hold_everything_once(item, sizes):
    array = column(item, sizes)
    pieces = [piece for piece, _ in explode(array, Layout((item,)), sizes)]
    assert sorted(np.concatenate([piece.reshape(-1) for piece in pieces])) == list(array)


def test_a_piece_of_a_concatenation_has_a_layout_of_its_own():
    layout = parse("[(head qk)|ffn] <- x")
    assert [str(layout.piece(place)) for place in (0, 1)] == ["(head qk) <- x", "ffn <- x"]
