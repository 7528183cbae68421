"""What all figures look like: colours, marks, frames, files that are the same every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transfusion.runtime.optional_libraries import require_library

INK, LINE, AXIS = "#333333", "#e3e3e3", "#bbbbbb"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b04a8b", "#b8860b", "#111111")
"""Told apart by everybody, whatever colours they see."""
MARKS = ("o", "s", "^", "D", "v", "P")
PLAIN = {"color": "#777777", "linestyle": (0, (4, 2)), "marker": "", "zorder": 2}
"""How the way without π looks."""
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "transfusion",
    "pdf.fonttype": 42,
}
_BARE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def matplotlib() -> Any:
    """The drawing library, or a hint how to install it."""
    return require_library("matplotlib", extra="plots")


@contextmanager
def sheet(path: Path, format: str, size: tuple[float, float]) -> Iterator[Any]:
    """An empty figure, which is written to a file in the end."""
    with matplotlib().rc_context(STYLE):
        figure = require_library("matplotlib.figure", extra="plots").Figure(
            figsize=size, layout="constrained"
        )
        require_library("matplotlib.backends.backend_agg", extra="plots").FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, format=format, dpi=160, metadata=_BARE.get(format))


def styles_of(methods: Iterable[str | None]) -> list[dict[str, Any]]:
    """A colour and a mark per curve; what has no π is grey, and behind."""
    styles: list[dict[str, Any]] = []
    number = 0
    for method in methods:
        drawn = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKS[number % len(MARKS)],
            "linestyle": "-" if number < len(COLOURS) else ":",
            "zorder": 3,
        }
        styles.append({"linewidth": 1.8, "markersize": 4.5, **(drawn if method else PLAIN)})
        number += bool(method)
    return styles


def frame(axes: Any, title: str) -> None:
    """Axes with a title, faint horizontal lines, and nothing else."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.margins(y=0.12)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(AXIS)


def key(
    figure: Any, lines: list[Any], labels: list[str], title: str = "", columns: int | None = None
) -> None:
    """What the curves are, each in its own colour: to the right of the axes or, in columns, above them."""
    made = figure.legend(
        lines,
        labels,
        loc="outside right upper" if columns is None else "outside upper left",
        ncols=columns or 1,
        title=title or None,
        title_fontsize=9,
        fontsize=10,
        labelcolor="linecolor",
        frameon=False,
        labelspacing=0.9,
        handlelength=2.6,
        alignment="left",
    )
    made.get_title().set_color(INK)


def signed(value: float, digits: str = ".3g") -> str:
    """A gain as people write it."""
    return f"{value:+{digits}}".replace("-", "−") if value else "0"


def named(data: str, length: int = 48) -> str:
    """The data in few words: of a path the last part, and not all of what is long."""
    short = data.rstrip("/").rpartition("/")[2] or data
    return short if len(short) <= length else f"{short[: length - 1]}…"
