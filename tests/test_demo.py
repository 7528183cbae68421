"""The demo, whole: it trains, moves and measures what it says."""

from __future__ import annotations

import io

import pytest

from transfusion.cli.views import demo as show
from transfusion.demo import Digits, on_bad_screen, run


@pytest.mark.slow
def test_the_demo_recovers_most_of_what_can_be_recovered(tmp_path):
    said = []
    result = run(keep=tmp_path / "kept", say=said.append)
    base, naive, _, moved, ceiling = (row["task"] for row in result["onto_successor"].values())
    assert (moved - base) > 0.5 * (ceiling - base)
    assert (naive - base) < 0.2 * (ceiling - base)
    assert result["proof"] < 1e-9
    assert {"a", "b", "a-tuned", "b-transfusion", "successor"} <= {
        p.name for p in (tmp_path / "kept").iterdir()
    }
    assert len(said) == 4


def test_the_parts_of_the_digits_share_no_image():
    digits = Digits.load(0)
    parts = [
        {image.numpy().tobytes() for image in part[0]} for part in (digits.for_a, digits.for_b, digits.test)
    ]
    assert sum(len(part) for part in parts) == len(set.union(*parts))


def test_the_bad_screen_sticks_three_pixels_in_ten_at_white():
    import torch

    images = -torch.ones(50, 1, 8, 8)
    stuck = on_bad_screen(images, 3)
    assert 0.27 < float((stuck == 1).float().mean()) < 0.33
    assert torch.equal(stuck, on_bad_screen(images, 3))
    assert not torch.equal(stuck, on_bad_screen(images, 4))


def test_the_tables_show_gains_over_the_first_row():
    from rich.console import Console

    rows = {"base": {"task": 30.0, "support": 95.0}, "moved": {"task": 55.5, "support": 91.0}}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(show({"onto_b": rows, "onto_successor": rows, "proof": 1e-15}))
    text = console.export_text()
    assert "+25.5" in text
    assert "-4.0" in text
