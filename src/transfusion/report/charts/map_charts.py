"""The charts of a map between units: a heat map, and strands from A's units to B's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from numpy.typing import NDArray

from transfusion.report.charts.figure_style import COLOURS, shorten
from transfusion.report.charts.page_charts import LETTER, hide_frame
from transfusion.report.charts.page_svg import CARD, HEAT, MUTED, NARROW, SOFT, PageCanvas, page_canvas

FAINT = 0.02
"""The smallest share that is drawn."""
CELLS = 6000
"""The largest number of squares in a heat map; beyond that, panels are left out."""
THREADS = 40
"""The largest number of B's units in a strand chart."""
STRANDS = (COLOURS[0], COLOURS[2], COLOURS[4], COLOURS[1], COLOURS[3], MUTED)
"""The colours of A's units in a strand chart, from the first unit to the last."""
Matrix = NDArray[np.floating[Any]]


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
