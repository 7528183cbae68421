"""The charts of a page: bars, lines, heat maps and strands, drawn by matplotlib as SVG.

matplotlib draws with the colours of the light theme. Each colour is then replaced by the CSS variable of its
name. Only paths and texts are copied from matplotlib's SVG; ids, metadata and style sheets are left out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from math import ceil, isfinite
from typing import Any, TypeAlias
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from transfusion.report.parts import NARROW, Figure, Table, brief, number, shown

Matrix: TypeAlias = NDArray[np.floating[Any]]
Format: TypeAlias = Callable[[float], str]
Rows: TypeAlias = Sequence[tuple[str, Sequence[float | None]]]
"""The rows of a bar chart: a name, and a value of each series."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b04a8b", "#b8860b", "#111111")
"""Distinguishable with every kind of colour vision."""
MARKS = ("o", "s", "^", "D", "v", "P")
DASHED, DOTTED = (0, (3.3, 2.2)), (0, (0.8, 2.4))
INK, MUTED, GRID, CARD, SOFT, HEAT = "#1c1f24", "#5a606b", "#e6e3db", "#ffffff", "#f1efe9", "#0b5c8c"
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", CARD: "card", SOFT: "soft", HEAT: "heat"} | {
    colour: f"c{place}" for place, colour in enumerate(COLOURS)
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
LETTER = 6.8
"""The width of a letter in pixels, about."""
FAINT = 0.02
"""The smallest share that is drawn."""
CELLS = 6000
"""The largest number of squares in a heat map; beyond that, panels are left out."""
THREADS = 40
"""The largest number of B's units in a strand chart."""


# ── SVG for a page ───────────────────────────────────────────────────────────────────────────

_PIXELS_PER_INCH = 72
_NAMESPACE = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_DECIMALS = re.compile(r"-?\d+\.\d+")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Canvas:
    """A drawing of so many pixels, and the tips of its marks."""

    def __init__(self, width: float, height: float, layout: Any = None) -> None:
        self.width, self.height = width, height
        size = (width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH)
        self.drawing: Any = Drawing(figsize=size, dpi=_PIXELS_PER_INCH, layout=layout)
        self.drawing.patch.set_visible(False)
        self._marks: dict[str, tuple[str, Sequence[str]]] = {}

    def add_tips(self, artist: Any, kind: str, tips: Sequence[str]) -> None:
        """Give an artist a CSS class, and each of its shapes a tip, in the order of drawing."""
        id = f"mark-{len(self._marks)}"
        artist.set_gid(id)
        self._marks[id] = (kind, tips)

    def add_legend(self, signs: Sequence[Any], labels: Sequence[str]) -> None:
        """Explain the signs above the axes, in as many columns as fit."""
        room = int((self.width - 40) / LETTER)
        labels = [shorten(label, room) for label in labels]
        spaces = {"handlelength": 1.6, "columnspacing": 1.4, "borderaxespad": 0, "borderpad": 0.2}
        columns = _columns(self.width, labels)
        self.drawing.legend(signs, labels, loc="outside upper left", ncols=columns, **spaces)

    def svg(self, label: str) -> str:
        """Return the drawing as SVG for HTML. ``label`` is read aloud by screen readers."""
        for text in self.drawing.findobj(Text):
            text.set_text(_NOT_XML.sub("�", text.get_text()))
        buffer = StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has fonts of its own
            FigureCanvasSVG(self.drawing).print_svg(buffer, metadata={"Date": None})
        source = ElementTree.fromstring(buffer.getvalue())
        width, height = f"{self.width:g}", f"{self.height:g}"
        size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
        root = ElementTree.Element("svg", {**size, "role": "img", "tabindex": "0", "aria-label": label})
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
                        copy.attrib |= {"class": mark[0], "data-tip": _NOT_XML.sub("�", tip)}
                copies += inside
            elif tag in ("path", "text", "use"):
                copies.append(_copied(tag, element, root, shapes))
        return copies


def _copied(tag: str, element: Any, root: Any, shapes: dict[str, str]) -> Any:
    style = dict(one.strip().split(": ", 1) for one in element.get("style", "").split(";") if one.strip())
    at = {key: _rounded(element.get(key, "0")) for key in ("x", "y")}
    if tag == "text":
        kept = {key: style[key] for key in ("font-size", "text-anchor", "fill") if key in style}
        copy = ElementTree.SubElement(root, "text", {**at, "style": _themed(kept)})
        copy.text = element.text
        return copy
    outline = element.get("d") or shapes[element.get(_LINK, "").removeprefix("#")]
    placed = {"transform": f"translate({at['x']} {at['y']})"} if tag == "use" else {}
    return ElementTree.SubElement(root, "path", {"d": _rounded(outline), "style": _themed(style), **placed})


