"""The parts of a page as data; the templates turn them into HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from markupsafe import Markup

from transfusion.report.charts.page_svg import NARROW, WIDE


@dataclass(frozen=True)
class PageTable:
    """A table. Columns from ``numbers`` on are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    numbers: int = 1
    strong: int | None = None
    """The row that the report is about."""
    part: ClassVar[str] = "table"


@dataclass(frozen=True)
class PageFigure:
    """A chart with its table of numbers and its caption."""

    id: str
    title: str
    draw: Callable[[float], str] = field(repr=False)
    table: PageTable
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
    """Figures of which one is shown at a time."""

    id: str
    label: str
    tabs: Sequence[tuple[str, PageFigure]]
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
    quiet: bool = False
    part: ClassVar[str] = "prose"


@dataclass(frozen=True)
class Command:
    """A command line with a button to copy it."""

    text: str
    what: str = ""
    part: ClassVar[str] = "command"


Part: TypeAlias = PageTable | PageFigure | Tabs | Facts | Prose | Command


@dataclass(frozen=True)
class PageSection:
    """A part of the page with a heading."""

    id: str
    title: str
    lead: str
    parts: Sequence[Part]
    short: str = ""
    """The name in the list of contents."""

    @property
    def name(self) -> str:
        return self.short or self.title


@dataclass(frozen=True)
class Number:
    """One of the main numbers."""

    value: str
    name: str
    note: str = ""
    mood: str = ""
    """``good``, ``fair``, ``bad`` or nothing."""


@dataclass(frozen=True)
class Hero:
    """The head of the page."""

    title: str
    summary: str
    stations: Sequence[tuple[str, str, str]]
    """A, τ, π and B: symbol, name and explanation."""
    verdict: str
    advice: str
    mood: str
    numbers: Sequence[Number]
    strands: PageFigure | None = None
    next_steps: Sequence[str] = ()
    """What to try, if the result should not be relied upon as it is."""
    terms: Sequence[tuple[str, str]] = ()
    """Words of the page with their meanings."""
