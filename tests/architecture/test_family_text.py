"""Families as text: what lines mean, and what is said about lines that mean nothing."""

from __future__ import annotations

import pytest

from transfusion.architecture.binding import bind
from transfusion.architecture.family_library import Library
from transfusion.architecture.family_text import Expression
from transfusion.architecture.table import Axis, Draw, Symmetry
from transfusion.errors import ArchitectureError

TOY = """
keys usual
    dropout seed

fragment mlp
    up.*     ffn <- y
    down.*   x@next <- ffn
    skip up   y -> x@next   down

family toy
library mine
models toy
prefixes model.
ignores @usual colour
requires norm   before | null
defaults heads = 2, gated = False
axis head
axis qk in head
axis vo in head with qk
axis ffn
fixed vocab: token ids select its rows
stack layer blocks
sizes x = width, head = heads, qk = head_dim or None
embed.weight           vocab -> x@first
blocks.{}.{q,k}.weight   (head qk) <- x
blocks.{}.v.*          (head vo) <- x
blocks.{}.o.*          y <- (head vo)  # a comment
when gated
    blocks.{}.gate.*   ffn <- y
otherwise
    let act = "relu"
@mlp below blocks.{}.
skip blocks.{}.q   x -> y   blocks.{}.o
heads
    score.*   label <- x@last
fixed label: the order of the labels is the meaning of the output
output hidden = x@last
output loss = none
tie score.weight = embed.weight
same x@first x@last
draw ids = Draw((length,), low=0, high=9, whole=True)
"""
CONFIG = {"blocks": 2, "width": 6, "length": 5}


def library(*texts: str) -> Library:
    found = Library({"double": lambda value: 2 * value}, lambda *_: None)
    for text in texts:
        found.read(text, "toy.family")
    return found


def family(text: str, name: str = "toy"):
    return library(TOY, text).family(name)


def table(text: str = "", name: str = "toy", names=(), **config):
    return family(text, name).table({**CONFIG, **config}, frozenset(names))


def rows(found, stack: int = 0) -> dict[str, str]:
    return found.stacks[stack].rows


# ── meaning ──────────────────────────────────────────────────────────────────────────────────


def test_a_family_is_recognised_and_named():
    toy = family("")
    assert (toy.name, toy.library, toy.model_types, toy.prefixes) == ("toy", "mine", ("toy",), ("model.",))
    assert toy.required == {"norm": ("before", None)}


def test_keys_that_expressions_read_are_known_as_well():
    read = {"heads", "gated", "blocks", "width", "head_dim", "length"}
    assert family("").known_keys == {"dropout", "seed", "colour", *read}


def test_rows_fragments_and_alternatives_are_one_table():
    found = table()
    assert list(rows(found)) == [
        *("embed.weight", "blocks.{}.q.weight", "blocks.{}.k.weight", "blocks.{}.v.*", "blocks.{}.o.*"),
        *("blocks.{}.up.*", "blocks.{}.down.*"),
    ]
    assert list(found.stacks[0].shortcuts.values()) == [
        ("blocks.{}.up", "y", "x@next", "blocks.{}.down"),
        ("blocks.{}.q", "x", "y", "blocks.{}.o"),
    ]
    assert found.heads == {"score.*": "label <- x@last"}
    assert found.outputs == {"hidden": "x@last", "loss": None}
    assert (found.ties, found.unified) == ({"score.weight": "embed.weight"}, [("x@first", "x@last")])
    assert Axis("vo", within="head", tied_with="qk") in found.axes
    assert {axis.name for axis in found.axes if axis.group is Symmetry.FIXED} == {"vocab", "label"}


def test_sizes_are_expressions_over_settings_with_defaults():
    assert table().stacks[0].sizes == {"x": 6, "head": 2}
    assert table(heads=3, head_dim=7).stacks[0].sizes == {"x": 6, "head": 3, "qk": 7}
    with pytest.raises(KeyError, match="width"):
        family("").table({"blocks": 2}, frozenset())


def test_a_condition_decides_on_rows():
    assert "blocks.{}.gate.*" not in rows(table())
    assert rows(table(gated=True))["blocks.{}.gate.*"] == "ffn <- y"


def test_a_child_has_its_parent_s_lines_and_may_replace_or_drop_them():
    child = """
family small : toy
models small
blocks.{}.up.*   [ffn|ffn] <- y
without blocks.{}.v.*
sizes head = double(heads)
fixed head per layer: a reason
"""
    found = table(child, "small")
    assert rows(found)["blocks.{}.up.*"] == "[ffn|ffn] <- y"
    assert list(rows(found)).index("blocks.{}.up.*") == 4, "in the place of its parent's"
    assert "blocks.{}.v.*" not in rows(found)
    assert found.stacks[0].sizes["head"] == 4
    assert next(axis for axis in found.axes if axis.name == "head").why == "a reason"


def test_kinds_of_blocks_loops_and_values_in_names():
    text = """
family parts
library mine
models parts
axis ffn
axis neck
stack layer 3
kind wide = [0, 2]
kind narrow = others("wide")
let where = "up"
blocks.{wide}.${where}   ffn <- x
blocks.{narrow}.$where   neck <- x
for i in range(2)
    extra.$i   _ x@last
"""
    shapes = {
        "blocks.0.up": (6, 4),
        "blocks.1.up": (2, 4),
        "blocks.2.up": (6, 4),
        "extra.0": (1, 4),
        "extra.1": (1, 4),
    }
    found = bind(family(text, "parts").table({}, frozenset()), shapes, "parts")
    assert [str(layout) for layout in found.tensors.values()] == [
        *("layer.0.ffn <- layer.0.x", "layer.1.neck <- layer.1.x", "layer.2.ffn <- layer.2.x"),
        *("_ layer.3.x", "_ layer.3.x"),
    ]


