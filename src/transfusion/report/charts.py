"""The charts of a page, and their look, which the figures in files share.

A chart is called with a width in pixels and returns SVG. matplotlib draws with the colours of the light
theme. Each colour is then replaced by the CSS variable of its name. Only paths and texts are copied from
matplotlib's SVG; ids, metadata and style sheets are left out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

Matrix = NDArray[np.floating[Any]]

WIDE, NARROW = 960, 330
"""The widths in pixels that every chart is drawn in: for a desk and for a phone."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b04a8b", "#b8860b", "#111111")
"""Distinguishable with every kind of colour vision."""
MARKS = ("o", "s", "^", "D", "v", "P")
DASHED, DOTTED = (0, (3.3, 2.2)), (0, (0.8, 2.4))
INK, MUTED, GRID, CARD, SOFT, HEAT = "#1c1f24", "#5a606b", "#e6e3db", "#ffffff", "#f1efe9", "#0b5c8c"
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    CARD: "card",
    SOFT: "soft",
    HEAT: "heat",
    **{colour: f"c{number}" for number, colour in enumerate(COLOURS)},
}
"""The colours of the light theme, and the CSS variables that stand for them."""
STYLE = {
    "axes.autolimit_mode": "round_numbers",
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 11.5,
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "font.size": 12,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "transfusion",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "xtick.major.pad": 9,
    "ytick.major.pad": 8,
}
_PIXELS_PER_INCH = 72
_NAMESPACE = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_DECIMALS = re.compile(r"-?\d+\.\d+")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class PageCanvas:
    """A figure of one chart, and the tips of its marks."""

    def __init__(self, width: float, height: float, *, constrained: bool) -> None:
        self.width, self.height = width, height
        size = (width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH)
        self.figure: Any = Figure(
            figsize=size, dpi=_PIXELS_PER_INCH, layout="constrained" if constrained else None
        )
        self.figure.patch.set_visible(False)
        self._marks: dict[str, tuple[str, Sequence[str]]] = {}

    def add_tips(self, artist: Any, kind: str, tips: Sequence[str]) -> None:
        """Give an artist a CSS class, and each of its shapes a tip, in the order of drawing."""
        id = f"mark-{len(self._marks)}"
        artist.set_gid(id)
        self._marks[id] = (kind, tips)

    def svg(self, label: str) -> str:
        """Return the drawing as SVG for HTML. ``label`` is read aloud by screen readers."""
        for text in self.figure.findobj(Text):
            text.set_text(_NOT_XML.sub("�", text.get_text()))
        buffer = StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has fonts of its own
            FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None})
        source = ElementTree.fromstring(buffer.getvalue())
        size = {"width": f"{self.width:g}", "height": f"{self.height:g}"}
        box = f"0 0 {self.width:g} {self.height:g}"
        root = ElementTree.Element(
            "svg", {"viewBox": box, **size, "role": "img", "tabindex": "0", "aria-label": label}
        )
        shapes = {path.get("id", ""): path.get("d", "") for path in source.iter(f"{_NAMESPACE}path")}
        self._copy(source, root, shapes)
        return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)

    def _copy(self, source: Any, root: Any, shapes: dict[str, str]) -> list[Any]:
        """Append the paths and texts of a group to the root, without the group; return them."""
        copies: list[Any] = []
        for element in source:
            tag = element.tag.removeprefix(_NAMESPACE)
            if tag == "g":
                inside = self._copy(element, root, shapes)
                if (mark := self._marks.get(element.get("id", ""))) is not None:
                    for copy, tip in zip(inside, mark[1], strict=True):
                        copy.set("class", mark[0])
                        copy.set("data-tip", _NOT_XML.sub("�", tip))
                copies += inside
            elif tag in ("path", "text", "use"):
                copies.append(_copied(tag, element, root, shapes))
        return copies


