"""Tables of examples: text lines, CSV, JSON lines and parquet, read into columns.

The library ``datasets`` is not used here. It copies every file into a cache, renames a repeated column, fills
missing cells and takes semicolons for text; here each of these is refused by name.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from transfusion.errors import DataError, listing
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.untrusted_files import parse_json, require_regular

TABLES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
TEXT = "text"
_LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class ExampleTable:
    """Columns of one length, by name."""

    label: str
    columns: dict[str, list[Any]]

    @classmethod
    def read(cls, path: Path, asked: tuple[str, ...] = ()) -> ExampleTable:
        """Read a file. A single cell in the first row is a column name only if it is in ``asked``."""
        if path.suffix == ".parquet":
            return cls(str(path), _parquet(path))
        if path.suffix == ".txt":
            return cls(str(path), {TEXT: [line for line in _lines(path) if line.strip()]})
        found = _of_objects(path) if path.suffix == ".jsonl" else _of_grid(path, _grid(path), asked)
        if not found:
            raise DataError(f"{path}: the file is empty", hint="give a file with at least one example")
        return cls(str(path), found)


def read_texts(path: Path) -> Iterator[str]:
    """Iterate over the texts of a file: its lines, its column "text", or its only column of texts."""
    if path.suffix == ".txt":
        yield from _lines(path)
    elif path.suffix == ".jsonl":
        yield from (_text_of(path, number, value) for number, value in _objects(path))
    elif path.suffix == ".parquet":
        yield from _only_text(path, _parquet(path))
    else:
        yield from _text_column(path, _grid(path))


def _content(path: Path) -> str:
    try:
        with require_regular(path, DataError).open(encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error})", hint="save it as UTF-8") from error
    if "\0" in text:
        raise DataError(f"{path}: cannot be read as text (it has NUL bytes)", hint="save it as UTF-8")
    return text


def _refuse_repeated(path: Path, names: Sequence[str]) -> None:
    """Refuse a column name that occurs twice: one of the columns would be lost."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path}: several columns are called {listing(twice)}", hint="name every column once")


def _lines(path: Path) -> list[str]:
    """Split at line ends only; other characters that Python splits at belong to the texts."""
    found = _LINE_END.split(_content(path))
    return found if found[-1] else found[:-1]


# ── JSON lines ───────────────────────────────────────────────────────────────────────────────


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Iterate over the values of the lines, with line numbers."""
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            yield number, parse_json(line, "", DataError)
        except DataError as error:
            reason = error.message.partition("(")[2]
            raise DataError(
                f"{path}: line {number} is not JSON ({reason}", hint="one object a line"
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
    """Return the text of a line: its value, its field "text", or its only field that is a text."""
    if isinstance(found, str):
        return found
    fields = found if isinstance(found, dict) else {}
    written = [key for key, value in fields.items() if isinstance(value, str)]
    chosen = TEXT if TEXT in written else written[0] if len(written) == 1 else None
    if chosen is None:
        info = f"several texts ({listing(written)})" if written else "no text"
        raise DataError(f'{path}: line {number} has {info}, and no "text"', hint='name the field "text"')
    return str(fields[chosen])


# ── CSV ──────────────────────────────────────────────────────────────────────────────────────


def _grid(path: Path) -> list[list[str]]:
    """Read the cells. In a .tsv quotes have no meaning, as in GLUE's files."""
    csv.field_size_limit(2**31 - 1)
    text = StringIO(_content(path), newline="")
    tabs = path.suffix == ".tsv"
    reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(text)
    try:
        grid = list(reader)
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read as a table ({error})", hint="write it again") from error
    if not tabs:
        _refuse_other_separators(path, [",".join(row) for row in grid if row])
    return grid


def _refuse_other_separators(path: Path, rows: list[str]) -> None:
    """Refuse a table whose columns are separated by semicolons or tabs instead of commas."""
    if len(rows) < 2 or "," in rows[0]:
        return
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        counts = {row.count(separator) for row in rows}
        if len(counts) == 1 and counts != {0}:
            raise DataError(
                f"{path}: commas were expected between columns, and there are {name}",
                hint="name it .tsv" if separator == "\t" else "write it with commas between columns",
            )


def _of_grid(path: Path, grid: list[list[str]], asked: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the columns by the names in the first row; a single unnamed column holds texts."""
    numbered = [(number, row) for number, row in enumerate(grid, 1) if row]
    if not numbered:
        return {}
    head = numbered[0][1]
    if len(head) == 1 and head[0] not in (TEXT, *asked):
        head = [TEXT]
    else:
        numbered = numbered[1:]
    _refuse_repeated(path, head)
    for number, row in numbered:
        if len(row) != len(head):
            columns = "is 1 column" if len(head) == 1 else f"are {len(head)} columns"
            raise DataError(
                f"{path}: row {number} has {len(row)} cells, and there {columns}",
                hint="put cells with commas between quotes",
            )
    return {name: [row[place] for _, row in numbered] for place, name in enumerate(head)}


def _text_column(path: Path, rows: list[list[str]]) -> Iterator[str]:
    """Iterate over the column "text", or over the only column."""
    head = rows[0] if rows else []
    if TEXT in head:
        _refuse_repeated(path, head)
        place, rows = head.index(TEXT), rows[1:]
    elif len(head) == 1:
        place = 0
    elif head:
        raise DataError(f'{path}: no column "text" among {listing(head)}', hint='name the column "text"')
    yield from (row[place] for row in rows if len(row) > place)


# ── parquet ──────────────────────────────────────────────────────────────────────────────────


def _parquet(path: Path) -> dict[str, list[Any]]:
    parquet = require_library("pyarrow.parquet", "data")
    try:
        _refuse_repeated(path, parquet.read_schema(require_regular(path, DataError)).names)
        table = parquet.read_table(path)
        return {name: table.column(name).to_pylist() for name in table.column_names}
    except DataError:
        raise
    except Exception as error:  # the library raises many types for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: cannot be read as parquet ({reason})", hint="write it again") from error


def _only_text(path: Path, columns: dict[str, list[Any]]) -> list[str]:
    written = [name for name, values in columns.items() if all(isinstance(one, str) for one in values)]
    chosen = TEXT if TEXT in written else written[0] if len(written) == 1 else None
    if chosen is None:
        raise DataError(f'{path}: no column "text" among {listing(columns)}', hint='name the column "text"')
    return columns[chosen]
