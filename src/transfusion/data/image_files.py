"""Image files, which are opened when their batch is prepared."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from transfusion.errors import DataError
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
            text = "damaged, or of another format than its name says" if unknown else str(error)
            reason = (text.splitlines() or [type(error).__name__])[0]
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
