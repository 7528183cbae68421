"""The results as tables, for people and for docs/growth.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from growth.chart import draw
from growth.counting import BEYOND, exponent
from growth.tasks import START, SWEEPS, TASKS
from scale.models import SIZES
from scale.tables import DOCS, about, between_markers, table

PLANNED = tuple(task.plans for task in TASKS.values() if task.plans)
LINEAR = ("naive", "related", "transport", "adapter", "merge-sum", "merge-ties", "verify-limited")
"""Tasks whose work is in proportion to bytes of weights."""
APART = 1.5
"""A run takes at least so many times the start, if a rate is taken from it."""
PICTURE = DOCS / "pictures" / "growth.png"
PAGE = DOCS / "growth.md"
Info = dict[str, Any]


def everything(info: Info) -> str:
    """All tables."""
    return "\n".join(text for _, text in _parts(info))


def _parts(info: Info) -> list[tuple[str, str]]:
    """The tables by the names of their markers."""
    runs = [f"{about(info)}\n{_loads(info)}", measured(info, "seconds"), measured(info, "processor")]
    runs += [measured(info, "peak"), left_out(info)]
    paper = [constants(info), larger_search(info), larger_functional(info), larger_linear(info)]
    return [
        ("runs", "\n".join(one for one in runs if one)),
        ("exponents", exponents(info)),
        ("plans", compared(info)),
        ("larger", "\n".join(one for one in paper if one)),
    ]


def write_docs(info: Info, page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Draw the picture, and put the tables between the markers of the page."""
    draw(info, picture)
    for name, text in _parts(info):
        drawn = f"![Seconds and peak memory against parameters](pictures/{picture.name})\n"
        between_markers(page, f"growth-{name}", f"{drawn}\n{text}" if name == "exponents" else text)
    print(f"{page} and {picture} written")


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


_TITLES = {
    "seconds": "seconds",
    "processor": "processor seconds, of all cores",
    "peak": "peak resident memory",
}


def measured(info: Info, what: str) -> str:
    """One number of every run: tasks by sizes."""
    rows = []
    for task in tasks_of(info):
        found = [run_of(info, task, size) for size in sizes_of(info)]
        rows.append((TASKS[task].about, *("" if one is None else _said(one[what], what) for one in found)))
    named = [f"{'start: ' * (size == START)}{_count(SIZES[size].parameters)}" for size in sizes_of(info)]
    return table([f"**{_TITLES[what]}**", *named], rows)


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


def exponents(info: Info) -> str:
    """By which power of parameters time and memory of each task grow, beyond the start of the program."""
    rows = []
    for task in tasks_of(info):
        start, runs = run_of(info, task, START), runs_of(info, task)
        cells = []
        for what in ("seconds", "processor", "peak"):
            power, points = exponent(runs, start, what)
            cells += ["" if power is None else f"{power:.2f}", points]
        rows.append((TASKS[task].about, *cells))
    head = ("task", "seconds", "points", "processor seconds", "points", "memory", "points")
    return table(head, rows)


def compared(info: Info) -> str:
    """What `transfusion plan` says of the same runs; the start of the program is added to its seconds."""
    rows = []
    for size, plans in info["plans"].items():
        for task in (*PLANNED, "transport"):
            run, start = run_of(info, task, size), run_of(info, task, START)
            if run is None or start is None:
                continue
            plan = plans["guarded" if task == "transport" else task]
            seconds = plan["transport" if task == "transport" else "seconds"] + start["seconds"]
            memory = plan["transport_memory" if task == "transport" else "memory"]
            rows.append(
                (
                    f"{size} {task}",
                    _said(seconds, "seconds"),
                    _said(run["seconds"], "seconds"),
                    f"{seconds / run['seconds']:.2f}",
                    _said(memory, "peak"),
                    _said(run["peak"], "peak"),
                    f"{memory / run['peak']:.2f}",
                )
            )
        run, start = run_of(info, "functional", size), run_of(info, "functional", START)
        if run is not None and start is not None:
            counted = sum(plans["functional"]["seconds"].values()) + start["seconds"]
            cells = _said(counted, "seconds"), _said(run["seconds"], "seconds")
            rows.append(
                (f"{size} functional, counted", *cells, f"{counted / run['seconds']:.2f}", "", "", "")
            )
    head = ("run", "planned", "measured", "ratio", "planned memory", "peak", "ratio")
    return table(head, rows)


