"""The figure of α: gains over B on the task and on the support, a panel each, for every task."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

_INK, _LINE = "#333333", "#e3e3e3"
_LOOKS: dict[str, dict[str, Any]] = {
    "naive": {"color": "#0072b2", "linestyle": (0, (4, 2)), "marker": "o"},
    "transfusion": {"color": "#c62828", "marker": "s"},
    "functional": {"color": "#009e73", "marker": "^"},
}
"""Without π blue and with the paper's red, as the paper has them."""
_SAID = {"naive": "B + α·τ", "transfusion": "B + α·π(τ), TransFusion", "functional": "B + α·π(τ), functional"}


def draw_strengths(provenance: dict[str, Any], place: Path, format: str) -> None:
    """Two rows of panels: the task above, the support below."""
    style = {
        "font.size": 9,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "svg.hashsalt": "transfusion",
        "svg.fonttype": "none",
    }
    found = provenance["found"]
    with rc_context(style):
        size = (2.75 * len(found) + 0.4, 4.9)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(2, len(found), sharex=True, sharey="row", squeeze=False)
        for column, (task, by_seed) in enumerate(found.items()):
            here = provenance["tasks"][task]["here"]
            for row, what in enumerate(("task", "support")):
                axes = panels[row][column]
                for method in by_seed[0]["curves"]:
                    _curve(axes, [found["curves"][method] for found in by_seed], method, what)
                _frame(axes)
                if column == 0:
                    axes.set_ylabel(f"{what}: points over B")
            panels[0][column].set_title(f"{here}\n(for {task})", fontsize=9.5, loc="left", color=_INK)
            panels[1][column].set_xlabel("α")
        key = figure.legend(
            *panels[0][0].get_legend_handles_labels(),
            loc="outside upper center",
            ncols=3,
            frameon=False,
            fontsize=10,
        )
        for text, line in zip(key.get_texts(), key.get_lines(), strict=True):
            text.set_color(line.get_color())
        bare = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format)
        figure.savefig(place, format=format, dpi=150, metadata=bare)


def _curve(axes: Any, by_seed: list[list[dict[str, float]]], method: str, what: str) -> None:
    alphas = [0.0, *(point["alpha"] for point in by_seed[0])]
    values = [[0.0, *(point[f"{what} gain"] for point in points)] for points in by_seed]
    middle = [mean(some) for some in zip(*values, strict=True)]
    look: dict[str, Any] = {"linewidth": 1.7, "markersize": 3.6, "zorder": 3, **_LOOKS.get(method, {})}
    [line] = axes.plot(alphas, middle, label=_SAID.get(method, method), **look)
    if len(values) > 1:
        low, high = ([of(some) for some in zip(*values, strict=True)] for of in (min, max))
        axes.fill_between(alphas, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _frame(axes: Any) -> None:
    axes.axhline(0, color="#999999", linewidth=0.9, zorder=2)
    axes.axvline(1, color=_LINE, linewidth=0.9, zorder=1)
    axes.set_xlim(0, 2.03)
    axes.set_xticks([0, 0.5, 1, 1.5, 2], ["0", "0.5", "1", "1.5", "2"])
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")
