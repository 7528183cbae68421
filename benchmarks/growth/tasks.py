"""What is measured: a command line of each task, and the largest size that it is run at."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growth.models import MERGED, RANK, Made
from own_process import run_alone

SWEEPS = 2
"""A search makes at most so many sweeps, at every size: all sizes then do the same work."""
LIMIT = {"0.3B": "2GB", "1.1B": "3GB", "1.4B": "4GB"}
"""The memory limit of functional alignment; 1.5 GB for smaller sizes."""
START = "tiny"
"""The size whose runs are the start of the program."""
ALIGN = ("naive", "related", "guarded", "transfusion", "tied", "git-rebasin", "ot", "functional")
"""Tasks that write a file of π."""
Arguments = Callable[[Made, Path], list[object]]


@dataclass(frozen=True)
class Task:
    """One thing to measure."""

    name: str
    about: str
    arguments: Arguments
    largest: str = "1.4B"
    """The largest size that it is run at, unless all are asked for."""
    why: str = ""
    """Why it is not run at larger sizes."""


def _search(method: str) -> Arguments:
    limits = ["--method", method, "--max-sweeps", SWEEPS]
    return lambda made, out: ["align", made.a, made.b, "-o", out, *limits]


def _plain(method: str) -> Arguments:
    return lambda made, out: ["align", made.a, made.b, "-o", out, "--method", method]


def _functional(made: Made, out: Path) -> list[object]:
    return [*_plain("functional")(made, out), "--memory", LIMIT.get(made.size.name, "1.5GB")]


def _related(made: Made, out: Path) -> list[object]:
    return ["align", made.a, made.related, "-o", out]


def _onto_b(made: Made, out: Path) -> list[object]:
    return ["--base", made.a, "--onto", made.b, "--via", made.pi, "-o", out]


def _merge(how: str) -> Arguments:
    return lambda made, out: ["merge", *made.merged, *_onto_b(made, out), "--how", how]


def _verify(made: Made, out: Path) -> list[object]:
    return ["verify", made.a, "--via", made.pi, "-o", out.with_suffix(".json")]


_LONG = "the run takes too long"
_SWEPT = "too long: with one map of the stream, the advice searches the whole model again"
TASKS = {
    task.name: task
    for task in (
        Task("naive", "`align --method naive`: nothing moves", _plain("naive")),
        Task(
            "related",
            "`align` by `guarded`, B trained on from A: no search",
            _related,
        ),
        Task("guarded", f"`align` by `guarded`, {SWEEPS} sweeps", _search("guarded")),
        Task(
            "transfusion",
            f"`align --method transfusion`, {SWEEPS} sweeps",
            _search("transfusion"),
            "1.1B",
            _LONG,
        ),
        Task("tied", f"`align --method tied`, {SWEEPS} sweeps", _search("tied"), "0.3B", _SWEPT),
        Task(
            "git-rebasin",
            f"`align --method git-rebasin`, {SWEEPS} sweeps",
            _search("git-rebasin"),
            "0.3B",
            _SWEPT,
        ),
        Task(
            "ot",
            "`align --method ot`",
            _plain("ot"),
            "0.3B",
            "it holds whole models and full matrices of plans, which no limit bounds",
        ),
        Task(
            "functional",
            "`align --method functional`, with `--memory`",
            _functional,
            "0.3B",
            _LONG,
        ),
        Task(
            "transport",
            "`transport` of a dense fine-tune",
            lambda made, out: ["transport", made.tuned, *_onto_b(made, out)],
        ),
        Task(
            "adapter",
            f"`transport` of a LoRA of rank {RANK} on all linear modules",
            lambda made, out: ["transport", made.adapter, *_onto_b(made, out)],
        ),
        Task("merge-sum", f"`merge` of {MERGED} fine-tunes by `sum`", _merge("sum")),
        Task("merge-ties", f"`merge` of {MERGED} fine-tunes by `ties`", _merge("ties"), "1.1B", _LONG),
        Task(
            "verify",
            "`verify`: A against π(A) in float64",
            _verify,
            "0.3B",
            "A and π(A) in float64 take at least 16 bytes of memory a parameter: `--memory` is for that",
        ),
        Task(
            "verify-limited",
            "`verify --memory 4GB`",
            lambda made, out: [*_verify(made, out), "--memory", "4GB"],
        ),
    )
}


def measure(task: Task, made: Made, out: Path) -> dict[str, Any]:
    """Run a task in a process of its own; one that fails says why."""
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "transfusion", *map(str, [*task.arguments(made, out), "--json"])]
    run = run_alone(command, {"TMPDIR": str(out.parent)})
    info: dict[str, Any] = {"task": task.name, "size": made.size.name, "parameters": made.size.parameters}
    if run.code:
        told = run.errors.strip().splitlines() or ["killed: the memory of the machine was too small"]
        return {**info, "failed": told[0], "code": run.code}
    info |= {"seconds": run.seconds, "processor": run.processor, "peak": run.peak, "load": load}
    printed = json.loads(run.output)
    return {**info, **{key: printed[key] for key in ("sweeps", "axes_moved") if key in printed}}
