"""Blocks that differ: rows for a kind of blocks, and branches that are multiplied by a number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transfusion.architecture.binding import bind
from transfusion.architecture.table import Axis, Stack, Table
from transfusion.errors import ArchitectureError
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.verification.certify import certify

STACK = Stack(
    "layer",
    3,
    "blocks.{}.norm   scale x\nblocks.{wide}.up   ffn <- x\nblocks.{narrow}.up   neck <- x",
    (Axis("ffn"), Axis("neck")),
    kinds={"wide": {0, 2}, "narrow": {1}},
)
SHAPES = {f"blocks.{i}.norm": (4,) for i in range(3)} | {
    "blocks.0.up": (6, 4),
    "blocks.1.up": (2, 4),
    "blocks.2.up": (6, 4),
}


def test_rows_of_a_kind_are_for_its_blocks_only():
    tensors = bind(Table((STACK,)), SHAPES, "toy").tensors
    assert [str(tensors[f"blocks.{i}.up"]) for i in range(3)] == [
        "layer.0.ffn <- layer.0.x",
        "layer.1.neck <- layer.1.x",
        "layer.2.ffn <- layer.2.x",
    ]


def test_a_kind_that_the_stack_does_not_have_is_an_error():
    with pytest.raises(ArchitectureError, match=r"blocks\.\{narrow\}\.up is about a kind of blocks"):
        bind(Table((replace(STACK, kinds={"wide": {0, 2}}),)), SHAPES, "toy")


def test_without_its_factor_a_branch_gets_too_much_of_the_shortcut(made):
    """Granite multiplies the output of each branch before it is added."""
    live = LiveModel.of(Model.open(made("granite")))
    cuts = tuple(replace(cut, factor=1.0) for cut in live.architecture.shortcuts)
    wrong = certify(replace(live, architecture=replace(live.architecture, shortcuts=cuts)))
    assert [check.what for check in wrong.failures] == ["all free axes, a map for every point of the stream"]
