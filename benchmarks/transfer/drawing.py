"""The tables of the benchmark."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from experiments.pairs.pair import GROUPS, Pair
from experiments.pairs.tasks import PAIRS

ENDS = ("B", "ceiling")
AUTOMATIC = ("functional, default α", "functional, α auto")
"""Have a strength of their own."""
LOSS = 2.0
"""Points of B's support that a matched strength may cost."""

Measured = dict[str, dict[str, float]]
"""By method: ``task`` and ``support`` in percent, ``share`` of the gap, and ``seconds`` of the processor.

Where strengths were tried, the best one with its share: ``alpha`` and ``matched``.
"""
Results = dict[str, dict[str, list[Measured]]]
"""By pair and task, a measurement for every seed."""


def draw(pair: Pair[Any], rows: dict[str, list[Measured]], methods: list[str]) -> Table:
    seeds = len(next(iter(rows.values())))
    table = Table(title=f"{pair.name}: {pair.about} ({seeds} seed{'s' * (seeds > 1)})")
    table.add_column("task / support\nshare of the gap")
    for name in methods:
        table.add_column(name, justify="right")
    for task, by_seed in rows.items():
        cells = []
        for name in methods:
            task_, support, share = (
                spread([found[name][what] for found in by_seed]) for what in ("task", "support", "share")
            )
            cells.append(f"{task_} / {support}\n{share} %")
        table.add_row(task, *cells, end_section=True)
    return table


def draw_means(results: Results, methods: list[str], *, matched: bool = False) -> Table:
    """What arrives over all tasks: a row for every pair, and one for all of them.

    Where there are corruptions and other tasks, they have rows of their own as well.
    """
    how = f", α matched to a loss of support of at most {LOSS:g} points (mean α below)" if matched else ""
    table = Table(title=f"share of the gap, mean over tasks and seeds ± standard deviation over seeds{how}")
    table.add_column("pair")
    named = [name for name in methods if name not in ENDS and not (matched and name in AUTOMATIC)]
    for name in named:
        table.add_column(name, justify="right")
    for pair, rows in grouped(results).items():
        cells = []
        for name in named:
            cell = f"{spread(by_seed(rows, name, 'matched' if matched else 'share'))} %"
            if matched:
                cell += f"\nα {statistics.mean(by_seed(rows, name, 'alpha')):.2f}"
            cells.append(cell)
        table.add_row(pair, *cells)
    return table


def grouped(results: Results) -> dict[str, list[list[Measured]]]:
    """The rows of tasks by pair, and of all pairs; after either those of every group, if there are two."""
    known = {
        pair: [
            ({task.name: task.group for task in PAIRS[pair].tasks}[name], row) for name, row in rows.items()
        ]
        for pair, rows in results.items()
    }
    known["all"] = [one for rows in known.values() for one in rows]
    found = {}
    for pair, rows in known.items():
        found[pair] = [row for _, row in rows]
        if len({group for group, _ in rows}) > 1:
            for one, several in GROUPS.items():
                found[f"{pair}, {several}"] = [row for group, row in rows if group == one]
    return found


def draw_seconds(results: Results, methods: list[str]) -> Table:
    """How long each method takes on one core: a row for every task."""
    table = Table(title="seconds of the processor, mean over seeds; the ceiling: fine-tuning B")
    table.add_column("task")
    named = [name for name in methods if name != "B"]
    for name in named:
        table.add_column(name, justify="right")
    for pair, rows in results.items():
        for task, by_seed in rows.items():
            times = [[found[name]["seconds"] for found in by_seed] for name in named]
            table.add_row(f"{pair} {task}", *(f"{statistics.mean(seconds):.0f}" for seconds in times))
    return table


def by_seed(rows: list[list[Measured]], method: str, what: str) -> list[float]:
    """For every seed the mean over the tasks, whose rows these are."""
    return [statistics.mean(found[method][what] for found in tasks) for tasks in zip(*rows, strict=True)]


def spread(values: list[float]) -> str:
    """The mean, and with more than one value how far they scatter."""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"
