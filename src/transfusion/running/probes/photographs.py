"""Natural images: crops of the photographs that come with installed libraries. Nothing is downloaded.

Most are in scikit-image, which the extra ``images`` installs; without it there are none. Which crops a seed
gives depends on the photographs that are there, and so on the installed libraries.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from math import exp
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate

from transfusion.data.examples import ImageFile
from transfusion.errors import LibraryError
from transfusion.runtime.optional_libraries import install_hint

PHOTOGRAPHS = {
    "skimage/data/astronaut.png": "public domain, NASA",
    "skimage/data/brick.png": "CC0, CC0Textures",
    "skimage/data/camera.png": "CC0, Lav Varshney",
    "skimage/data/cell.png": "CC0, Paul Müller and others",
    "skimage/data/chelsea.png": "CC0, Stefan van der Walt",
    "skimage/data/clock_motion.png": "public domain, Stefan van der Walt",
    "skimage/data/coffee.png": "CC0, Rachel Michetti",
    "skimage/data/coins.png": "no known copyright restrictions, Brooklyn Museum",
    "skimage/data/grass.png": "CC0, linolafett",
    "skimage/data/gravel.png": "CC0, CC0Textures",
    "skimage/data/hubble_deep_field.jpg": "public domain, NASA",
    "skimage/data/retina.jpg": "CC0, Mikael Häggström",
    "skimage/data/rocket.jpg": "public domain, SpaceX",
    "skimage/data/text.png": "public domain, Wikipedia",
    "matplotlib/mpl-data/sample_data/grace_hopper.jpg": "public domain, US Navy",
}
"""Files in installed packages, and their licences and authors as those packages name them.

Others in scikit-image are left out, because no licence or author is named (ihc, moon, motorcycle, page).
"""
MAIN = "skimage"
"""The package without which there are no photographs."""
SIDE = 384
"""The shorter side of a photograph in memory, at most."""
SMALLEST = 0.15
"""The side of the smallest crops, as a share of the largest one that fits."""
STRETCH = 0.3
"""The largest change of the aspect, as a logarithm."""
TURNED = 1 / 8
"""The share of crops that are turned by 90°, and of those that are upside down."""
TILTED, ANGLE = 1 / 4, 0.3
"""The share of crops that are tilted, and the largest angle in radians."""
PERMUTED = 1 / 4
"""The share of crops whose channels are permuted."""
TINT = 0.12
"""The standard deviation of the logarithm of a channel's gain, which colours grey photographs, too."""
LEAST, MOST = 0.1, 0.35
"""Standard deviations between which every crop is given one of its own …"""
WEAKER, STRONGER = 0.5, 3.0
"""… unless its contrast changed by more than these factors: areas of one colour stay so."""
BRIGHTER = 0.15
"""The largest change of the brightness."""


def has_photographs() -> bool:
    """Return whether there are photographs and Pillow to read them; nothing is imported."""
    files = (_file(name) for name in PHOTOGRAPHS if name.startswith(f"{MAIN}/"))
    return find_spec("PIL") is not None and any(file is not None for file in files)


def _file(name: str) -> Path | None:
    """Return a file of an installed package, if it is there. The package is found, and not imported."""
    package, _, rest = name.partition("/")
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    return next((file for folder in folders if (file := Path(folder) / rest).is_file()), None)


@cache
def photographs() -> tuple[Tensor, ...]:
    """Return the photographs (3, rows, columns) in uint8; those that are not installed are left out."""
    if not has_photographs():
        raise LibraryError(
            "this needs photographs, and Pillow or scikit-image is not installed", hint=install_hint("images")
        )
    found = (_file(name) for name in PHOTOGRAPHS)
    return tuple(_read(file) for file in found if file is not None)


def _read(file: Path) -> Tensor:
    values = np.array(ImageFile(str(file), file).opened())  # (rows, columns, 3)
    # the channels stay last in memory: so uint8 is resized several times as fast
    image = torch.from_numpy(values).permute(2, 0, 1)  # (3, rows, columns)
    factor = SIDE / min(image.shape[1:])
    if factor >= 1:
        return image
    return _resized(image, round(factor * image.shape[1]), round(factor * image.shape[2]))


def _resized(image: Tensor, rows: int, columns: int) -> Tensor:
    return interpolate(image[None], (rows, columns), mode="bicubic", antialias=True)[0]


# ── crops ────────────────────────────────────────────────────────────────────────────────────


