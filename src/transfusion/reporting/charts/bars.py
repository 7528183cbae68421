"""Bars: a few values for every row, side by side with the names of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transfusion.reporting.charts.canvas import COLOURS, NARROW, line, plain, rect, svg, text


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
        """Draw it."""
        narrow = width <= NARROW
        bars = len(self.series)
        left = 4.0 if narrow else min(230.0, 24 + 6.9 * max(len(name) for name, _ in self.rows))
        right, thick = 66.0, 15.0 if bars == 1 else 11.0
        values = [value for _, many in self.rows for value in many if value is not None]
        low, high = min(0.0, *values), max(self.top or 0.0, *values)
        high = high if high > low else low + 1.0

        def at(value: float) -> float:
            return left + (value - low) / (high - low) * (width - left - right)

        body, y = self._key(width)
        step = bars * (thick + 3) + (24 if narrow else 14)
        start = y
        for name, many in self.rows:
            if narrow:
                body.append(text(left, y + 12, name))
                y += 18
            else:
                body.append(text(left - 10, y + bars * (thick + 3) / 2 + 3, name, anchor="end"))
            if narrow:
                body.append(line(at(0), y - 2, at(0), y + bars * (thick + 3) - 1, "axis"))
            body.extend(self._row(name, many, y, thick, at))
            y += step - (18 if narrow else 0) + (6 if narrow else 0)
        if self.tick:
            y += 4
        if not narrow:
            body.insert(0, line(at(0), start - 4, at(0), y - 8, "axis"))
        return svg(width, y, body, self.label)

    def _key(self, width: float) -> tuple[list[str], float]:
        names = [*self.series, *([self.tick] if self.tick else [])]
        if len(names) == 1:
            return [], 6.0
        body: list[str] = []
        x, y = 4.0, 12.0
        for number, name in enumerate(names):
            room = 20 + 6.8 * len(name)
            if x > 4 and x + room > width:
                x, y = 4.0, y + 18
            if number < len(self.series):
                body.append(rect(x, y - 9, 10, 10, f"bar c{number % COLOURS}"))
            else:
                body.append(line(x + 5, y - 11, x + 5, y + 3, "limit"))
            body.append(text(x + 16, y, name, kind="key"))
            x += room + 10
        return body, y + 16

    def _row(
        self, name: str, many: Sequence[float | None], y: float, thick: float, at: Callable[[float], float]
    ) -> list[str]:
        body: list[str] = []
        for number, value in enumerate(many[: len(self.series)]):
            here = y + number * (thick + 3)
            if value is None:
                body.append(text(at(0) + 6, here + thick - 3, "not known", kind="tick"))
                continue
            ends = sorted((at(0), at(value)))
            what = f"{name}, {self.series[number]}" if len(self.series) > 1 else name
            tip = f"{what}: {self.say(value)}"
            body.append(
                rect(ends[0], here, max(1.5, ends[1] - ends[0]), thick, f"bar c{number % COLOURS}", tip)
            )
            body.append(text(ends[1] + 6, here + thick - 2.5, self.say(value), kind="tick"))
        beside = many[len(self.series)] if self.tick and len(many) > len(self.series) else None
        if beside is not None:
            span = len(self.series) * (thick + 3) - 3
            tip = f"{name}, {self.tick}: {self.say(beside)}"
            body.append(line(at(beside), y - 3, at(beside), y + span + 3, "limit"))
            body.append(rect(at(beside) - 4, y - 3, 8, span + 6, "touch", tip))
        return body
