"""SVG for the page: a matplotlib figure whose colours follow the theme and whose marks carry tips.

matplotlib draws with the colours of the light theme. Each colour is then replaced by the CSS variable of its
name. Only paths and texts are copied from matplotlib's SVG; ids, metadata and style sheets are left out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any
from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text

from transfusion.report.charts.figure_style import COLOURS, STYLE

WIDE, NARROW = 960, 330
"""The widths in pixels that every chart is drawn in: for a desk and for a phone."""
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
PAGE_STYLE = {
    **STYLE,
    "axes.autolimit_mode": "round_numbers",
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 11.5,
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "font.size": 12,
    "legend.frameon": False,
    "text.color": INK,
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
    with rc_context(PAGE_STYLE):
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