def _rounded(numbers: str) -> str:
    return " ".join(_DECIMALS.sub(lambda found: f"{float(found[0]):.2f}", numbers).split())


def _themed(style: dict[str, str]) -> str:
    """The style with a CSS variable in place of each colour."""
    return ";".join(
        f"{key}:{f'var(--{VARIABLES[value]})' if value.startswith('#') else value}"
        for key, value in style.items()
    )


def shorten(text: str, length: int) -> str:
    """Cut a text to a length, with an ellipsis for the rest."""
    return text if len(text) <= length else f"{text[: max(1, length - 1)].rstrip(' ·')}…"


def _columns(width: float, labels: Sequence[str]) -> int:
    widths = [46 + LETTER * len(label) for label in labels]
    return len(labels) if sum(widths) <= width else max(1, int(width / max(widths)))


def _legend_height(width: float, labels: Sequence[str]) -> float:
    return 20.0 * ceil(len(labels) / _columns(width, labels)) if labels else 0.0


def _hide_frame(axes: Any) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


# ── bars ─────────────────────────────────────────────────────────────────────────────────────


def bars(
    id: str,
    title: str,
    rows: Rows,
    series: Sequence[str],
    say: Format,
    *,
    first: str = "",
    exact: Callable[[float | None], str] = number,
    tick: str = "",
    top: float | None = None,
    caption: str = "",
    table: Table | None = None,
    opened: bool = False,
) -> Figure:
    """Draw rows of values as horizontal bars, with the same values as a table.

    ``say`` formats values in the chart, ``exact`` in the table, whose first column is named ``first``.
    ``tick`` names a last series that is drawn as a tick, ``top`` is the end of the scale.
    """
    names = [*series, *([tick] if tick else [])]
    table = table or Table([first, *names], [(name, *map(exact, values)) for name, values in rows])

    @rc_context(STYLE)
    def draw(width: float) -> str:
        narrow, count = width <= NARROW, len(series)
        thick = 15.0 if count == 1 else 11.0
        head, span = 22.0 if narrow else 6.0, count * (thick + 3)
        step = head + span + 8
        explained = names if len(names) > 1 else []
        values = [value for _, many in rows for value in many if value is not None]
        low, high = min([0.0, *values]), max([top or 0.0, *values])
        high = high if high > low else low + 1.0
        canvas = Canvas(width, _legend_height(width, explained) + len(rows) * step + 8, "constrained")
        axes = canvas.drawing.subplots()
        axes.set(xlim=(low, high), ylim=(len(rows) * step, 0), xticks=[])
        _hide_frame(axes)
        beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "color": MUTED, "size": 11}
        tops = [place * step + head for place in range(len(rows))]
        for (name, many), above in zip(rows, tops, strict=True):
            for place, value in enumerate(many[:count]):
                middle = above + place * (thick + 3) + thick / 2
                if value is None:
                    axes.annotate("not known", (0, middle), **beside)
                    continue
                least = (high - low) / 500
                length = value if abs(value) > least else least
                (bar,) = axes.barh(middle, length, thick, color=COLOURS[place % len(COLOURS)], clip_on=False)
                what = f"{name}, {names[place]}" if count > 1 else name
                canvas.add_tips(bar, "bar", [f"{what}: {say(value)}"])
                axes.annotate(say(value), (max(0.0, length), middle), **beside)
            if tick and (null := many[count]) is not None:
                ends = (above - 3, above + span)
                axes.plot([null, null], ends, color=INK, linewidth=2, clip_on=False)
                (touch,) = axes.plot([null, null], ends, color=INK, linewidth=9, alpha=0, clip_on=False)
                canvas.add_tips(touch, "touch", [f"{name}, {tick}: {say(null)}"])
        if narrow:
            axes.set_yticks([])
            for (name, _), above in zip(rows, tops, strict=True):
                axes.vlines(0, above - 2, above + span, MUTED, linewidth=1, clip_on=False)
                short = shorten(name, int(width / LETTER))
                axes.text(0, above - 5, short, transform=axes.get_yaxis_transform())
        else:
            axes.axvline(0, color=MUTED, linewidth=1, clip_on=False)
            short_names = [shorten(name, 34) for name, _ in rows]
            axes.set_yticks([above + (span - 3) / 2 for above in tops], short_names, color=INK, fontsize=12)
        if explained:
            signs: list[Any] = [Patch(color=COLOURS[place % len(COLOURS)]) for place in range(count)]
            signs += [Line2D([], [], color=INK, marker="|", linestyle="none", markersize=13, mew=2)]
            canvas.add_legend(signs[: len(explained)], explained)
        return canvas.svg(title)

    return Figure(id, title, draw, table, caption, opened)


