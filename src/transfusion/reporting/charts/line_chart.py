"""Line charts: curves over numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from transfusion.reporting.charts.canvas import (
    COLOURS,
    MARKS,
    NARROW,
    key,
    line,
    mark,
    plain,
    polyline,
    svg,
    text,
    ticks,
)


@dataclass(frozen=True)
class ChartCurve:
    """Points with a name; what is there only for comparison is quiet."""

    label: str
    points: Sequence[tuple[float, float]]
    quiet: int = 0
    """0 for a curve of its own colour; 1 for dashed, 2 for dotted grey."""


@dataclass(frozen=True)
class LineChart:
    """A chart of curves."""

    curves: Sequence[ChartCurve]
    x_name: str
    y_name: str
    label: str
    """Read aloud."""
    say: Callable[[float], str] = plain
    """A value, in tips."""
    scale: Callable[[float], str] = plain
    """A value, on the scale."""
    whole_x: bool = False
    zero: bool = False
    """Whether 0 is to be on the scale, with a line of its own."""

    def __call__(self, width: float) -> str:
        """Draw it."""
        left, right, gap = 52.0, 18.0, 24.0
        entries = [(curve.label, *self._look(number)) for number, curve in enumerate(self.curves)]
        body, top = key(entries, width - right, 4)
        height = top + gap + (210 if width <= NARROW else 260) + 44
        bottom = height - 44
        xs = [x for curve in self.curves for x, _ in curve.points]
        ys = [y for curve in self.curves for _, y in curve.points if isfinite(y)]
        across, up = self._across(xs, width), self._up(ys)

        def at(x: float, y: float) -> tuple[float, float]:
            return (
                left + (x - across[0]) / (across[-1] - across[0]) * (width - left - right),
                bottom - (y - up[0]) / (up[-1] - up[0]) * (bottom - top - gap),
            )

        body.append(text(4, top + 10, self.y_name, kind="name"))
        for value in up:
            _, y = at(across[0], value)
            body.append(line(left, y, width - right, y, "zero" if self.zero and value == 0 else "grid"))
            body.append(text(left - 8, y + 4, self.scale(value), kind="tick", anchor="end"))
        for value in across:
            x, _ = at(value, up[0])
            body.append(text(x, bottom + 20, plain(value), kind="tick", anchor="middle"))
        body.append(text((left + width - right) / 2, height - 6, self.x_name, kind="name", anchor="middle"))
        body.extend(self._drawn(at))
        return svg(width, height, body, self.label)

    def _across(self, xs: Sequence[float], width: float) -> list[float]:
        if self.whole_x and max(xs) - min(xs) < 13:
            return [float(x) for x in range(int(min(xs)), max(int(max(xs)), int(min(xs)) + 1) + 1)]
        return ticks(min(xs), max(xs), 4 if width <= NARROW else 6)

    def _up(self, ys: Sequence[float]) -> list[float]:
        """The scale of values; what is hardly below 0 does not make it longer."""
        low, high = min(ys), max(ys)
        if self.zero:
            low = 0.0 if low > -0.1 * abs(high) else low
            high = max(high, 0.0)
        return ticks(low, high)

    def _drawn(self, at: Callable[[float, float], tuple[float, float]]) -> list[str]:
        body: list[str] = []
        order = sorted(range(len(self.curves)), key=lambda number: -self.curves[number].quiet)
        for number in order:
            curve, (shape, kind) = self.curves[number], self._look(number)
            there = [(x, y) for x, y in curve.points if isfinite(y)]
            body.append(polyline([at(*point) for point in there], f"curve {kind}"))
            for x, y in there:
                tip = f"{curve.label}: {self.say(y)} at {self.x_name} {plain(round(x, 4))}"
                body.append(mark(*at(x, y), "circle" if shape == "line" else shape, f"mark {kind}", tip))
        return body

    def _look(self, number: int) -> tuple[str, str]:
        """The shape and the class of a curve."""
        curve = self.curves[number]
        if curve.quiet:
            return "line", f"quiet{curve.quiet}"
        place = sum(not other.quiet for other in self.curves[:number])
        kind = f"c{place % COLOURS}" + (" again" if place >= COLOURS else "")
        return MARKS[place % len(MARKS)], kind
