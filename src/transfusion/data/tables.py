"""Tables of examples: text lines, CSV, JSON lines and parquet, and the columns of texts, images and classes.

The library ``datasets`` is not used here. It copies every file into a cache, renames a repeated column, fills
missing cells and takes semicolons for text; here each of these is refused by name.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from os.path import isfile
from pathlib import Path
from typing import Any

from transfusion.data.examples import Columns, Examples, ImageFile, known_task
from transfusion.errors import DataError, listing, reason_of
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.untrusted_files import parse_json, require_regular

TABLES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
TEXT = "text"
LABELS = ("label", "labels", "class", "target")
IMAGES = ("image", "img", "image_path", "path", "file", "file_name", "filename")
TEXTS = (
    ("text",),
    ("sentence",),
    ("question1", "question2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
)
_WHOLE = re.compile(r"-?[0-9]{1,18}(\.0*)?")
"""A whole number as text; some programs write 1.0."""
Column = Callable[[str], Sequence[Any]]
_LINE_END = re.compile(r"\r\n|\n|\r")


def read_table(path: Path, asked: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Return the columns of a file. A single cell in the first row is a name only if it is in ``asked``."""
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".txt":
        return {TEXT: [line for line in _lines(path) if line.strip()]}
    found = _json_lines(path) if path.suffix == ".jsonl" else _grid(path, asked)
    if not found:
        raise DataError(f"{path}: the file is empty", hint="give a file with at least one example")
    return found


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file: its lines, its column "text", or its only column of texts."""
    columns = read_table(path)
    texts = {name: values for name, values in columns.items() if all(isinstance(v, str) for v in values)}
    chosen = TEXT if TEXT in texts else next(iter(texts)) if len(texts) == 1 else None
    if chosen is None:
        raise DataError(f'{path}: no column "text" among {listing(columns)}', hint='name the column "text"')
    return texts[chosen]


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


def _json_lines(path: Path) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line, "", DataError)
        except DataError as error:
            reason = error.message.partition("(")[2]
            raise DataError(
                f"{path}: line {number} is not JSON ({reason}", hint="one object a line"
            ) from error
        row = {TEXT: value} if isinstance(value, str) else value
        if not isinstance(row, dict) or (columns and row.keys() != columns.keys()):
            what = f"has {listing(row)}" if isinstance(row, dict) else "is no object"
            kept = f", and the first line has {listing(columns)}" if columns else ""
            raise DataError(f"{path}: line {number} {what}{kept}", hint="the same fields in every line")
        for name, one in row.items():
            columns.setdefault(name, []).append(one)
    return columns


# ── CSV ──────────────────────────────────────────────────────────────────────────────────────


def _grid(path: Path, asked: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the columns by the names in the first row; a single unnamed column holds texts.

    In a .tsv quotes have no meaning, as in GLUE's files.
    """
    csv.field_size_limit(2**31 - 1)
    text, tabs = StringIO(_content(path), newline=""), path.suffix == ".tsv"
    reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(text)
    try:
        rows = [(number, row) for number, row in enumerate(reader, 1) if row]
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read as a table ({error})", hint="write it again") from error
    if not rows:
        return {}
    if not tabs:
        _refuse_other_separators(path, [",".join(row) for _, row in rows])
    head = rows[0][1]
    if len(head) == 1 and head[0] not in (TEXT, *asked):
        head = [TEXT]
    else:
        rows = rows[1:]
    _refuse_repeated(path, head)
    for number, row in rows:
        if len(row) != len(head):
            columns = "is 1 column" if len(head) == 1 else f"are {len(head)} columns"
            raise DataError(
                f"{path}: row {number} has {len(row)} cells, and there {columns}",
                hint="put cells with commas between quotes",
            )
    return {name: [row[place] for _, row in rows] for place, name in enumerate(head)}


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
        raise DataError(
            f"{path}: cannot be read as parquet ({reason_of(error)})", hint="write it again"
        ) from error


