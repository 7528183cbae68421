"""Heat maps: small squares in rows and columns, several panels to a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfusion.reporting.charts.canvas import NARROW, rect, svg, text

FAINT = 0.02
"""A share below which a square is not drawn."""
CELLS = 6000
"""How many squares a figure has at most; beyond that, some panels are left out."""


@dataclass(frozen=True)
class HeatMap:
    """Matrices of shares from 0 to 1: rows are B's, columns A's."""

    panels: Sequence[tuple[str, NDArray[np.floating[Any]]]]
    label: str
    """Read aloud."""
    row: str = "B"
    column: str = "A"

    def shown(self) -> list[tuple[str, NDArray[np.floating[Any]]]]:
        """The panels that are drawn: all, or some from beginning to end."""
        cells = sum(int((matrix >= FAINT).sum()) for _, matrix in self.panels)
        if cells <= CELLS:
            return list(self.panels)
        count = max(1, len(self.panels) * CELLS // cells)
        places = sorted({round(place) for place in np.linspace(0, len(self.panels) - 1, count)})
        return [self.panels[place] for place in places]

    def __call__(self, width: float) -> str:
        """Draw it."""
        panels = self.shown()
        columns = min(2 if width <= NARROW else 5, len(panels))
        gap, head, foot = 26.0, 22.0, 22.0
        side = min(170.0, (width - 14 - gap * (columns - 1)) / columns - 8)
        body: list[str] = []
        for number, (name, matrix) in enumerate(panels):
            down, across = divmod(number, columns)
            x, y = 14 + across * (side + gap + 8), down * (side + head + foot + 12) + head
            body.append(
                text(x, y - 8, name if len(name) * 6.4 < side + gap else _cut(name, side), kind="key")
            )
            body.extend(self._panel(name, matrix, x, y, side))
        rows = -(-len(panels) // columns)
        return svg(width, rows * (side + head + foot + 12), body, self.label)

    def _panel(
        self, name: str, matrix: NDArray[np.floating[Any]], x: float, y: float, side: float
    ) -> list[str]:
        step = side / len(matrix)
        body = [rect(x, y, side, side, "field")]
        for place in range(1, len(matrix) if len(matrix) <= 32 else 1):
            body.append(rect(x + place * step, y, 0.6, side, "mesh"))
            body.append(rect(x, y + place * step, side, 0.6, "mesh"))
        for to, source in zip(*np.nonzero(matrix >= FAINT), strict=True):
            share = float(matrix[to, source])
            tip = f"{name}: {self.row} {to} ← {self.column} {source}, {share:.0%}"
            inset = min(1.0, step / 8)
            corner = (x + source * step + inset, y + to * step + inset, step - 2 * inset, step - 2 * inset)
            body.append(rect(*corner, "cell", tip, f"fill-opacity:{0.12 + 0.88 * min(1.0, share):.2f}"))
        body.append(text(x + side, y + side + 15, f"{self.column} →", kind="tick", anchor="end"))
        body.append(text(x, y + side + 15, f"↓ {self.row}", kind="tick"))
        return body


def _cut(name: str, room: float) -> str:
    return name[: max(4, int(room / 6.4))].rstrip(" ·") + "…"