# ── what was not ─────────────────────────────────────────────────────────────────────────────


def constants(info: Info) -> str:
    """The speed of a core, at every size."""
    rows = [
        (
            size,
            f"{one['operations_per_second'] / 1e9:.1f}",
            f"{one['bytes_per_second'] / 1e9:.2f}",
        )
        for size, one in info["constants"].items()
    ]
    head = (
        "measured with",
        "billion operations per second and core",
        "GB read and hashed per second and core",
    )
    return table(head, rows)


def larger_search(info: Info) -> str:
    """A search at 8 B and 70 B."""
    rows = []
    for name, one in info["outlook"].items():
        plan, once = one["plan"], one["pass"]
        total = once["products"] + once["assignments"]
        phases = ", ".join(f"{phase} {_time(seconds)}" for phase, seconds in plan["phases"].items())
        rows.append(
            (
                f"Llama {name}",
                f"{_time(once['products'])} ({once['products'] / total:.0%})",
                f"{_time(once['assignments'])} ({once['assignments'] / total:.0%})",
                f"{_time(plan['seconds'])}: {phases}",
                f"{plan['reading'] / plan['seconds']:.0%}",
                _said(plan["memory"], "peak"),
                _said(plan["transport_memory"], "peak"),
            )
        )
    head = "`guarded`, two cores|products of all gains, once|assignments, once|five sweeps, as planned"
    return table([*head.split("|"), "of it reading", "memory without a limit", "memory of `transport`"], rows)


def larger_functional(info: Info) -> str:
    """Functional alignment at the measured sizes, 8 B and 70 B: the share of every part."""
    found = {size: plans["functional"] for size, plans in info["plans"].items()}
    found |= {f"Llama {name}": one["functional"] for name, one in info["outlook"].items()}
    parts = list(next(iter(found.values()))["seconds"])
    rows = []
    for name, one in found.items():
        total = sum(one["seconds"].values())
        shares = [f"{one['seconds'][part] / total:.0%}" for part in parts]
        rows.append((name, _time(total), *shares, _said(one["samples"], "peak"), _said(one["maps"], "peak")))
    head = ("`functional` with `--memory`, counted", "all", *parts, "temporary files", "maps")
    return table(head, rows)


def larger_linear(info: Info) -> str:
    """Tasks in proportion to bytes, at the rate of the largest run beyond the start of the program."""
    rows = []
    for task in LINEAR:
        start, runs = run_of(info, task, START), runs_of(info, task)
        if start is None or not runs or runs[-1]["seconds"] < APART * start["seconds"]:
            continue
        last = runs[-1]
        rate = (last["seconds"] - start["seconds"]) / last["parameters"]
        cells = [
            f"{_time(start['seconds'] + rate * one['plan']['parameters'])}"
            for one in info["outlook"].values()
        ]
        rows.append((TASKS[task].about, last["size"], f"{rate * 1e9:.1f} s", *cells))
    names = [f"Llama {name}" for name in info["outlook"]]
    head = ("in proportion to bytes", "rate of", "a billion parameters", *names)
    return table(head, rows) if rows else ""


def _loads(info: Info) -> str:
    found = [one["load"] for one in info["runs"] if "load" in one]
    return (
        f"Every search makes at most {SWEEPS} sweeps. Load before a run: {min(found):.1f} to"
        f" {max(found):.1f}. Columns are numbers of parameters; an empty cell was not run. "
        f"Points of an exponent take more than {BEYOND:g} times"
        " the start.\n"
    )


def _is(run: Info, task: str, size: str) -> bool:
    return bool((run["task"], run["size"]) == (task, size))


def _said(value: float, what: str) -> str:
    if what == "peak":
        return f"{value / 1e9:.2f} GB"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
