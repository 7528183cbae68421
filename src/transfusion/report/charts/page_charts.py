"""The charts of the page. A chart is called with a width in pixels and returns SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from transfusion.report.charts.figure_style import COLOURS, MARKS, shorten
from transfusion.report.charts.page_svg import (
    CARD,
    GRID,
    INK,
    MUTED,
    NARROW,
    PageCanvas,
    page_canvas,
)

LETTER = 6.8
"""The width of a letter in pixels, about."""


def plain(value: float) -> str:
    """A number on a scale."""
    return f"{value:g}".replace("-", "−")


def _legend(canvas: PageCanvas, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Explain the signs above the axes, in as many columns as fit."""
    room = int((canvas.width - 40) / LETTER)
    labels = [shorten(label, room) for label in labels]
    canvas.figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=_columns(canvas.width, labels),
        handlelength=1.6,
        columnspacing=1.4,
        borderaxespad=0,
        borderpad=0.2,
    )


def _columns(width: float, labels: Sequence[str]) -> int:
    widths = [46 + LETTER * len(label) for label in labels]
    return len(labels) if sum(widths) <= width else max(1, int(width / max(widths)))


def _legend_height(width: float, labels: Sequence[str]) -> float:
    return 20.0 * -(-len(labels) // _columns(width, labels)) if labels else 0.0


def hide_frame(axes: Any) -> None:
    """Hide the frame and the tick marks."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars: rows with a value of each series, and perhaps a tick for what they compare with."""

    rows: Sequence[tuple[str, Sequence[float | None]]]
    series: Sequence[str]
    label: str
    """Read aloud."""
    say: Callable[[float], str] = plain
    tick: str = ""
    """The name of the last series, if it is drawn as a tick and not as a bar."""
    top: float | None = None
    """The end of the scale, if it is known."""

    def __call__(self, width: float) -> str:
        """Return the chart as SVG."""
        narrow, bars = width <= NARROW, len(self.series)
        thick = 15.0 if bars == 1 else 11.0
        head, span = 22.0 if narrow else 6.0, bars * (thick + 3)
        step = head + span + 8
        names = [*self.series, *([self.tick] if self.tick else [])]
        names = names if len(names) > 1 else []
        height = _legend_height(width, names) + len(self.rows) * step + 8
        values = [value for _, many in self.rows for value in many if value is not None]
        low, high = min([0.0, *values]), max([self.top or 0.0, *values])
        high = high if high > low else low + 1.0
        with page_canvas(width, height) as canvas:
            axes = canvas.figure.subplots()
            axes.set_xlim(low, high)
            axes.set_ylim(len(self.rows) * step, 0)
            hide_frame(axes)
            axes.set_xticks([])
            tops = [place * step + head for place in range(len(self.rows))]
            for row, top in zip(self.rows, tops, strict=True):
                self._row(canvas, axes, row, top, thick, (high - low) / 500)
            if narrow:
                axes.set_yticks([])
                axes.vlines(
                    [0] * len(tops),
                    [y - 2 for y in tops],
                    [y + span for y in tops],
                    MUTED,
                    linewidth=1,
                    clip_on=False,
                )
                for (name, _), top in zip(self.rows, tops, strict=True):
                    short = shorten(name, int(width / LETTER))
                    axes.text(0, top - 5, short, transform=axes.get_yaxis_transform())
            else:
                axes.axvline(0, color=MUTED, linewidth=1, clip_on=False)
                short_names = [shorten(name, 34) for name, _ in self.rows]
                axes.set_yticks([top + (span - 3) / 2 for top in tops], short_names, color=INK, fontsize=12)
            if names:
                signs: list[Any] = [Patch(color=COLOURS[i % len(COLOURS)]) for i in range(bars)]
                signs += [Line2D([], [], color=INK, marker="|", linestyle="none", markersize=13, mew=2)]
                _legend(canvas, signs[: len(names)], names)
            return canvas.svg(self.label)

    def _row(
        self,
        canvas: PageCanvas,
        axes: Any,
        row: tuple[str, Sequence[float | None]],
        top: float,
        thick: float,
        least: float,
    ) -> None:
        name, many = row
        beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "color": MUTED, "size": 11}
        for number, value in enumerate(many[: len(self.series)]):
            middle = top + number * (thick + 3) + thick / 2
            if value is None:
                axes.annotate("not known", (0, middle), **beside)
                continue
            length = value if abs(value) > least else least
            colour = COLOURS[number % len(COLOURS)]
            (bar,) = axes.barh(middle, length, thick, color=colour, clip_on=False)
            what = f"{name}, {self.series[number]}" if len(self.series) > 1 else name
            canvas.add_tips(bar, "bar", [f"{what}: {self.say(value)}"])
            axes.annotate(self.say(value), (max(0.0, length), middle), **beside)
        if self.tick and len(many) > len(self.series) and (null := many[len(self.series)]) is not None:
            ends = (top - 3, top + len(self.series) * (thick + 3))
            axes.plot([null, null], ends, color=INK, linewidth=2, clip_on=False)
            (touch,) = axes.plot([null, null], ends, color=INK, linewidth=9, alpha=0, clip_on=False)
            canvas.add_tips(touch, "touch", [f"{name}, {self.tick}: {self.say(null)}"])