# ── lines ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Curve:
    """Points with a name. A curve that is there for comparison only is quiet."""

    label: str
    points: Sequence[tuple[float, float]]
    quiet: int = 0
    """0 for a colour of its own; 1 for dashed grey, 2 for dotted grey."""

    @property
    def finite(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        return [(x, y) for x, y in self.points if isfinite(y)]


def lines(
    id: str,
    title: str,
    curves: Sequence[Curve],
    x: str,
    y: str,
    say: Format,
    *,
    scale: Format | None = None,
    whole_x: bool = False,
    zero: bool = False,
    caption: str = "",
    table: Table | None = None,
) -> Figure:
    """Draw curves with a mark at every point, and the same values as a table.

    ``scale`` formats values on the scale, which includes 0 with a line of its own if ``zero``.
    """
    rows = [(one.label, brief(at), say(value)) for one in curves for at, value in one.points]
    labels = [curve.label for curve in curves]

    @rc_context(STYLE)
    def draw(width: float) -> str:
        narrow = width <= NARROW
        canvas = Canvas(width, _legend_height(width, labels) + (280 if narrow else 330), "constrained")
        axes = canvas.drawing.subplots()
        marks, signs = plot_curves(axes, curves, x, y, scale or say)
        axes.xaxis.get_major_locator().set_params(nbins=4 if narrow else 8, integer=whole_x)
        if zero:
            _show_zero(axes, [value for curve in curves for _, value in curve.finite])
        axes.autoscale_view()
        for curve, drawn in zip(curves, marks, strict=True):
            tips = [f"{say(value)} at {x} {shown(round(at, 4), 'g')}" for at, value in curve.finite]
            canvas.add_tips(drawn, "mark", [f"{curve.label}: {tip}" for tip in tips])
        canvas.add_legend(signs, labels)
        return canvas.svg(title)

    return Figure(id, title, draw, table or Table(["", x, y], rows), caption)


def _show_zero(axes: Any, values: Sequence[float]) -> None:
    """Let the scale begin at 0, unless a value is clearly below."""
    axes.update_datalim([(axes.dataLim.x0, 0.0)], updatex=False)
    if min(values) > -0.1 * abs(max(values)):
        axes.set_ylim(bottom=0.0)
    axes.axhline(0, color=MUTED, linewidth=1, zorder=1, clip_on=False)


def _plain(value: float) -> str:
    return shown(round(value, 10), "g")


def plot_curves(
    axes: Any, curves: Sequence[Curve], x: str, y: str, scale: Format = _plain
) -> tuple[list[Any], list[Any]]:
    """Draw curves into axes; return the marks of every curve, and its sign for a legend."""
    _hide_frame(axes)
    marks, signs = list[Any](), list[Any]()
    for curve, look in zip(curves, _looks(curves), strict=True):
        xs, ys = [at for at, _ in curve.finite], [value for _, value in curve.finite]
        axes.plot(xs, ys, **{**look, "marker": ""}, clip_on=False)
        marks += axes.plot(xs, ys, **{**look, "linestyle": "none"}, clip_on=False)
        signs.append(Line2D([], [], **(look | ({"marker": ""} if curve.quiet else {}))))
    axes.set_xlabel(x)
    axes.set_title(y, loc="left", fontsize=11.5, color=MUTED)
    axes.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
    for axis, ticks in ((axes.xaxis, 8), (axes.yaxis, 5)):
        axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: _plain(value))
    axes.yaxis.set_major_formatter(lambda value, _: scale(value))
    axes.autoscale_view()
    return marks, signs


