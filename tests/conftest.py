"""Shared by all tests: quiet libraries, one thread per process, tiny models of every family."""

from __future__ import annotations

import gc
import os
import resource
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # of torch, here and in all processes that tests start
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a test that asks for more must not burn a busy machine
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torchvision compiles what a torch for CPUs lacks
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # whoever only hands out tests to other processes needs none of it
    from small_models import Case
    from transfusion.alignment.alignment import Alignment

settings.register_profile("default", deadline=None, max_examples=24)
settings.register_profile("thorough", deadline=None, max_examples=60)
settings.load_profile("default")
sys.warnoptions = sys.warnoptions or ["error"]  # the command line hides warnings of libraries otherwise


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> object:
    """Among several processes, tests of one file stay together, and those that share a Ray: both make once
    what they have in common.
    """
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "engines" if "/engines/" in file else file

    return Together(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Leave the libraries, which stay for good, out of every search for garbage: a tenth of all the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_terminal_summary(terminalreporter) -> None:
    """How much processor time all processes took: on a busy machine, seconds on the clock say nothing."""
    took = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in took)
    terminalreporter.write_line(f"processor time: {seconds / 60:.1f} minutes")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders with tiny random models, made once: ``made("vit")``, ``made("vit", seed=2)``."""
    from small_models import CASES

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
    from transfusion.matching.align import align
    from transfusion.transport.apply import apply

    done: dict[str, tuple[Path, Path]] = {}

    def make(case: str) -> tuple[Path, Path]:
        if case not in done:
            a = made(case)
            move = align(a, a, method="random", residual="tied", seed=3)
            done[case] = a, apply(move, a).save(tmp_path_factory.mktemp("b") / case)
        return done[case]

    return make


@pytest.fixture(scope="session")
def aligned() -> Callable[..., Alignment]:
    """π between two folders, found once and without advice, for those who only use it: ``aligned(a, b)``."""
    from transfusion.matching.align import align

    return cache(lambda a, b, **choices: align(a, b, advice=False, **choices))


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


# ── a browser ─────────────────────────────────────────────────────────────────────────────────

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def missing(why: str) -> None:
    """Skip, unless a browser is required here."""
    if os.environ.get("TRANSFUSION_BROWSER") == "required":
        pytest.fail(f"TRANSFUSION_BROWSER=required, and {why}")
    pytest.skip(why)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    if not CHROMIUM.exists():
        missing(f"{CHROMIUM} is not there")
    with sync_playwright() as started:
        found = started.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield found
        found.close()
