"""Raw examples: images or texts with labels, before a model's preparation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from transfusion.errors import DataError, reason_of
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.untrusted_files import path_inside, require_regular

IMAGE_SUFFIXES = frozenset([".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"])
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")
"""The formats that may be decoded; for others Pillow may start other programs."""
MAX_PIXELS = 2**27


@dataclass(frozen=True)
class ImageFile:
    """An image in a file, or the bytes of one."""

    name: str
    source: Path | bytes

    @classmethod
    def at(cls, file: Path, folder: Path | None = None) -> ImageFile:
        """Return the image in a regular file; refuse a file outside of ``folder``, if one is given."""
        if folder is not None:
            path_inside(folder, file, DataError)
        return cls(str(file), require_regular(file, DataError))

    def opened(self, mode: str = "RGB") -> Any:
        """Open the image with Pillow and convert it to this mode."""
        pillow = require_library("PIL.Image", "images")
        source = self.source if isinstance(self.source, Path) else BytesIO(self.source)
        pillow.init()  # registers all formats that this Pillow was built with
        try:
            with pillow.open(source, formats=[one for one in IMAGE_FORMATS if one in pillow.OPEN]) as found:
                if (pixels := found.width * found.height) > MAX_PIXELS:
                    raise ValueError(f"{pixels} pixels, and at most {MAX_PIXELS} are read")
                return found.convert(mode)
        except Exception as error:  # Pillow raises many types for a damaged file
            unknown = type(error).__name__ == "UnidentifiedImageError"
            reason = "damaged, or of another format than its name says" if unknown else reason_of(error)
            raise DataError(
                f"{self.name}: cannot be read as an image ({reason})", hint="remove or repair the file"
            ) from error


def find_images(folder: Path, within: Path | None = None) -> list[Path]:
    """Return the image files in a folder and its sub-folders, sorted; hidden files are left out.

    Refuse links that lead out of ``within``, by default out of the folder.
    """
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    shown = sorted(file for file in found if not file.name.startswith("."))
    return [path_inside(within or folder, file, DataError) for file in shown]


Pair = tuple[str, ...]
"""One text, or a pair of texts."""


@dataclass(frozen=True)
class Columns:
    """The columns that the user named."""

    text: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.text, *(one for one in (self.image, self.label) if one))


@dataclass(frozen=True)
class Examples:
    """Images or texts, and their classes."""

    label: str
    """The source, for messages."""
    images: Sequence[ImageFile] | None = None
    texts: Sequence[Pair] | None = None
    labels: Sequence[int | str] | None = None
    """The class of every example: its number or its name."""
    names: tuple[str, ...] | None = None
    """The class names, in the order of their numbers."""
    task: str | None = None
    """The name of the known task, if it is one."""

    def __post_init__(self) -> None:
        if not len(self):
            raise DataError(f"{self.label}: there are no examples in it", hint="give at least one example")

    def __len__(self) -> int:
        return len(self.images if self.images is not None else self.texts or ())

    def limited(self, count: int | None) -> Examples:
        """Return the first ``count`` examples; of labelled images, equally many of every class."""
        if count is None or count >= len(self):
            return self
        chosen = _balanced(self.labels, count) if self.images is not None and self.labels else range(count)
        lists = {"images": self.images, "texts": self.texts, "labels": self.labels}
        some: dict[str, Any] = {
            name: [values[one] for one in chosen] for name, values in lists.items() if values is not None
        }
        return replace(self, **some)


def _balanced(labels: Sequence[int | str], count: int) -> list[int]:
    """Return the indices of ``count`` examples, taken from the classes in turn."""
    seen: Counter[int | str] = Counter()
    turns: list[tuple[int, int]] = []
    for place, label in enumerate(labels):
        turns.append((seen[label], place))
        seen[label] += 1
    return sorted(place for _, place in sorted(turns)[:count])


# ── tasks of GLUE that are known by name ─────────────────────────────────────────────────────


class KnownTask(NamedTuple):
    """One task."""

    name: str
    text: tuple[str, ...]
    classes: tuple[str, ...]
    """In the order of their numbers."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The main metric first."""


_KNOWN = (
    KnownTask("sst2", ("sentence",), ("negative", "positive")),
    KnownTask("cola", ("sentence",), ("unacceptable", "acceptable"), ("matthews", "accuracy")),
    KnownTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
    KnownTask("rte", ("sentence1", "sentence2"), ("entailment", "not_entailment")),
)
TASKS = {task.name: task for task in _KNOWN}


def known_task(reference: str, columns: Collection[str]) -> KnownTask | None:
    """Return the task that the last two parts of a path or hub id name, if its columns exist."""
    tail = "/".join(reference.lower().replace("_", "-").replace("\\", "/").rstrip("/").split("/")[-2:])
    fitting = [
        task
        for name, task in TASKS.items()
        if re.search(rf"(?<![a-z0-9]){name.replace('2', '-?2')}(?![a-z0-9])", tail)
        and all(column in columns for column in task.text)
    ]
    return fitting[0] if len(fitting) == 1 else None
