"""The picture of docs/growth.md: seconds and memory against parameters, both logarithmic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from growth.tasks import ALIGN, START, TASKS
from transfusion.report.charts.figure_style import INK, LINE, figure_file, frame, styles_of

PANELS = {"seconds": ("seconds", 1.0), "peak": ("peak memory, GB", 1e9)}
ROWS = {"align": ALIGN, "transport, merge, verify": tuple(name for name in TASKS if name not in ALIGN)}
_TICKS = [factor * 10**power for power in range(-2, 6) for factor in (1, 2, 5)]


def draw(info: dict[str, Any], place: Path) -> None:
    """Draw two rows of panels: methods of `align`, and the other verbs; a line for every task."""
    there = {one["task"] for one in info["runs"]}
    rows = {title: [name for name in names if name in there] for title, names in ROWS.items()}
    rows = {title: names for title, names in rows.items() if names}
    with figure_file(place, place.suffix[1:], (10.0, 3.6 * len(rows))) as figure:
        panels = figure.subplots(len(rows), 2, squeeze=False)
        for across, (title, tasks) in zip(panels, rows.items(), strict=True):
            for axes, (what, (said, unit)) in zip(across, PANELS.items(), strict=True):
                for task, style in zip(tasks, styles_of(tasks), strict=True):
                    points = _points(info, task, what, unit)
                    axes.plot([x for x, _ in points], [y for _, y in points], label=task, **style)
                _log_frame(axes, f"{title}: {said}")
            across[1].legend(
                loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor="linecolor"
            )


def _points(info: dict[str, Any], task: str, what: str, unit: float) -> list[tuple[float, float]]:
    runs = [one for one in info["runs"] if one["task"] == task and "failed" not in one]
    return sorted((one["parameters"] / 1e6, one[what] / unit) for one in runs if one["size"] != START)


def _log_frame(axes: Any, title: str) -> None:
    """Make both axes logarithmic, with plain numbers at some places."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    frame(axes, title)
    for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_ticks([tick for tick in _TICKS if ends[0] <= tick <= ends[1]])
        axis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    axes.set_xlabel("parameters, millions", color=INK)
