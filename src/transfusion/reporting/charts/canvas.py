"""The canvas: pieces of SVG as text. Colours are classes, which the page's style gives their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import floor, isfinite, log10

WIDE, NARROW = 960, 330
"""The widths that every figure is drawn in: on a desk, and on a phone."""
COLOURS = 6
MARKS = ("circle", "square", "triangle", "diamond", "drop", "cross")
"""Told apart without colours."""


def svg(width: float, height: float, body: Iterable[str], label: str) -> str:
    """A drawing with a name that is read aloud."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg {size} role="img" tabindex="0" aria-label="{escape(label)}">{"".join(body)}</svg>'


def text(x: float, y: float, words: str, *, kind: str = "label", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "", style: str = "") -> str:
    tipped = f' data-tip="{escape(tip)}"' if tip else ""
    styled = f' style="{style}"' if style else ""
    size = f'width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{kind}"{tipped}{styled}/>'


def polyline(points: Sequence[tuple[float, float]], kind: str) -> str:
    info = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{info}" class="{kind}"/>'


def mark(x: float, y: float, shape: str, kind: str, tip: str = "", size: float = 4.2) -> str:
    """A sign at a place, with what it says when it is pointed at."""
    s = size
    paths = {
        "circle": f"M{-s} 0a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 {-2 * s} 0z",
        "square": f"M{-s} {-s}h{2 * s}v{2 * s}h{-2 * s}z",
        "triangle": f"M0 {-1.2 * s}L{1.15 * s} {0.9 * s}H{-1.15 * s}z",
        "diamond": f"M0 {-1.35 * s}L{1.35 * s} 0L0 {1.35 * s}L{-1.35 * s} 0z",
        "drop": f"M0 {1.2 * s}L{1.15 * s} {-0.9 * s}H{-1.15 * s}z",
        "cross": f"M{-s} {-s}L{s} {s}M{-s} {s}L{s} {-s}",
    }
    tipped = f' data-tip="{escape(tip)}"' if tip else ""
    return f'<path d="{paths[shape]}" transform="translate({x:.1f} {y:.1f})" class="{kind}"{tipped}/>'


def key(entries: Sequence[tuple[str, str, str]], width: float, left: float = 0) -> tuple[list[str], float]:
    """What the signs mean: (words, shape or "line", class), on as many lines as it takes; their height."""
    body: list[str] = []
    x, y = left, 12.0
    for words, shape, kind in entries:
        room = 26 + 6.6 * len(words)
        if x > left and x + room > width:
            x, y = left, y + 19
        body.append(line(x, y - 4, x + 16, y - 4, f"curve {kind}"))
        if shape != "line":
            body.append(mark(x + 8, y - 4, shape, f"mark {kind}"))
        body.append(text(x + 22, y, words, kind="key"))
        x += room + 8
    return body, y + 8


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from below ``low`` to above ``high``."""
    if not (isfinite(low) and isfinite(high)):
        raise ValueError(f"{low} and {high} are no ends of a scale")
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough - 1e-12)
    first, last = floor(low / step + 1e-9), -floor(-high / step + 1e-9)
    return [round(step * number, 10) for number in range(first, last + 1)]


def plain(value: float) -> str:
    """A number on a scale."""
    return f"{value:g}".replace("-", "−")
