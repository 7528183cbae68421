"""Strands: which units of B come from which of A, drawn as threads from one side to the other."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfusion.reporting.charts.canvas import svg, text

THREADS = 40
"""How many units of B are drawn, at most."""


@dataclass(frozen=True)
class StrandChart:
    """Shares of every unit of B in the units of A; the strongest two of each are drawn."""

    shares: NDArray[np.floating[Any]]
    names: tuple[str, str]
    label: str
    """Read aloud."""

    def __call__(self, width: float) -> str:
        """Draw it."""
        height, left, right = 300.0, 16.0, width - 16.0
        top, bottom = 34.0, height - 14
        count = len(self.shares)
        units = np.unique(np.linspace(0, count - 1, min(THREADS, count)).round().astype(int))

        def at(unit: float) -> float:
            return top + (unit + 0.5) / count * (bottom - top)

        body = [text(left - 6, 16, self.names[0], kind="key")]
        body.append(text(right + 6, 16, self.names[1], kind="key", anchor="end"))
        middle, threads, dots = (left + right) / 2, list[str](), list[str]()
        for unit in units:
            row = self.shares[unit]
            strongest = [int(one) for one in np.argsort(-row)[:2] if row[one] >= 0.02]
            for rank, source in enumerate(strongest):
                share = float(row[source])
                tip = escape(f"{self.names[1]} {unit} ← {self.names[0]} {source}, {share:.0%}")
                hue = min(5, int(6 * source / count))
                opacity = 0.25 + 0.65 * share if rank == 0 else 0.1 + 0.4 * share
                path = f"M{left} {at(source):.1f}C{middle:.1f} {at(source):.1f} {middle:.1f} {at(unit):.1f}"
                threads.append(
                    f'<path d="{path} {right} {at(unit):.1f}" class="strand h{hue}" pathLength="1"'
                    f' style="opacity:{opacity:.2f};--n:{len(threads)}"'
                    f' data-tip="{tip}"/>'
                )
                dots.append(f'<circle cx="{left}" cy="{at(source):.1f}" r="2.4" class="dot h{hue}"/>')
            dots.append(f'<circle cx="{right}" cy="{at(unit):.1f}" r="2.4" class="dot end"/>')
        return svg(width, height, [*body, *threads, *dots], self.label)