def photograph_crops(shape: tuple[int, int, int], count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` crops (count, channels, rows, columns) with values between 0 and 1, drawn afresh.

    Each is of any photograph, of any scale from a small patch to the whole, mirrored, turned and recoloured.
    One channel is grey; of other numbers, red, green and blue are repeated.
    """
    channels, rows, columns = shape
    found = photographs()
    crops = torch.empty(count, 3, rows, columns, dtype=torch.uint8)
    chosen = torch.randint(len(found), (count,), generator=generator).tolist()
    draws = torch.rand(count, 7, generator=generator).tolist()
    for number, (turned, mirrored, inverted, *place) in enumerate(draws):
        image = found[chosen[number]]
        if turned < TURNED:
            image = image.mT  # a turn by 90° is this and a mirroring, which is drawn anyway
        crop = _resized(_piece(image, rows / columns, *place), rows, columns)
        sides = [side for side, wanted in ((1, inverted < TURNED), (2, mirrored < 0.5)) if wanted]
        crops[number] = crop.flip(sides)
    return _recoloured(_tilted(crops / 255, generator), channels, generator)


def _piece(image: Tensor, aspect: float, size: float, stretch: float, down: float, across: float) -> Tensor:
    """Return a part of a photograph; of numbers between 0 and 1, one each for its size, the change of its
    aspect, and the place of its corner.
    """
    _, rows, columns = image.shape
    aspect *= exp(STRETCH * (2 * stretch - 1))
    share = SMALLEST ** (1 - size)
    height = max(1, round(share * min(rows, columns * aspect)))
    width = max(1, round(share * min(columns, rows / aspect)))
    top, left = round(down * (rows - height)), round(across * (columns - width))
    return image[:, top : top + height, left : left + width]


def _tilted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Tilt some images by small angles; they are mirrored at their edges."""
    draws = torch.rand(len(images), 2, generator=generator)
    chosen = draws[:, 0] < TILTED
    if not chosen.any():
        return images
    some, angles = images[chosen], ANGLE * (2 * draws[chosen, 1] - 1)
    aspect, zero = some.shape[2] / some.shape[3], torch.zeros(len(some))
    cos, sin = angles.cos(), angles.sin()
    rows = [torch.stack([cos, -aspect * sin, zero], 1), torch.stack([sin / aspect, cos, zero], 1)]
    grid = affine_grid(torch.stack(rows, 1), list(some.shape), align_corners=False)
    images[chosen] = grid_sample(some, grid, padding_mode="reflection", align_corners=False)
    return images


def _recoloured(images: Tensor, channels: int, generator: torch.Generator) -> Tensor:
    """Draw the colours' saturation, order and gains, the contrast and the brightness of every image."""
    count, _, rows, columns = images.shape
    draws = torch.rand(count, 4, 1, 1, generator=generator)
    colours = torch.lerp(torch.full((3, 3), 1 / 3), torch.eye(3), 1.5 * draws[:, 0])  # (count, new, old)
    order = torch.rand(count, 3, generator=generator).argsort(1)
    order = torch.where(draws[:, 1, 0] < PERMUTED, order, torch.arange(3))  # (count, new)
    colours = colours.gather(1, order[:, :, None].expand(-1, -1, 3))
    colours = colours * torch.exp(TINT * torch.randn(count, 3, 1, generator=generator))
    colours = colours.mean(1, keepdim=True) if channels == 1 else colours[:, torch.arange(channels) % 3]
    pixels = colours @ images.flatten(2)  # (count, channels, rows · columns)
    mean = pixels.mean((1, 2), keepdim=True)
    centred = pixels - mean
    deviation = centred.square().mean((1, 2), keepdim=True).sqrt()
    wanted = LEAST + (MOST - LEAST) * draws[:, 2]
    contrast = (wanted / (deviation + 1e-6)).clamp(WEAKER, STRONGER)
    brighter = mean + BRIGHTER * (2 * draws[:, 3] - 1)
    recoloured = torch.addcmul(brighter, contrast, centred).clamp_(0, 1)
    return recoloured.reshape(count, channels, rows, columns)


# ── mixtures ─────────────────────────────────────────────────────────────────────────────────


def mixed(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images, normalised or not, of which a third each stays, gets a rectangle of another image
    (CutMix), or is blended with another one (mixup).
    """
    count, _, rows, columns = images.shape
    # every image gets another one; a single one, itself
    others = images.roll(int(torch.randint(1, max(2, count), (), generator=generator)), 0)
    draws = torch.rand(6, count, 1, 1, 1, generator=generator)
    inside = (
        _between(rows, draws[0], draws[1])[..., None] & _between(columns, draws[2], draws[3])[..., None, :]
    )
    share = torch.where(draws[4] < 1 / 3, inside.to(images.dtype), draws[5].to(images.dtype))
    return torch.where(draws[4] < 2 / 3, torch.lerp(images, others, share), images)


def _between(size: int, extent: Tensor, start: Tensor) -> Tensor:
    """Return which places of a side lie in an interval of a quarter to three quarters of it."""
    length = size * (0.25 + 0.5 * extent[..., 0])
    first = (size - length) * start[..., 0]
    steps = torch.arange(size)
    return (steps >= first) & (steps < first + length)  # (count, 1, size)
