"""The parts of a page as data, of which the template makes HTML, and the formats of numbers and names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from markupsafe import Markup

WIDE, NARROW = 960, 330
"""The widths in pixels that every chart is drawn in: for a desk and for a phone."""
RATES = ("accuracy", "matthews", "f1")
"""Metrics that are shown in percent; of all others, less is better."""
AXES = {
    "x": "stream before attention",
    "y": "stream before the MLP",
    "stream": "residual stream",
    "head": "attention heads",
    "group": "groups of heads",
    "rep": "heads within a group",
    "qk": "queries and keys",
    "vo": "values",
    "ffn": "MLP neurons",
    "expert": "experts",
    "cross_head": "heads of cross-attention",
    "cross_qk": "queries and keys of cross-attention",
    "cross_vo": "values of cross-attention",
}
"""Names of common axes on the page."""


@dataclass(frozen=True)
class Table:
    """A table. The first column is text, the others are numbers; ``strong`` is the row of this run."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    strong: int | None = None
    part: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A chart with its table of numbers, which is ``opened`` or folded, and its caption."""

    id: str
    title: str
    draw: Callable[[float], str] = field(repr=False)
    """Returns the chart as SVG, with all texts escaped, for a width in pixels."""
    table: Table
    caption: str = ""
    opened: bool = False
    part: ClassVar[str] = "figure"

    @property
    def drawings(self) -> dict[str, Markup]:
        """The chart for a desk and for a phone, by CSS class."""
        return {"wide": Markup(self.draw(WIDE)), "narrow": Markup(self.draw(NARROW))}


@dataclass(frozen=True)
class Tabs:
    """Figures of which one is shown at a time, each with the name of its tab."""

    id: str
    label: str
    tabs: Sequence[tuple[str, Figure]]
    part: ClassVar[str] = "tabs"


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    rows: Sequence[tuple[str, str]]
    part: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Command:
    """A command line with a button to copy it."""

    text: str
    what: str = ""
    part: ClassVar[str] = "command"


Part: TypeAlias = Table | Figure | Tabs | Facts | Command | str
"""A string is a paragraph."""


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading, and its name in the list of contents."""

    id: str
    name: str
    title: str
    lead: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Number:
    """One of the main numbers; its mood is ``good``, ``bad`` or nothing."""

    value: str
    name: str
    note: str = ""
    mood: str = ""


# ── names ────────────────────────────────────────────────────────────────────────────────────


def layer_of(id: str) -> int | None:
    """Return the number of the block of an axis or a tensor, if it has one."""
    found = re.search(r"(?:^|\.)(\d+)\.", id)
    return int(found[1]) if found else None


def kind_of(id: str) -> str:
    """Return an axis without its block: ``layer.3.head`` is ``head``, ``encoder.3.qk`` is ``encoder.qk``."""
    stack, _, axis = id.rpartition(".")
    stack = re.sub(r"\.?\d+$", "", stack)
    return axis if stack in ("", "layer") else f"{stack}.{axis}"


def axis_name(kind: str) -> str:
    """Return the name of a kind of axis on the page."""
    stack, _, axis = kind.rpartition(".")
    words = AXES.get(axis, axis)
    return f"{words} ({stack})" if stack else words


def short(name: object) -> str:
    """Return the last part of a path or hub id."""
    return str(name).rstrip("/").rsplit("/", 1)[-1]


def capital(text: str) -> str:
    """Return a text with a capital letter first."""
    return text[:1].upper() + text[1:]


def listed(items: Iterable[str]) -> str:
    """Join items as in "A, B and C"."""
    *rest, last = list(items) or [""]
    return f"{', '.join(rest)} and {last}" if rest else last


# ── numbers ──────────────────────────────────────────────────────────────────────────────────


def shown(value: float | None, format: str) -> str:
    """Format a number with a proper minus sign, and no sign before a zero that rounding made."""
    if value is None:
        return "–"
    text = f"{value:{format}}"
    return (f"{0.0:{format}}" if float(text.replace(",", "")) == 0 else text).replace("-", "−")


def number(value: float | None) -> str:
    """Format a number with three digits after the point; a tiny or large one with two or one."""
    size = abs(value or 0)
    return shown(value, ".2g" if 0 < size < 1e-3 else ".3f" if size < 100 else ",.1f")


def two_digits(value: float) -> str:
    """Format a number with two digits after the point."""
    return shown(value, ".2f")


def brief(value: float) -> str:
    """Format a number with three digits, as on a scale."""
    return shown(round(value, 10), ".3g")


def percent(value: float | None, digits: int = 0) -> str:
    """Format a share in percent."""
    return "–" if value is None else f"{shown(100 * value, f'.{digits}f')} %"


def tenths(value: float | None) -> str:
    """Format a share in percent, with one digit after the point."""
    return percent(value, 1)


def measured(value: float | None, metric: str) -> str:
    """Format a score: rates in percent, losses as numbers."""
    return tenths(value) if metric in RATES else number(value)


def gained(value: float | None, metric: str) -> str:
    """Format a gain with its sign: in points for rates, as a number for losses."""
    return shown(value, "+.1f" if metric in RATES else "+.3f")


def between(interval: Sequence[float], metric: str, format: Callable[[float, str], str]) -> str:
    """Format a confidence interval of a score or a gain."""
    return " to ".join(format(bound, metric) for bound in interval)


def gain_unit(metric: str) -> str:
    """Return the unit of a metric's gains."""
    return "points" if metric in RATES else f"{metric}, less is better"


def seconds(value: float) -> str:
    """Format a time."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
