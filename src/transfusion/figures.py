"""Figures, drawn on the side: no window, no global state of the drawing library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transfusion.interpolation import Barrier
from transfusion.live import library

_INK, _LINE = "#333333", "#e3e3e3"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b04a8b", "#b8860b", "#111111")
"""Told apart by everybody, whatever colours they see."""
_MARKS = ("o", "s", "^", "D", "v", "P")
_PLAIN = {"color": "#777777", "linestyle": (0, (4, 2)), "marker": "", "zorder": 2}
"""How the way without π looks."""
_STYLE = {
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "transfusion",
    "pdf.fonttype": 42,
}


def matplotlib() -> Any:
    """The drawing library, or a hint how to install it."""
    return library("matplotlib", extra="plots")


def draw_barriers(curves: Mapping[str, Barrier], path: Path, format: str) -> None:
    """Loss and accuracy against α, a panel each, one curve per way."""
    with matplotlib().rc_context(_STYLE):
        figure = library("matplotlib.figure", extra="plots").Figure(figsize=(11.2, 4.2), layout="constrained")
        library("matplotlib.backends.backend_agg", extra="plots").FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        styles = _styles(curves)
        for label, curve in curves.items():
            alphas = [point.alpha for point in curve.points]
            left.plot(alphas, [point.loss for point in curve.points], **styles[label])
            right.plot(alphas, [100 * point.accuracy for point in curve.points], **styles[label])
        one = next(iter(curves.values()))
        _frame(left, "Loss")
        _frame(right, f"Accuracy in % ({one.question})")
        _key(figure, left.get_lines(), curves)
        bare = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format)
        figure.savefig(path, format=format, dpi=160, metadata=bare)


def _styles(curves: Mapping[str, Barrier]) -> dict[str, dict[str, Any]]:
    """A colour and a mark per curve; what has no π is grey, and behind."""
    styles: dict[str, dict[str, Any]] = {}
    for label, curve in curves.items():
        number = sum(other["color"] != _PLAIN["color"] for other in styles.values())
        drawn = {
            "color": _COLOURS[number % len(_COLOURS)],
            "marker": _MARKS[number % len(_MARKS)],
            "linestyle": "-" if number < len(_COLOURS) else ":",
            "zorder": 3,
        }
        styles[label] = {"linewidth": 1.8, "markersize": 4.5, **(drawn if curve.method else _PLAIN)}
    return styles


def _key(figure: Any, lines: Sequence[Any], curves: Mapping[str, Barrier]) -> None:
    """What the curves are, each in its own colour: highest barrier first, and what is not A's own last."""
    entries = sorted(
        zip(lines, curves.items(), strict=True),
        key=lambda entry: (not entry[1][1].faithful, -entry[1][1].height),
    )
    title = "Barrier: how far the loss\nrises above the straight\nline between its ends"
    if not all(curve.faithful for curve in curves.values()):
        title += "\n(* π(A) does not compute\nwhat A computes)"
    key = figure.legend(
        [line for line, _ in entries],
        [f"{label}  {curve.height:.2f}{'' if curve.faithful else '*'}" for _, (label, curve) in entries],
        loc="outside right upper",
        title=title,
        title_fontsize=9,
        fontsize=10,
        labelcolor="linecolor",
        frameon=False,
        labelspacing=0.9,
        handlelength=2.6,
        alignment="left",
    )
    key.get_title().set_color(_INK)


def _frame(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.set_xlim(-0.02, 1.02)
    axes.margins(y=0.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["π(A)\nα = 0", "0.25", "0.5", "0.75", "B\nα = 1"])
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")
