"""The parts of a page as data, of which the template makes HTML, and the formats of numbers and names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from markupsafe import Markup

from transfusion.report.charts import NARROW, WIDE

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
    """A table. The first column is text, the others are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    strong: int | None = None
    """The row that the report is about."""
    part: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A chart with its table of numbers and its caption."""

    id: str
    title: str
    draw: Callable[[float], str] = field(repr=False)
    table: Table
    caption: str = ""
    opened: bool = False
    """Whether the table is open at first."""
    part: ClassVar[str] = "figure"

    @property
    def wide(self) -> Markup:
        """The chart for a desk. Its texts are escaped by the chart."""
        return Markup(self.draw(WIDE))

    @property
    def narrow(self) -> Markup:
        """The chart for a phone."""
        return Markup(self.draw(NARROW))


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
class Prose:
    """A paragraph."""

    text: str
    part: ClassVar[str] = "prose"


@dataclass(frozen=True)
class Command:
    """A command line with a button to copy it."""

    text: str
    what: str = ""
    part: ClassVar[str] = "command"


Part: TypeAlias = Table | Figure | Tabs | Facts | Prose | Command


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


@dataclass(frozen=True)
class Hero:
    """The head of the page."""

    title: str
    summary: str
    stations: Sequence[tuple[str, str, str]]
    """A, τ, π and B: symbol, name and explanation."""
    verdict: str
    mood: str
    """Of the verdict: ``good``, ``fair``, ``bad`` or nothing."""
    numbers: Sequence[Number]
    strands: Figure | None
    next_steps: Sequence[str]
    """What to try, if the result should not be relied upon as it is."""
    terms: Sequence[tuple[str, str]]
    """Words of the page with their meanings."""


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


def number(value: float | None) -> str:
    """Format a number."""
    if value is None:
        return "–"
    if value and abs(value) < 1e-3:
        return f"{value:.2g}".replace("-", "−")
    return f"{value:.3f}".replace("-", "−") if abs(value) < 100 else f"{value:,.1f}".replace("-", "−")


def two_digits(value: float) -> str:
    """Format a number with two digits after the point."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def brief(value: float) -> str:
    """Format a number with three digits, as on a scale."""
    return f"{round(value, 10) + 0.0:.3g}".replace("-", "−")


def percent(value: float | None, digits: int = 0) -> str:
    """Format a share in percent."""
    return "–" if value is None else f"{round(100 * value, digits) + 0.0:.{digits}f} %".replace("-", "−")


def tenths(value: float | None) -> str:
    """Format a share in percent, with one digit after the point."""
    return percent(value, 1)


def measured(value: float | None, metric: str) -> str:
    """Format a score: rates in percent, losses as numbers."""
    return tenths(value) if metric in RATES else number(value)


def gained(value: float | None, metric: str) -> str:
    """Format a gain with its sign: in points for rates, as a number for losses."""
    digits = 1 if metric in RATES else 3
    return "–" if value is None else f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−")


def between(interval: Sequence[float], metric: str, shown: Callable[[float, str], str]) -> str:
    """Format a confidence interval of a score or a gain."""
    return " to ".join(shown(bound, metric) for bound in interval)


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
