"""Shared by all tests: quiet libraries, one thread per process, tiny models of every family."""

from __future__ import annotations

import os
import resource

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from families import CASES, Case

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, max_examples=60)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup``, tests of one file share what they make; so do those that share a Ray."""
    here = Path(__file__).parent
    for item in items:
        group = item.path.stem if item.path.parent == here else item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_terminal_summary(terminalreporter) -> None:
    """How much processor time all processes took: on a busy machine, seconds on the clock say nothing."""
    took = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in took)
    terminalreporter.write_line(f"processor time: {seconds / 60:.1f} minutes")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders with tiny random models, made once: ``made("vit")``, ``made("vit", seed=2)``."""
    root = tmp_path_factory.mktemp("models")
    done: dict[tuple[str, int], Path] = {}

    def make(case: str | Case, seed: int = 1) -> Path:
        case = CASES[case] if isinstance(case, str) else case
        key = (case.name, seed)
        if key not in done:
            done[key] = case.save(root / f"{case.name}-{seed}", seed)
        return done[key]

    return make


@pytest.fixture(scope="session")
def shuffled(made, tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """A, and B made from A by a random exact move of every free axis: ``shuffled("vit")``."""
    from transfusion.matching import align
    from transfusion.transportation import apply

    done: dict[str, tuple[Path, Path]] = {}

    def make(case: str) -> tuple[Path, Path]:
        if case not in done:
            a = made(case)
            move = align(a, a, method="random", residual="tied", seed=3)
            done[case] = a, apply(move, a).save(tmp_path_factory.mktemp("b") / case)
        return done[case]

    return make


@pytest.fixture
def cli(capsys):
    """Run a command line; gives exit code, stdout and stderr."""
    from transfusion.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = exit.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return run