@contextmanager
def page_canvas(width: float, height: float, *, constrained: bool = True) -> Iterator[PageCanvas]:
    """Open an empty canvas in the page's style, with matplotlib's constrained layout or without."""
    with rc_context(STYLE):
        yield PageCanvas(width, height, constrained=constrained)


def _copied(tag: str, element: Any, root: Any, shapes: dict[str, str]) -> Any:
    style = dict(one.strip().split(": ", 1) for one in element.get("style", "").split(";") if one.strip())
    at = {key: _rounded(element.get(key, "0")) for key in ("x", "y")}
    if tag == "text":
        kept = {key: style[key] for key in ("font-size", "text-anchor", "fill") if key in style}
        copy = ElementTree.SubElement(root, "text", {**at, "style": _themed(kept)})
        copy.text = element.text
        return copy
    outline = element.get("d") or shapes[element.get(_LINK, "").removeprefix("#")]
    attributes = {"d": _rounded(outline), "style": _themed(style)}
    if tag == "use":
        attributes["transform"] = f"translate({at['x']} {at['y']})"
    return ElementTree.SubElement(root, "path", attributes)


def _rounded(numbers: str) -> str:
    return " ".join(_DECIMALS.sub(lambda found: f"{float(found[0]):.2f}", numbers).split())


def _themed(style: dict[str, str]) -> str:
    """The style with a CSS variable in place of each colour."""
    values = {
        key: f"var(--{VARIABLES[value]})" if value.startswith("#") else value for key, value in style.items()
    }
    return ";".join(f"{key}:{value}" for key, value in values.items())


# ── bars and lines ───────────────────────────────────────────────────────────────────────────

LETTER = 6.8
"""The width of a letter in pixels, about."""


def plain(value: float) -> str:
    """A number on a scale."""
    return f"{value:g}".replace("-", "−")


def shorten(text: str, length: int) -> str:
    """Cut a text to a length, with an ellipsis for the rest."""
    return text if len(text) <= length else f"{text[: max(1, length - 1)].rstrip(' ·')}…"


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

    @property
    def finite(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        return [(x, y) for x, y in self.points if isfinite(y)]


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
            marks, signs = self.draw(canvas.figure.subplots(), ticks=4 if narrow else 8)
            for curve, drawn in zip(self.curves, marks, strict=True):
                tips = [
                    f"{curve.label}: {self.say(y)} at {self.x_name} {plain(round(x, 4))}"
                    for x, y in curve.finite
                ]
                canvas.add_tips(drawn, "mark", tips)
            _legend(canvas, signs, labels)
            return canvas.svg(self.label)

    def draw(self, axes: Any, ticks: int = 8) -> tuple[list[Any], list[Any]]:
        """Draw into axes; return the marks of every curve, and its sign for a legend."""
        hide_frame(axes)
        marks, signs = list[Any](), list[Any]()
        for curve, look in zip(self.curves, self._looks(), strict=True):
            xs, ys = [x for x, _ in curve.finite], [y for _, y in curve.finite]
            axes.plot(xs, ys, **{**look, "marker": ""}, clip_on=False)
            marks += axes.plot(xs, ys, **{**look, "linestyle": "none"}, clip_on=False)
            signs.append(Line2D([], [], **(look | ({"marker": ""} if curve.quiet else {}))))
        axes.set_xlabel(self.x_name)
        axes.set_title(self.y_name, loc="left", fontsize=11.5, color=MUTED)
        axes.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
        steps = [1, 2, 2.5, 5, 10]
        axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=self.whole_x, steps=steps))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=steps))
        axes.xaxis.set_major_formatter(lambda value, _: plain(round(value, 10)))
        axes.yaxis.set_major_formatter(lambda value, _: self.scale(value))
        if self.zero:
            self._show_zero(axes)
        axes.autoscale_view()
        return marks, signs

    def _show_zero(self, axes: Any) -> None:
        """Let the scale begin at 0, unless a value is clearly below."""
        ys = [y for curve in self.curves for _, y in curve.finite]
        axes.update_datalim([(axes.dataLim.x0, 0.0)], updatex=False)
        if min(ys) > -0.1 * abs(max(ys)):
            axes.set_ylim(bottom=0.0)
        axes.axhline(0, color=MUTED, linewidth=1, zorder=1, clip_on=False)

    def _looks(self) -> list[dict[str, Any]]:
        """Return colours and marks; quiet curves are grey and lie behind."""
        looks: list[dict[str, Any]] = []
        loud = 0
        common = {"solid_capstyle": "round", "dash_capstyle": "round", "mec": CARD, "mew": 1.2, "ms": 8.5}
        for curve in self.curves:
            if curve.quiet:
                dashes = DASHED if curve.quiet == 1 else DOTTED
                look = {"color": MUTED, "linestyle": dashes, "linewidth": 1.8, "marker": "o", "zorder": 2}
            else:
                look = {
                    "color": COLOURS[loud % len(COLOURS)],
                    "marker": MARKS[loud % len(MARKS)],
                    "linestyle": "-" if loud < len(COLOURS) else DOTTED,
                    "linewidth": 2.2,
                    "zorder": 3,
                }
                loud += 1
            looks.append({**common, **look})
        return looks