@dataclass(frozen=True)
class ChartCurve:
    """Points with a name. A curve that is there for comparison only is quiet."""

    label: str
    points: Sequence[tuple[float, float]]
    quiet: int = 0
    """0 for a colour of its own; 1 for dashed grey, 2 for dotted grey."""


@dataclass(frozen=True)
class LineChart:
    """Curves over numbers, with a mark at every point."""

    curves: Sequence[ChartCurve]
    x_name: str
    y_name: str
    label: str
    """Read aloud."""
    say: Callable[[float], str] = plain
    """Formats a value for tips."""
    scale: Callable[[float], str] = plain
    """Formats a value for the scale."""
    whole_x: bool = False
    zero: bool = False
    """Whether the scale includes 0, with a line of its own."""

    def __call__(self, width: float) -> str:
        """Return the chart as SVG."""
        narrow = width <= NARROW
        labels = [curve.label for curve in self.curves]
        with page_canvas(width, _legend_height(width, labels) + (280 if narrow else 330)) as canvas:
            axes = canvas.figure.subplots()
            hide_frame(axes)
            looks = self._looks()
            for curve, look in sorted(zip(self.curves, looks, strict=True), key=lambda one: -one[0].quiet):
                self._curve(canvas, axes, curve, look)
            axes.set_xlabel(self.x_name)
            axes.set_title(self.y_name, loc="left", fontsize=11.5, color=MUTED)
            axes.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
            axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=self.whole_x))
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            axes.xaxis.set_major_formatter(lambda value, _: plain(round(value, 10)))
            axes.yaxis.set_major_formatter(lambda value, _: self.scale(value))
            if self.zero:
                self._show_zero(axes)
            axes.autoscale_view()
            keys = [Line2D([], [], **{**look, "marker": "" if one.quiet else look["marker"]})
                    for one, look in zip(self.curves, looks, strict=True)]  # fmt: skip
            _legend(canvas, keys, labels)
            return canvas.svg(self.label)

    def _curve(self, canvas: PageCanvas, axes: Any, curve: ChartCurve, look: dict[str, Any]) -> None:
        points = [(x, y) for x, y in curve.points if isfinite(y)]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, **{**look, "marker": ""}, clip_on=False)
        (marks,) = axes.plot(xs, ys, **{**look, "linestyle": "none"}, clip_on=False)
        where = [f"{self.x_name} {plain(round(x, 4))}" for x in xs]
        tips = [f"{curve.label}: {self.say(y)} at {here}" for y, here in zip(ys, where, strict=True)]
        canvas.add_tips(marks, "mark", tips)

    def _show_zero(self, axes: Any) -> None:
        """Let the scale begin at 0, unless a value is clearly below."""
        ys = [y for curve in self.curves for _, y in curve.points if isfinite(y)]
        axes.update_datalim([(axes.dataLim.x0, 0.0)], updatex=False)
        if min(ys) > -0.1 * abs(max(ys)):
            axes.set_ylim(bottom=0.0)
        axes.axhline(0, color=MUTED, linewidth=1, zorder=1, clip_on=False)

    def _looks(self) -> list[dict[str, Any]]:
        looks: list[dict[str, Any]] = []
        loud = 0
        common = {"solid_capstyle": "round", "dash_capstyle": "round", "mec": CARD, "mew": 1.2, "ms": 8.5}
        for curve in self.curves:
            if curve.quiet:
                dashes = (0, (3.3, 2.2)) if curve.quiet == 1 else (0, (0.8, 2.4))
                look = {"color": MUTED, "linestyle": dashes, "linewidth": 1.8, "marker": "o"}
            else:
                look = {
                    "color": COLOURS[loud % len(COLOURS)],
                    "marker": MARKS[loud % len(MARKS)],
                    "linestyle": "-" if loud < len(COLOURS) else (0, (0.8, 2.4)),
                    "linewidth": 2.2,
                    "zorder": 3,
                }
                loud += 1
            looks.append({**common, **look})
        return looks
