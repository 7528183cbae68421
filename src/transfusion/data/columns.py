"""Columns of a table: which ones hold texts, images and classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

from transfusion.data.examples import Columns, Examples
from transfusion.data.image_files import ImageFile
from transfusion.data.known_tasks import known_task
from transfusion.errors import DataError, listing

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
    task = known_task(label, names)
    wanted = [*asked.text, *(one for one in (asked.image, asked.label) if one)]
    if missing := [one for one in wanted if one not in names]:
        raise DataError(
            f"{label}: no column {listing(missing)}; there are {listing(names, 20)}",
            hint="name the columns with `text`, `image` and `label`",
        )
    text = asked.text or (task.text if task else ())
    image = asked.image
    if not text and image is None:
        image = next(iter(images), None) or next((one for one in IMAGES if one in names), None)
        text = next((one for one in TEXTS if all(part in names for part in one)), ()) if not image else ()
    if not text and image is None:
        raise DataError(
            f"{label}: no column of texts or images that has a usual name; there are {listing(names, 20)}",
            hint="name the columns with `text` or `image`",
        )
    label_column = asked.label or next((one for one in LABELS if one in names), None)
    return Examples(
        label,
        images=None if image is None else _images(label, image, column(image), beside),
        texts=None if image is not None else _texts(label, text, column),
        labels=None if label_column is None else _labels(label, label_column, column(label_column)),
        names=(classes or {}).get(label_column or "") or (task.classes if task else None),
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


def _images(label: str, name: str, values: Sequence[Any], beside: Path | None) -> list[ImageFile]:
    return [
        _image(f"{label}, example {number}", name, value, beside) for number, value in enumerate(values, 1)
    ]


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
        if value is None or value != value or (isinstance(value, str) and not value.strip()):
            raise DataError(
                f"{label}: example {number} has no label in the column {name}",
                hint="leave the example out, or choose another column with `label`",
            )
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and abs(value) >= 2**63:
            raise DataError(
                f"{label}: example {number} has a number in the column {name} that is too large for a class",
                hint="give the number or the name of a class",
            )
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise DataError(
                f'{label}: example {number} has "{value}" in the column {name}, which is not a class',
                hint="give the number or the name of a class",
            )
        found.append(value)
    if all(isinstance(one, str) and _WHOLE.fullmatch(one.strip()) for one in found):
        return [int(str(one).partition(".")[0]) for one in found]
    return found