# ── maps between units ───────────────────────────────────────────────────────────────────────

FAINT = 0.02
"""The smallest share that is drawn."""
CELLS = 6000
"""The largest number of squares in a heat map; beyond that, panels are left out."""
THREADS = 40
"""The largest number of B's units in a strand chart."""
STRANDS = (COLOURS[0], COLOURS[2], COLOURS[4], COLOURS[1], COLOURS[3], MUTED)
"""The colours of A's units in a strand chart, from the first unit to the last."""


@dataclass(frozen=True)
class HeatMap:
    """Matrices of shares from 0 to 1, a panel each: rows are B's, columns A's."""

    panels: Sequence[tuple[str, Matrix]]
    label: str
    """Read aloud."""
    row: str = "B"
    column: str = "A"
    framed: Sequence[tuple[int, int]] = ()
    """Cells with a frame, (row, column)."""

    def shown(self) -> list[tuple[str, Matrix]]:
        """The panels that are drawn: all of them, or some from the first to the last."""
        cells = sum(int((matrix >= FAINT).sum()) for _, matrix in self.panels)
        if cells <= CELLS:
            return list(self.panels)
        count = max(1, len(self.panels) * CELLS // cells)
        places = sorted({round(place) for place in np.linspace(0, len(self.panels) - 1, count)})
        return [self.panels[place] for place in places]

    def __call__(self, width: float) -> str:
        """Return the chart as SVG."""
        panels = self.shown()
        columns = min(2 if width <= NARROW else 5, len(panels))
        gap, head, foot = 34.0, 22.0, 34.0
        side = min(170.0, (width - 14 - gap * (columns - 1)) / columns)
        height = -(-len(panels) // columns) * (side + head + foot)
        with page_canvas(width, height, constrained=False) as canvas:
            for number, (name, matrix) in enumerate(panels):
                down, across = divmod(number, columns)
                left, top = 7 + across * (side + gap), down * (side + head + foot) + head
                box = (left / width, 1 - (top + side) / height, side / width, side / height)
                axes = canvas.figure.add_axes(box)
                axes.set_title(shorten(name, int((side + gap) / LETTER)), loc="left", fontsize=12)
                self._panel(canvas, axes, name, matrix)
            return canvas.svg(self.label)

    def _panel(self, canvas: PageCanvas, axes: Any, name: str, matrix: Matrix) -> None:
        down, across = matrix.shape
        hide_frame(axes)
        axes.set(xlim=(0, across), ylim=(down, 0), xticks=[], yticks=[])
        axes.add_patch(Rectangle((0, 0), across, down, facecolor=SOFT, clip_on=False))
        if max(down, across) <= 32:
            axes.hlines(range(1, down), 0, across, CARD, linewidth=0.7, clip_on=False)
            axes.vlines(range(1, across), 0, down, CARD, linewidth=0.7, clip_on=False)
        for to, source in self.framed:
            box = Rectangle((source + 0.04, to + 0.04), 0.92, 0.92, facecolor="none", clip_on=False)
            box.set(edgecolor=COLOURS[1], linewidth=1.6, zorder=3)
            axes.add_patch(box)
        places = list(zip(*np.nonzero(matrix >= FAINT), strict=True))
        shares = [float(matrix[place]) for place in places]
        if places:
            cells = PatchCollection(
                [Rectangle((source + 0.03, to + 0.03), 0.94, 0.94) for to, source in places],
                facecolor=HEAT,
                linewidth=0,
                alpha=[0.12 + 0.88 * min(1.0, share) for share in shares],
                clip_on=False,
            )
            axes.add_collection(cells, autolim=False)
            where = [f"{name}: {self.row} {to} ← {self.column} {source}" for to, source in places]
            tips = [f"{here}, {share:.0%}" for here, share in zip(where, shares, strict=True)]
            canvas.add_tips(cells, "cell", tips)
        axes.set_xlabel(f"{self.column} →", loc="right", fontsize=11)
        below = {"xycoords": "axes fraction", "xytext": (0, -4), "textcoords": "offset points", "va": "top"}
        axes.annotate(f"↓ {self.row}", (0, 0), **below, color=MUTED, fontsize=11)


@dataclass(frozen=True)
class StrandChart:
    """Threads from A's units to B's: for each unit of B, the two units of A with the largest shares."""

    shares: Matrix
    names: tuple[str, str]
    label: str
    """Read aloud."""

    def __call__(self, width: float) -> str:
        """Return the chart as SVG."""
        height, left, right = 300.0, 16.0, width - 16.0
        top, bottom = 34.0, height - 14
        count = len(self.shares)
        units = np.unique(np.linspace(0, count - 1, min(THREADS, count)).round().astype(int))

        def at(unit: float) -> float:
            return top + (unit + 0.5) / count * (bottom - top)

        with page_canvas(width, height, constrained=False) as canvas:
            axes = canvas.figure.add_axes((0, 0, 1, 1))
            axes.set(xlim=(0, width), ylim=(height, 0))
            axes.axis("off")
            axes.text(left - 6, 16, self.names[0])
            axes.text(right + 6, 16, self.names[1], ha="right")
            for unit, source, share, first in self._threads(units):
                colour = STRANDS[min(5, int(6 * source / count))]
                middle, ends = (left + right) / 2, (at(source), at(unit))
                points = [(left, ends[0]), (middle, ends[0]), (middle, ends[1]), (right, ends[1])]
                curve = Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
                alpha = 0.25 + 0.65 * share if first else 0.1 + 0.4 * share
                thread = PathPatch(curve, facecolor="none", edgecolor=colour, linewidth=1.7, alpha=alpha)
                axes.add_patch(thread)
                tip = f"{self.names[1]} {unit} ← {self.names[0]} {source}, {share:.0%}"
                canvas.add_tips(thread, "strand", [tip])
                axes.plot([left], [ends[0]], "o", color=colour, markersize=4.8, mew=0)
            axes.plot([right] * len(units), [at(unit) for unit in units], "o", color=MUTED, ms=4.8, mew=0)
            return canvas.svg(self.label)

    def _threads(self, units: Iterable[int]) -> Iterable[tuple[int, int, float, bool]]:
        """Each thread: the unit of B, the unit of A, the share, and whether it is the larger one."""
        for unit in units:
            row = self.shares[unit]
            for rank, source in enumerate(np.argsort(-row)[:2]):
                if row[source] >= FAINT:
                    yield int(unit), int(source), float(row[source]), rank == 0
