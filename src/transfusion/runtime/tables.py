"""Tables of rich: names and values, rows of numbers, and lines below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text


def columns(*names: str, framed: bool = False) -> Table:
    """Return an empty table: its first column is text, the others are numbers."""
    table = Table() if framed else Table(box=None, header_style="bold")
    for place, name in enumerate(names):
        table.add_column(Text(name), justify="right" if place else "left")
    return table


def facts(rows: Mapping[str, str]) -> Table:
    """Return names and values, one per line; empty values are left out."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            table.add_row(Text(name, style="bold"), Text(value))
    return table


def noted(table: Table, lines: Sequence[str]) -> Group:
    """Return a table with lines below it."""
    return Group(table, Text("\n".join(lines), style="dim"))