def _looks(curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    """Yield the colour and the marks of each curve; quiet ones are grey and lie behind."""
    loud = 0
    common = {"solid_capstyle": "round", "dash_capstyle": "round", "mec": CARD, "mew": 1.2, "ms": 8.5}
    for curve in curves:
        if curve.quiet:
            line = {"color": MUTED, "linestyle": DASHED if curve.quiet == 1 else DOTTED, "linewidth": 1.8}
            yield {**common, **line, "marker": "o", "zorder": 2}
        else:
            line = {
                "color": COLOURS[loud % len(COLOURS)],
                "linestyle": "-" if loud < len(COLOURS) else DOTTED,
            }
            yield {**common, **line, "linewidth": 2.2, "marker": MARKS[loud % len(MARKS)], "zorder": 3}
            loud += 1


# ── maps between units ───────────────────────────────────────────────────────────────────────


def drawn_panels(panels: Sequence[tuple[str, Matrix]]) -> Sequence[tuple[str, Matrix]]:
    """Return the panels that a heat map draws: all of them, or some from the first to the last."""
    cells = sum(int((matrix >= FAINT).sum()) for _, matrix in panels)
    if cells <= CELLS:
        return panels
    count = max(1, len(panels) * CELLS // cells)
    places = sorted({round(place) for place in np.linspace(0, len(panels) - 1, count)})
    return [panels[place] for place in places]


@rc_context(STYLE)
def draw_heat_map(
    title: str, panels: Sequence[tuple[str, Matrix]], framed: Sequence[tuple[int, int]], width: float
) -> str:
    """Draw matrices of shares from 0 to 1, a panel each: rows are B's, columns A's.

    ``framed`` are cells with a frame, (row, column).
    """
    panels = drawn_panels(panels)
    columns = min(2 if width <= NARROW else 5, len(panels))
    gap, head, foot = 34.0, 22.0, 34.0
    side = min(170.0, (width - 14 - gap * (columns - 1)) / columns)
    height = ceil(len(panels) / columns) * (side + head + foot)
    canvas = Canvas(width, height)
    for place, (name, matrix) in enumerate(panels):
        down, across = divmod(place, columns)
        left, top = 7 + across * (side + gap), down * (side + head + foot) + head
        box = (left / width, 1 - (top + side) / height, side / width, side / height)
        axes = canvas.drawing.add_axes(box)
        axes.set_title(shorten(name, int((side + gap) / LETTER)), loc="left", fontsize=12)
        _draw_panel(canvas, axes, name, matrix, framed)
    return canvas.svg(title)


def _draw_panel(
    canvas: Canvas, axes: Any, name: str, matrix: Matrix, framed: Sequence[tuple[int, int]]
) -> None:
    down, across = matrix.shape
    _hide_frame(axes)
    axes.set(xlim=(0, across), ylim=(down, 0), xticks=[], yticks=[])
    axes.add_patch(Rectangle((0, 0), across, down, facecolor=SOFT, clip_on=False))
    if max(down, across) <= 32:
        axes.hlines(range(1, down), 0, across, CARD, linewidth=0.7, clip_on=False)
        axes.vlines(range(1, across), 0, down, CARD, linewidth=0.7, clip_on=False)
    for to, source in framed:
        box = Rectangle((source + 0.04, to + 0.04), 0.92, 0.92, facecolor="none", clip_on=False)
        box.set(edgecolor=COLOURS[1], linewidth=1.6, zorder=3)
        axes.add_patch(box)
    if cells := {(to, source): float(matrix[to, source]) for to, source in np.argwhere(matrix >= FAINT)}:
        squares = [Rectangle((source + 0.03, to + 0.03), 0.94, 0.94) for to, source in cells]
        depths = [0.12 + 0.88 * min(1.0, share) for share in cells.values()]
        drawn = PatchCollection(squares, facecolor=HEAT, linewidth=0, alpha=depths, clip_on=False)
        axes.add_collection(drawn, autolim=False)
        tips = [f"{name}: B {to} ← A {source}, {share:.0%}" for (to, source), share in cells.items()]
        canvas.add_tips(drawn, "cell", tips)
    axes.set_xlabel("A →", loc="right", fontsize=11)
    below = {"xycoords": "axes fraction", "xytext": (0, -4), "textcoords": "offset points", "va": "top"}
    axes.annotate("↓ B", (0, 0), **below, color=MUTED, fontsize=11)


@rc_context(STYLE)
def draw_strands(title: str, shares: Matrix, width: float) -> str:
    """Draw threads from A's units to B's: for each unit of B, the two units of A with the largest shares."""
    colours = (COLOURS[0], COLOURS[2], COLOURS[4], COLOURS[1], COLOURS[3], MUTED)
    height, left, right = 300.0, 16.0, width - 16.0
    top, bottom, middle = 34.0, height - 14, width / 2
    count = len(shares)
    units = np.unique(np.linspace(0, count - 1, min(THREADS, count)).round().astype(int))
    places = top + (np.arange(count) + 0.5) / count * (bottom - top)
    canvas = Canvas(width, height)
    axes = canvas.drawing.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    axes.text(left - 6, 16, "A")
    axes.text(right + 6, 16, "B", ha="right")
    for unit in units:
        for rank, source in enumerate(np.argsort(-shares[unit])[:2]):
            if (share := float(shares[unit, source])) < FAINT:
                continue
            start, end = places[source], places[unit]
            points = [(left, start), (middle, start), (middle, end), (right, end)]
            curve = Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
            colour = colours[min(5, int(6 * source / count))]
            alpha = 0.1 + 0.4 * share if rank else 0.25 + 0.65 * share
            thread = PathPatch(curve, facecolor="none", edgecolor=colour, linewidth=1.7, alpha=alpha)
            axes.add_patch(thread)
            canvas.add_tips(thread, "strand", [f"B {unit} ← A {source}, {share:.0%}"])
            axes.plot([left], [start], "o", color=colour, markersize=4.8, mew=0)
    axes.plot([right] * len(units), places[units], "o", color=MUTED, ms=4.8, mew=0)
    return canvas.svg(title)