# ── columns ──────────────────────────────────────────────────────────────────────────────────


def examples_of(
    label: str,
    names: Sequence[str],
    column: Column,
    asked: Columns,
    *,
    beside: Path | None = None,
    classes: Mapping[str, tuple[str, ...]] | None = None,
    images: Sequence[str] = (),
) -> Examples:
    """Build examples from the columns that were asked for, or that have a usual name.

    Paths of images are relative to ``beside``. ``classes`` are the class names of columns that hold numbers,
    and ``images`` the columns that are known to hold images.
    """
    if missing := [one for one in asked.all if one not in names]:
        raise DataError(
            f"{label}: no column {listing(missing)}; there are {listing(names, 20)}",
            hint="name the columns with `text`, `image` and `label`",
        )
    task, image = known_task(label, names), asked.image
    text = asked.text or (task.text if task else ())
    if not text and image is None:
        image = next((one for one in (*images, *IMAGES) if one in names), None)
        text = next((one for one in TEXTS if all(part in names for part in one)), ()) if not image else ()
    if not text and image is None:
        raise DataError(
            f"{label}: no column of texts or images that has a usual name; there are {listing(names, 20)}",
            hint="name the columns with `text` or `image`",
        )
    of_labels = asked.label or next((one for one in LABELS if one in names), None)
    cells = () if image is None else enumerate(column(image), 1)
    shown = [_image(f"{label}, example {number}", str(image), cell, beside) for number, cell in cells]
    return Examples(
        label,
        images=None if image is None else shown,
        texts=None if image is not None else _texts(label, text, column),
        labels=None if of_labels is None else _labels(label, of_labels, column(of_labels)),
        names=(classes or {}).get(of_labels or "") or (task.classes if task else None),
        task=task.name if task else None,
    )


def _texts(label: str, names: tuple[str, ...], column: Column) -> list[tuple[str, ...]]:
    if len(names) > 2:
        raise DataError(f"{label}: {len(names)} columns of texts", hint="give one, or two for pairs")
    rows = list(zip(*(column(name) for name in names), strict=True))
    for number, row in enumerate(rows, 1):
        for name, one in zip(names, row, strict=True):
            if not isinstance(one, str):
                raise DataError(
                    f"{label}: example {number} has {type(one).__name__} in the column {name}, not a text",
                    hint="name the columns of texts with `text`",
                )
    return rows


def _image(label: str, name: str, value: Any, beside: Path | None) -> ImageFile:
    """Return the image of a cell: a path, bytes, or either in an object, as ``datasets`` writes it."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return ImageFile(label, value)
    if isinstance(value, str) and value:
        path = Path(value)
        path = path if path.is_absolute() or beside is None else beside / path
        if not isfile(path):
            raise DataError(f"{label}: no image {path}", hint="paths are relative to the file that has them")
        return ImageFile.at(path, beside)
    raise DataError(f"{label}: no image in the column {name}", hint="give paths of files, or their bytes")


def _labels(label: str, name: str, values: Sequence[Any]) -> list[int | str]:
    """Return class numbers or class names; numbers may be written as text, as in CSV."""
    found: list[int | str] = []
    for number, value in enumerate(values, 1):
        example = f"{label}: example {number} has"
        if value is None or value != value or (isinstance(value, str) and not value.strip()):
            raise DataError(
                f"{example} no label in the column {name}",
                hint="leave the example out, or choose another column with `label`",
            )
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        large = isinstance(value, int) and abs(value) >= 2**63
        if large or isinstance(value, bool) or not isinstance(value, int | str):
            wrong = f'"{value}" in the column {name}, which is not a class'
            too_large = f"a number in the column {name} that is too large for a class"
            raise DataError(
                f"{example} {too_large if large else wrong}", hint="give the number or the name of a class"
            )
        found.append(value)
    if all(isinstance(one, str) and _WHOLE.fullmatch(one.strip()) for one in found):
        return [int(str(one).partition(".")[0]) for one in found]
    return found
