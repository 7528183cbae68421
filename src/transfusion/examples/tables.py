"""Tables of examples: texts line by line, CSV, JSON lines and parquet, read into columns."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transfusion.errors import DataError, listing
from transfusion.live import library

TABLES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
TEXT = "text"


@dataclass(frozen=True)
class Table:
    """Columns of one length, by name."""

    label: str
    columns: dict[str, list[Any]]

    @classmethod
    def read(cls, path: Path, asked: tuple[str, ...] = ()) -> Table:
        """A file of rows; what was ``asked`` for by name is a column's name and no text."""
        if path.suffix == ".parquet":
            return cls(str(path), _parquet(path))
        if path.suffix == ".txt":
            return cls(str(path), {TEXT: [line for line in _content(path).splitlines() if line.strip()]})
        if path.suffix == ".jsonl":
            return cls(str(path), _of_objects(path))
        grid = _grid(path)
        head = grid[0] if grid else []
        if len(head) == 1 and head[0] not in (TEXT, *asked):
            return cls(str(path), {TEXT: [row[0] for row in grid if row]})
        return cls(str(path), _of_grid(path, grid))


def lines(path: Path) -> Iterator[str]:
    """The texts of a file, of which nobody says where they are: one a line, or what is called text."""
    if path.suffix == ".txt":
        yield from _content(path).splitlines()
    elif path.suffix == ".jsonl":
        yield from (_text_of(path, number, value) for number, value in _objects(path))
    elif path.suffix == ".parquet":
        yield from _only_text(path, _parquet(path))
    else:
        yield from _text_column(path, _grid(path))


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error})", hint="save it as UTF-8") from error


# ── JSON lines ───────────────────────────────────────────────────────────────────────────────


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """What every line says, with its number."""
    for number, line in enumerate(_content(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}: line {number} is not JSON ({error})", hint="one object a line"
            ) from error


def _of_objects(path: Path) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for place, (number, value) in enumerate(_objects(path)):
        row = {TEXT: value} if isinstance(value, str) else value
        if not isinstance(row, dict) or (place and row.keys() != columns.keys()):
            what = "is no object" if not isinstance(row, dict) else f"has {listing(row)}"
            kept = f", and the first line has {listing(columns)}" if place else ""
            raise DataError(f"{path}: line {number} {what}{kept}", hint="the same fields in every line")
        for name, one in row.items():
            columns.setdefault(name, []).append(one)
    return columns


def _text_of(path: Path, number: int, found: Any) -> str:
    """The text of a line: itself, its field "text", or its only field that is a text."""
    if isinstance(found, str):
        return found
    fields = found if isinstance(found, dict) else {}
    written = [key for key, value in fields.items() if isinstance(value, str)]
    chosen = TEXT if TEXT in written else written[0] if len(written) == 1 else None
    if chosen is None:
        told = f"several texts ({listing(written)})" if written else "no text"
        raise DataError(f'{path}: line {number} has {told}, and no "text"', hint='name the field "text"')
    return str(fields[chosen])


# ── CSV ──────────────────────────────────────────────────────────────────────────────────────


def _grid(path: Path) -> list[list[str]]:
    """The cells; in a .tsv quotes are letters like others, as in GLUE's files."""
    rows = _content(path).splitlines(keepends=True)
    csv.field_size_limit(2**31 - 1)
    if path.suffix == ".tsv":
        return list(csv.reader(rows, delimiter="\t", quoting=csv.QUOTE_NONE))
    return list(csv.reader(rows))


def _of_grid(path: Path, grid: list[list[str]]) -> dict[str, list[Any]]:
    head, rows = (grid[0], grid[1:]) if grid else ([], [])
    for number, row in enumerate(rows, 2):
        if row and len(row) != len(head):
            raise DataError(
                f"{path}: row {number} has {len(row)} cells, and there are {len(head)} columns",
                hint="put cells with commas between quotes",
            )
    return {name: [row[place] for row in rows if row] for place, name in enumerate(head)}


def _text_column(path: Path, rows: list[list[str]]) -> Iterator[str]:
    """The column "text", or the only one."""
    head = rows[0] if rows else []
    if TEXT in head:
        place, rows = head.index(TEXT), rows[1:]
    elif len(head) == 1:
        place = 0
    elif head:
        raise DataError(f'{path}: no column "text" among {listing(head)}', hint='name the column "text"')
    yield from (row[place] for row in rows if len(row) > place)


# ── parquet ──────────────────────────────────────────────────────────────────────────────────


def _parquet(path: Path) -> dict[str, list[Any]]:
    try:
        table = library("pyarrow.parquet", "data").read_table(path)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: cannot be read as parquet ({reason})", hint="write it again") from error
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _only_text(path: Path, columns: dict[str, list[Any]]) -> list[str]:
    written = [name for name, values in columns.items() if all(isinstance(one, str) for one in values)]
    chosen = TEXT if TEXT in written else written[0] if len(written) == 1 else None
    if chosen is None:
        raise DataError(f'{path}: no column "text" among {listing(columns)}', hint='name the column "text"')
    return columns[chosen]
