"""Images of signs: letters and symbols of the fonts that come with matplotlib. Nothing is downloaded.

They are for models of one channel, which read digits, scans or drawings. Digits are left out, and so are
those in ² and ½: what a refinement learns from signs is to be more than the digits of a test.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unicodedata import numeric

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, max_pool2d

from transfusion.errors import LibraryError
from transfusion.runtime.optional_libraries import install_hint, require_library

FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSans-Oblique",
    "DejaVuSerif-BoldItalic",
    "DejaVuSansMono",
)
SIGNS = (
    *range(0x3A, 0x7F), *range(0xA1, 0x180), *range(0x391, 0x3C9), *range(0x410, 0x450), *range(0x531, 0x557),
    *range(0x10D0, 0x10F1), *range(0x2190, 0x21A0), *range(0x2200, 0x2250), *range(0x25A0, 0x2610),
)  # fmt: skip
"""Latin, Greek, Cyrillic, Armenian and Georgian letters, arrows, and symbols of mathematics and shape."""
SIDE, MARGIN = 48, 4
"""The side of a sign in memory, and the room around it."""
SMALLEST, LARGEST = 0.5, 1.2
"""The size of a sign, as a share of the image."""
STRETCH, ANGLE, SHEAR, OFF = 0.3, 0.3, 0.3, 0.25
"""The largest change of the aspect, as a logarithm; the largest turn in radians, slant, and way from the
centre.
"""
SLANTED = 1 / 2
"""The share of signs that are slanted."""
THICK = 1 / 3
"""The share of signs with thick lines; half of these are thicker."""
SECOND = 1 / 3
"""The share of images with two signs."""
PLAIN = 1 / 2
"""The share of images whose sign is white on black or black on white; others have any two shades."""


def has_signs() -> bool:
    """Return whether there are fonts and Pillow to draw them; nothing is imported."""
    return find_spec("PIL") is not None and bool(_fonts())


def _fonts() -> list[Path]:
    spec = find_spec("matplotlib")
    folders = (spec and spec.submodule_search_locations) or []
    found = (Path(folder) / "mpl-data/fonts/ttf" / f"{name}.ttf" for folder in folders for name in FONTS)
    return [one for one in found if one.is_file()]


@cache
def signs() -> Tensor:
    """Return all signs of all fonts, white on black (signs, 1, side, side), in uint8."""
    if not has_signs():
        raise LibraryError(
            "this needs fonts, and Pillow to draw them, which is not installed", hint=install_hint("images")
        )
    drawing, fonts, images = (
        require_library(f"PIL.{name}", "images") for name in ("ImageDraw", "ImageFont", "Image")
    )
    drawn = []
    for file in _fonts():
        font: Any = fonts.truetype(str(file), SIDE - 2 * MARGIN)
        for sign in (one for one in map(chr, SIGNS) if numeric(one, None) is None):  # neither ² nor ½
            image = images.new("L", (SIDE, SIDE))
            drawing.Draw(image).text((SIDE / 2, SIDE / 2), sign, fill=255, font=font, anchor="mm")
            drawn.append(np.array(image))
    found = torch.from_numpy(np.stack(drawn))[:, None]
    return found[found.flatten(1).float().mean(1) > 2]  # some fonts lack some signs


def images_of_signs(shape: tuple[int, int, int], count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` images (count, channels, rows, columns) with values between 0 and 1, drawn afresh."""
    channels, rows, columns = shape
    if not count:
        return torch.empty(0, *shape)
    ink = _placed(rows, columns, count, generator)
    both = torch.rand(count, 1, 1, 1, generator=generator) < SECOND
    ink = torch.maximum(ink, both * _placed(rows, columns, count, generator))
    shades = torch.rand(count, 3, 1, 1, generator=generator)
    kind, sign, paper = (shades[:, one : one + 1] for one in range(3))
    white = (kind < PLAIN / 2).float()
    plain = kind < PLAIN
    sign, paper = torch.where(plain, white, sign), torch.where(plain, 1 - white, paper)
    return torch.lerp(paper, sign, ink).expand(-1, channels, -1, -1).contiguous()


def _placed(rows: int, columns: int, count: int, generator: torch.Generator) -> Tensor:
    """Return signs (count, 1, rows, columns) of any size, turned, slanted, moved, of thick or thin lines."""
    every = signs()
    some = every[torch.randint(len(every), (count,), generator=generator)] / 255
    thickness = torch.rand(count, 1, 1, 1, generator=generator)
    for share in (THICK, THICK / 2):
        some = torch.where(thickness < share, max_pool2d(some, 3, 1, 1), some)
    some = avg_pool2d(some, 3, 1, 1)
    size, *rest = torch.rand(7, count, generator=generator)
    aspect, angle, slant, right, below = (2 * one - 1 for one in rest[:5])
    wide = 1 / (SMALLEST + (LARGEST - SMALLEST) * size)  # from the image to the sign
    high, angle = wide * torch.exp(STRETCH * aspect), ANGLE * angle
    slant = SHEAR * slant * (rest[5] < SLANTED)
    across = torch.stack([wide * angle.cos(), wide * (slant - angle.sin()), OFF * right], 1)
    down = torch.stack([high * angle.sin(), high * angle.cos(), OFF * below], 1)
    grid = affine_grid(torch.stack([across, down], 1), [count, 1, rows, columns], align_corners=False)
    return grid_sample(some, grid, align_corners=False).clamp(0, 1)
