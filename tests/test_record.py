"""What every result says of itself."""

from __future__ import annotations

import torch

from transfusion import __version__
from transfusion.record import Record


def test_a_record_stands_around_a_result():
    told = Record("sweep", "transfusion sweep …").of({"value": 3})
    assert list(told) == ["transfusion", "verb", "command", "value", "run"]
    assert (told["transfusion"], told["verb"], told["value"]) == (__version__, "sweep", 3)
    assert told["run"]["machine"]["torch"] == torch.__version__


def test_memory_grows_with_what_was_held():
    before = Record("sweep").run()["memory"]
    held = torch.ones(before // 4 + 10_000_000)
    assert Record("sweep").run()["memory"] > before + 4 * 10_000_000 - 5_000_000
    assert held.numel()
