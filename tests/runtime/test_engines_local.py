"""How many threads of torch are used: as many as are clearly faster, on this machine and for this work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from transfusion.runtime import engines as threads
from transfusion.runtime.engines import fitting_threads

SPEEDS = {
    "a small model": (lambda count: 1.0 * count, 1),
    "a busy machine": (lambda count: 1.0 if count == 1 else 100.0, 1),
    "nothing gained": (lambda count: 1.0 - 0.01 * count, 1),
    "a large model": (lambda count: 1.0 / count, 8),
    "two cores are free": (lambda count: 1.0 / min(count, 2), 2),
}


@pytest.mark.parametrize("case", SPEEDS)
def test_as_many_threads_as_are_clearly_faster(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, wanted = SPEEDS[case]
    clock, before = [0.0], torch.get_num_threads()
    monkeypatch.setattr(threads, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += seconds(torch.get_num_threads())

    assert fitting_threads(work, 8) == wanted
    assert fitting_threads(work, 1) == 1
    assert torch.get_num_threads() == before


def test_an_error_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()

    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitting_threads(work, 4)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_the_command_line_wait_asleep(given: dict[str, str], policy: str) -> None:
    """Spinning threads are what makes a busy machine slow; torch reads the variable when it is imported."""
    code = (
        "import os, sys, transfusion.cli as cli\n"
        "assert 'torch' not in sys.modules\n"
        "cli._run = lambda arguments: print(os.environ['OMP_WAIT_POLICY'])\n"
        "cli.main([])"
    )
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**plain, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == policy
