"""The look of all figures: colours, marks, frames, and files that are the same every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK, LINE, AXIS = "#333333", "#e3e3e3", "#bbbbbb"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b04a8b", "#b8860b", "#111111")
"""Distinguishable with every kind of colour vision."""
MARKS = ("o", "s", "^", "D", "v", "P")
PLAIN = {"color": "#777777", "linestyle": (0, (4, 2)), "marker": "", "zorder": 2}
"""The look of a curve without π."""
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "transfusion",
    "text.parse_math": False,
    "pdf.fonttype": 42,
}
_BARE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


@contextmanager
def figure_file(path: Path, format: str, size: tuple[float, float]) -> Iterator[Any]:
    """Open an empty figure, and write it to a file at the end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, format=format, dpi=160, metadata=_BARE.get(format))


def styles_of(methods: Iterable[str | None]) -> list[dict[str, Any]]:
    """Return a colour and a mark for each curve; curves without π are grey and lie behind."""
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
    """Give axes a title and faint horizontal lines, and hide the rest."""
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
    """Name the curves, each in its own colour: to the right of the axes or, in columns, above them."""
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
    """Format a gain with its sign."""
    return f"{value:+{digits}}".replace("-", "−") if value else "0"


def shorten(text: str, length: int) -> str:
    """Cut a text to a length, with an ellipsis for the rest."""
    return text if len(text) <= length else f"{text[: max(1, length - 1)].rstrip(' ·')}…"


def data_name(data: str) -> str:
    """The name of the data in few words: of a path, the last part."""
    return shorten(data.rstrip("/").rpartition("/")[2] or data, 48)
