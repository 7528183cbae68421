"""What every result says of itself."""

from __future__ import annotations

import torch

from transfusion import __version__
from transfusion.runtime.run_record import RunRecord


def test_a_record_stands_around_a_result():
    info = RunRecord("sweep", "transfusion sweep …").of({"value": 3})
    assert list(info) == ["transfusion", "verb", "command", "value", "run"]
    assert (info["transfusion"], info["verb"], info["value"]) == (__version__, "sweep", 3)
    assert info["run"]["machine"]["torch"] == torch.__version__


def test_memory_grows_with_what_was_held():
    before = RunRecord("sweep").run()["memory"]
    held = torch.ones(before // 4 + 10_000_000)
    assert RunRecord("sweep").run()["memory"] > before + 4 * 10_000_000 - 5_000_000
    assert held.numel()
