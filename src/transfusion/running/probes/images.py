"""Synthetic images, normalised as the model's own preparation does."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt, pi
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transfusion.running.probes.photographs import has_photographs, photograph_crops
from transfusion.running.probes.probed_model import BATCH, ProbedModel, seeded_generator
from transfusion.running.probes.signs import has_signs, images_of_signs
from transfusion.runtime.optional_libraries import require_library

GRIDS = (3, 5, 9, 14)
"""Cells of the grids on which noise is drawn before it is enlarged: blobs of several sizes."""
NOISY = 4
"""One image in this number is smooth noise; the others show overlapping shapes."""
COLOURS = 3
"""The channels of images that may be photographs: models of one channel read digits, clothes, scans."""
PHOTOGRAPHS, SIGNS = "photographs", "signs"
"""What half of the images show beside shapes."""
GREY, CONTRAST = 0.5, 0.25
"""The mean and the standard deviation of pixels between 0 and 1."""


def synthetic_images(subject: ProbedModel, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    """Generate ``count`` images, under the library's names."""
    kind = natural_kind(subject) if subject.natural else None
    natural = kind is not None and has_natural(kind)
    images = (natural_images if natural else generated_images)(size(subject), count, seed)
    inputs = image_inputs(subject, normalised(subject, images))
    shown = f"{kind}, of overlapping shapes" if natural else "overlapping shapes"
    return inputs, f"{count} images of {shown} and of smooth noise"


