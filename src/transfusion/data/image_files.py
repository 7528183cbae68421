"""Pictures, which are opened when somebody looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from transfusion.errors import DataError
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.untrusted_files import path_inside, require_regular

PICTURES = frozenset([".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"])
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")
"""What a file may hold, whatever it is called; others that Pillow knows call other programs."""
LARGEST = 2**27
"""So many pixels an image may have."""


@dataclass(frozen=True)
class ImageFile:
    """An image in a file, or the bytes of one."""

    name: str
    source: Path | bytes

    @classmethod
    def at(cls, file: Path, folder: Path | None = None) -> ImageFile:
        """The picture in a regular file, which must lie inside the folder if one is given."""
        if folder is not None:
            path_inside(folder, file, DataError)
        return cls(str(file), require_regular(file, DataError))

    def opened(self, mode: str = "RGB") -> Any:
        """The image as Pillow has it, in this mode."""
        pillow = require_library("PIL.Image", "images")
        source = self.source if isinstance(self.source, Path) else BytesIO(self.source)
        try:
            with pillow.open(source, formats=FORMATS) as found:
                if (pixels := found.width * found.height) > LARGEST:
                    raise ValueError(f"{pixels} pixels, and at most {LARGEST} are looked at")
                return found.convert(mode)
        except Exception as error:  # Pillow raises whatever it likes at a file that is not whole
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"{self.name}: cannot be read as an image ({reason})", hint="remove or mend it"
            ) from error


def image_files_below(folder: Path) -> list[Path]:
    """The files of images in a folder and the folders in it, by name; none that is hidden."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in PICTURES)
    return sorted(file for file in found if not file.name.startswith("."))