def test_inputs_and_settings_from_shapes():
    assert family("").draws(CONFIG) == {"ids": Draw((5,), low=0, high=9, whole=True)}
    text = """
family sized : toy
models sized
fits has("embed.weight") and not has("other.*")
shapes
    let width = shape("embed.weight")[1]
    width = width
    blocks = depth("blocks.{}.")
"""
    shapes = {"embed.weight": (9, 6), "blocks.0.q.weight": (6, 6), "blocks.1.q.weight": (6, 6)}
    assert family(text, "sized").from_shapes(shapes) == {"width": 6, "blocks": 2}
    assert family(text, "sized").fits(shapes)
    assert not family(text, "sized").fits({**shapes, "other.weight": (1,)})


def test_a_refusal_shows_settings():
    text = "family odd : toy\nmodels odd\nwhen width > 5\n    refuse odd: width = $width is too much; take less\n"
    with pytest.raises(ArchitectureError, match="odd: width = 6 is too much") as caught:
        table(text, "odd")
    assert caught.value.hint == "take less"


# ── expressions ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("width / heads", 3),
        ("(missing or heads) + 1", 3),
        ("section.width", 4),
        ("section.missing or 5", 5),
        ('"a" if heads == 2 else "b"', "a"),
        ("missing is None and not heads > 2", True),
        ("sizes[-1] * 2**heads", 12),
        ("2 in sizes", False),
    ],
)
def test_an_expression_has_the_value_that_python_gives(text, value):
    settings = {"width": 6, "heads": 2, "section": {"width": 4}, "sizes": [1, 3]}
    assert Expression.parse(text, {}).value(settings.get, {}) == value


def test_a_division_leaves_no_remainder():
    with pytest.raises(ArchitectureError, match="divides width by heads, but 7 is not a multiple of 2"):
        Expression.parse("width / heads", {}).value({"width": 7, "heads": 2}.get, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os')", "calls __import__; known are len"),
        ("heads.real()", "calls heads.real"),
        ("lambda: 1", "Lambda is not allowed"),
        ("[i for i in x]", "ListComp is not allowed"),
        ("width +", "is not an expression"),
    ],
)
def test_anything_else_is_not_an_expression(text, message):
    with pytest.raises(ValueError, match=message):
        Expression.parse(text, {"len": len})


# ── errors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "axis qk within head",
            r"line 2: expected 'axis NAME \[in WITHIN\] \[with TIED_WITH\] \[per SCOPE\]', found",
        ),
        (
            "fixed label",
            r"line 2: expected 'fixed NAME \[in WITHIN\] \[per SCOPE\] : WHY', found 'fixed label'",
        ),
        ("skip a x y b", "line 2: expected 'skip ENTRY SOURCE -> TARGET BRANCH', found 'skip a x y b'"),
        ("sizes x", "line 2: expected 'sizes SETTINGS': 'x' is not a list of NAME = VALUE"),
        ("stack layer exec(1)", "line 2: expected 'stack NAME VALUE': 'exec\\(1\\)' calls exec"),
        ("arrange nobody", "line 2: there is no function nobody; known are"),
        ("when width", "line 2: expected 'when VALUE' with indented lines below it"),
        ("otherwise\n    axis a", "line 2: 'otherwise' without a 'when' directly before it"),
        (
            "sise x = width",
            "line 2: expected a row 'TENSOR  LAYOUT' or one of .*layout 'x = width', column 3",
        ),
        ("a.weight   (head qk <- x", "line 2: expected a row .*column 10: expected an axis name"),
        ("a.*   x\na.*   y", "line 3: the row a.\\* stands here twice, first in toy.family, line 2"),
        ("axis a\n    axis b", "line 3: 'axis b' is indented by 4, the lines around it by 0"),
        ("when width\n    axis a\n  axis b", "line 4: 'axis b' is indented by 2"),
        ("heads\n    family b", "line 3: 'family' begins at the margin"),
        ("aliases\n    one", "line 3: expected 'OTHER  OURS', found 'one'"),
        ("ignores @nothing", "line 2: there is no list of keys 'nothing'"),
        ("@nothing", "line 2: there is no fragment 'nothing'"),
        ("family a", "line 2: the family a is there already"),
        ("fragment f\n    axis a\nfragment f\n    axis b", "line 4: the fragment f is there already"),
        ("defaults a = b", "line 2: b is not a value"),
    ],
)
def test_an_error_names_the_line_and_what_was_expected(line, message):
    with pytest.raises(ArchitectureError, match=f"toy.family, {message}"):
        library(f"family a\n{line}\n").family("a").table({"width": 1}, frozenset())


def test_a_text_begins_with_a_family():
    with pytest.raises(ArchitectureError, match="line 1: expected 'family NAME' before any other line"):
        library("axis head\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("family a : b", "'b', which does not exist"),
        ("family a : a", "'a', which is like it"),
        ("family b : a\nfamily a : b", "'a', which is like it"),
    ],
)
def test_a_parent_exists_and_is_no_child(text, reason):
    with pytest.raises(ArchitectureError, match=f"the family . is to be like {reason}"):
        library(text).family("a")