def generated_images(shape: tuple[int, int, int], count: int, seed: int) -> Tensor:
    """Generate ``count`` images with values between 0 and 1."""
    channels, rows, columns = shape
    generator = seeded_generator(seed, 1)
    images = torch.cat(
        [
            overlapping_shapes(min(BATCH, count - start), channels, rows, columns, generator)
            for start in range(0, count, BATCH)
        ]
    )
    for number in range(0, count, NOISY):
        noise = smooth_noise(shape, GRIDS[number // NOISY % len(GRIDS)], generator)
        images[number] = (GREY + CONTRAST * noise[0]).clamp(0, 1)
    return images


def natural_images(shape: tuple[int, int, int], count: int, seed: int) -> Tensor:
    """Generate ``count`` images with values between 0 and 1: by turns, shapes and crops of photographs, or
    signs if there is one channel.
    """
    draw = images_of_signs if shape[0] == 1 else photograph_crops
    images = torch.empty(count, *shape)
    images[::2] = generated_images(shape, (count + 1) // 2, seed)
    images[1::2] = draw(shape, count // 2, seeded_generator(seed, 9))
    return images


def natural_kind(subject: ProbedModel) -> str | None:
    """Return what images of a model may show beside shapes: photographs, or signs if it has one channel."""
    if subject.model.family.draws_inputs or not any(subject.takes(kind) for kind in ("image", "patches")):
        return None
    return {COLOURS: PHOTOGRAPHS, 1: SIGNS}.get(size(subject)[0])


def has_natural(kind: str) -> bool:
    """Return whether what is needed for such images is installed."""
    return has_photographs() if kind == PHOTOGRAPHS else has_signs()


def smooth_noise(shape: tuple[int, int, int], cells: int, generator: torch.Generator) -> Tensor:
    """Generate one image of unit variance: enlarged noise."""
    channels, *extents = shape
    grid = torch.randn(1, channels, cells, cells, generator=generator)
    image = nn.functional.interpolate(grid, size=extents, mode="bicubic", align_corners=False)
    return image / image.std()


def fitted(image: Any, frame: tuple[int, int, int]) -> Tensor:
    """Resize a Pillow image to fill the frame, crop it, and scale its values to between 0 and 1."""
    channels, rows, columns = frame
    pillow, operations = (require_library(f"PIL.{name}", "images") for name in ("Image", "ImageOps"))
    whole = operations.fit(image, (columns, rows), method=pillow.Resampling.BICUBIC)
    values = torch.from_numpy(np.array(whole, dtype=np.float32) / 255)
    return values.reshape(rows, columns, channels).movedim(-1, 0)


def size(subject: ProbedModel) -> tuple[int, int, int]:
    """Return channels, rows and columns of a model's images."""
    if subject.takes("patches"):
        settings = subject.settings
        side = isqrt(settings["num_patches"]) * settings["patch_size"]
        return settings.get("num_channels", 3), side, side
    _, channels, rows, columns = subject.template()["pixel_values"].shape
    return channels, rows, columns


def patch_grid(subject: ProbedModel) -> tuple[int, int] | None:
    """Return the rows and columns of patches that a model divides its images into, if that is known."""
    _, rows, columns = size(subject)
    for layout_name, layout in subject.model.architecture.tensors.items():
        if len(layout.inputs) == 3:
            _, _, height, width = subject.model.info(layout_name).shape
            return rows // height, columns // width
    side = subject.settings.get("patch_size")
    return (rows // side, columns // side) if isinstance(side, int) else None


def image_inputs(subject: ProbedModel, pixels: Tensor) -> dict[str, Tensor]:
    """Return prepared images under the library's names; cut into patches, if the model takes those."""
    if not subject.takes("patches"):
        return {"pixel_values": pixels}
    patch = subject.settings["patch_size"]
    count, channels, rows, columns = pixels.shape
    shape = (rows // patch, columns // patch)
    # (images, rows, columns, patch, patch, channels)
    cells = pixels.reshape(count, channels, shape[0], patch, shape[1], patch).permute(0, 2, 4, 3, 5, 1)
    patches = cells.reshape(count, shape[0] * shape[1], patch * patch * channels)  # (images, patches, pixels)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int64),
        "spatial_shapes": torch.tensor([shape] * count),
    }


def normalised(subject: ProbedModel, pixels: Tensor) -> Tensor:
    """Normalise pixels between 0 and 1 as the model's own preparation does."""
    mean, deviation = normalisation(subject)
    return (pixels - mean) / deviation


def normalisation(subject: ProbedModel) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of all channels (1, channels, 1, 1) as the folder says; for
    about unit variance, if it says nothing.
    """
    prepares = subject.info("preprocessor_config.json") or subject.info("processor_config.json")
    prepares = prepares.get("image_processor", prepares)
    config = subject.model.checkpoint.config or {}
    of_timm = getattr(subject.module, "pretrained_cfg", None) or config.get("pretrained_cfg") or {}
    of_open_clip = config.get("preprocess_cfg") or {}
    found = [
        (prepares.get("image_mean"), prepares.get("image_std")),
        (of_timm.get("mean"), of_timm.get("std")),
        (of_open_clip.get("mean"), of_open_clip.get("std")),
    ]
    if prepares.get("do_normalize") is False:
        found = [(0.0, 1.0)]
    channels = size(subject)[0]
    for pair in found:
        mean, deviation = (_per_channel(info, channels) for info in pair)
        if mean is not None and deviation is not None and deviation.all():
            return mean, deviation
    return torch.full((1, channels, 1, 1), GREY), torch.full((1, channels, 1, 1), CONTRAST)


def _per_channel(info: Any, channels: int) -> Tensor | None:
    """Return one number per channel (1, channels, 1, 1), or None if the setting has another form."""
    numbers = [info] * channels if isinstance(info, int | float) else info
    if not isinstance(numbers, list | tuple) or len(numbers) != channels:
        return None
    if not all(isinstance(one, int | float) for one in numbers):
        return None
    return torch.tensor([float(one) for one in numbers]).reshape(1, channels, 1, 1)


# ── overlapping shapes: edges, corners, flat and shaded areas of all sizes ───────────────────


FEWEST, MOST = 6, 30
"""The number of shapes in an image."""
SMALLEST, LARGEST = 0.08, 0.9
"""Radii as shares of half an image; small ones are more frequent."""


def overlapping_shapes(
    count: int, channels: int, rows: int, columns: int, generator: torch.Generator
) -> Tensor:
    """Draw ``count`` images with values between 0 and 1."""

    def draw(values: int) -> Tensor:
        return torch.rand(count, values, 1, 1, generator=generator)

    images = _colour(draw, channels).expand(-1, -1, rows, columns)
    shapes = FEWEST + (MOST - FEWEST) * draw(1)
    down, across = (torch.linspace(-1, 1, size) for size in (rows, columns))
    for number in range(MOST):
        radius = SMALLEST / (1 - draw(1) * (1 - SMALLEST / LARGEST))
        stretch, angle = torch.exp(1.6 * draw(1) - 0.8), pi * draw(1)
        right, below = across - (2.4 * draw(1) - 1.2), down[:, None] - (2.4 * draw(1) - 1.2)
        along = (right * angle.cos() + below * angle.sin()) / (radius * stretch)
        beside = (below * angle.cos() - right * angle.sin()) / (radius / stretch)
        inside = torch.sigmoid((1 - _distance(along, beside, draw(1))) * radius * min(rows, columns))
        inside = inside * (number < shapes)
        shade = 1 + 0.5 * (draw(1) - 0.5) * along
        stripes = 0.3 * (draw(1) - 0.5) * torch.sin(12 * draw(1) * along + 2 * pi * draw(1))
        images = images * (1 - inside) + inside * _colour(draw, channels) * (shade + stripes)
    return images.clamp(0, 1)


def _colour(draw: Callable[[int], Tensor], channels: int) -> Tensor:
    """Draw a colour for every image; its channels are similar."""
    grey = draw(1)
    return grey if channels == 1 else (grey + 0.5 * (draw(channels) - 0.5)).clamp(0, 1)


def _distance(along: Tensor, beside: Tensor, kind: Tensor) -> Tensor:
    """Return the distance from the centre, 1 at the edge, of an ellipse, a rectangle or a rhombus."""
    round_ = torch.sqrt(along.square() + beside.square())
    square = torch.maximum(along.abs(), beside.abs())
    return torch.where(kind < 1 / 3, round_, torch.where(kind < 2 / 3, square, along.abs() + beside.abs()))
