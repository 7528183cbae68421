"""The results as tables, for people and for docs/benchmarks.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from growth.llamas import SIZES
from growth.tasks import START, SWEEPS, TASKS

BEYOND = 3.0
"""A run counts for an exponent if it takes more than so many times the same run of a tiny model."""
SPAN = 2.0
"""An exponent needs points of which the largest has so many times the parameters of the smallest."""
Info = dict[str, Any]
LARGEST = 3
"""How many sizes the page shows."""


def everything(info: Info) -> str:
    """All tables."""
    parts = [f"{about(info)}\n{_loads(info)}", *(measured(info, what) for what in _TITLES), left_out(info)]
    return "\n".join(part for part in parts if part)


# ── what was run ─────────────────────────────────────────────────────────────────────────────


def sizes_of(info: Info) -> list[str]:
    """The sizes that were run, the tiny one first."""
    there = {one["size"] for one in info["runs"]}
    return [name for name in SIZES if name in there]


def tasks_of(info: Info) -> list[str]:
    """The tasks that were run, in their usual order."""
    there = {one["task"] for one in info["runs"]}
    return [name for name in TASKS if name in there]


def run_of(info: Info, task: str, size: str) -> Info | None:
    """A run that succeeded."""
    found = [one for one in info["runs"] if (one["task"], one["size"]) == (task, size)]
    return found[0] if found and "failed" not in found[0] else None


def runs_of(info: Info, task: str) -> list[Info]:
    """The runs of a task, but for that of the tiny model."""
    found = (run_of(info, task, size) for size in sizes_of(info) if size != START)
    return [one for one in found if one is not None]


_TITLES = {"seconds": "seconds", "peak": "peak resident memory"}


def measured(info: Info, what: str) -> str:
    """One number of every run, tasks by sizes, and the power of parameters by which it grows."""
    rows = []
    for task in tasks_of(info):
        found = [run_of(info, task, size) for size in sizes_of(info)]
        power, points = exponent(runs_of(info, task), run_of(info, task, START), what)
        cells = ["" if one is None else _said(one[what], what) for one in found]
        rows.append((TASKS[task].about, *cells, "" if power is None else f"{power:.2f} ({points})"))
    named = [f"{'start: ' * (size == START)}{_count(SIZES[size].parameters)}" for size in sizes_of(info)]
    return table([f"**{_TITLES[what]}**", *named, "power (points)"], rows)


def summary(info: Info) -> str:
    """Seconds, memory and their powers of parameters, for the larger sizes."""
    sizes = sizes_of(info)[-LARGEST:]
    rows = []
    for task in tasks_of(info):
        found = [run_of(info, task, size) for size in sizes]
        cells = [
            "" if one is None else f"{_said(one['seconds'], 's')} s, {_said(one['peak'], 'peak')}"
            for one in found
        ]
        start, runs = run_of(info, task, START), runs_of(info, task)
        powers = [exponent(runs, start, what)[0] for what in _TITLES]
        rows.append(
            (TASKS[task].about, *cells, *("" if power is None else f"{power:.1f}" for power in powers))
        )
    named = [_count(SIZES[size].parameters) for size in sizes]
    return table(["parameters", *named, "power, seconds", "power, memory"], rows)


def left_out(info: Info) -> str:
    """Which tasks end before the largest size, and why."""
    sizes, rows = sizes_of(info), []
    for task in tasks_of(info):
        there = [size for size in sizes if run_of(info, task, size)]
        failed = [one for one in info["runs"] if one["task"] == task and "failed" in one]
        rows += [(TASKS[task].about, one["size"], one["failed"]) for one in failed]
        missing = [size for size in sizes if not any(_is(one, task, size) for one in info["runs"])]
        if missing and there and sizes.index(missing[0]) > sizes.index(there[-1]):
            rows.append((TASKS[task].about, f"from {missing[0]} on", TASKS[task].why or "not asked for"))
    return table(("left out", "size", "why"), rows) if rows else ""


def exponent(runs: Sequence[Info], start: Info | None, what: str) -> tuple[float | None, int]:
    """Return the power of parameters by which runs grow beyond the start of the program, and the points."""
    if start is None:
        return None, 0
    points = [
        (one["parameters"], one[what] - start[what]) for one in runs if one[what] > BEYOND * start[what]
    ]
    sizes = [size for size, _ in points]
    return _slope(points) if points and max(sizes) >= SPAN * min(sizes) else None, len(points)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through the logarithms, by least squares."""
    xs, ys = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


# ── Markdown ─────────────────────────────────────────────────────────────────────────────────


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def about(info: Info) -> str:
    """Where and when."""
    machine = info["machine"]
    return (
        f"{machine['cores']} cores ({machine['processor']}), torch {machine['torch']}, load of"
        f" {machine['load']:.1f} before it began; made by `{info['command']}`.\n"
    )


def _loads(info: Info) -> str:
    found = [one["load"] for one in info["runs"] if "load" in one]
    return (
        f"Searches make at most {SWEEPS} sweeps. Load before a run: {min(found):.1f} to {max(found):.1f}."
        " Columns are numbers of parameters; an empty cell was not run. Powers are fitted to runs that take"
        f" more than {BEYOND:g} times the start, and need sizes that differ by a factor of {SPAN:g}.\n"
    )


def _is(run: Info, task: str, size: str) -> bool:
    return bool((run["task"], run["size"]) == (task, size))


def _said(value: float, what: str) -> str:
    if what == "peak":
        return f"{value / 1e9:.2f} GB"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"
