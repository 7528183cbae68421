"""Preparation of images as the model's own folder asks for it, computed with Pillow alone.

The libraries differ in small things, which are kept: how a shorter side is rounded, where the centre of an
odd margin is, whether an image is squeezed into its frame or cropped to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transfusion.data.image_files import ImageFile
from transfusion.data.probes.probed_model import ProbedModel
from transfusion.data.probes.synthetic_images import fitted, image_inputs, normalised, size
from transfusion.errors import DataError, listing
from transfusion.runtime.optional_libraries import require_library

Size = tuple[int, int]
"""Rows and columns."""
OPENAI = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALF = ([0.5] * 3, [0.5] * 3)
_SQUARE = ("CLIP", "Bit", "Chinese")
"""Processors of transformers that take a single number for the shortest side; the others for a square."""
_BILINEAR = ("ViT", "DINOv3ViT")
SQUARE = "{label}: images are made square for it, where its own library keeps their proportions"
ASSUMED = (
    "{label}: nothing in its folder says how images are prepared; they are cropped to the frame and scaled"
    " as for made-up images"
)


@dataclass(frozen=True)
class ImageProcessing:
    """What happens to an image on its way to the model."""

    shortest: int | None = None
    """The shortest side becomes so long, and the other keeps its proportion."""
    longest: Size | None = None
    """The image is made so small that it fits in."""
    exactly: Size | None = None
    """The image is squeezed into this."""
    crop: Size | None = None
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    deviation: tuple[float, ...] = (1.0, 1.0, 1.0)
    resample: str = "BICUBIC"
    scale: float = 1 / 255
    rounded: bool = True
    """Whether half a pixel of margin is rounded to the even number, as in torchvision, or down."""
    fill: tuple[int, ...] = (0, 0, 0)
    mode: str = "RGB"

    def __call__(self, picture: ImageFile) -> Tensor:
        """(channels, rows, columns), in float32."""
        image = self._cropped(self._resized(picture.opened(self.mode)))
        values = torch.from_numpy(np.array(image, dtype=np.float32)) * self.scale
        values = values.reshape(image.height, image.width, -1).movedim(-1, 0)
        shape = (-1, 1, 1)
        return (values - torch.tensor(self.mean).reshape(shape)) / torch.tensor(self.deviation).reshape(shape)

    def _resized(self, image: Any) -> Any:
        rows, columns = image.height, image.width
        if self.exactly is not None:
            rows, columns = self.exactly
        elif self.shortest is not None:
            short, long = min(rows, columns), max(rows, columns)
            other = int(self.shortest * long / short)
            rows, columns = (self.shortest, other) if rows <= columns else (other, self.shortest)
        elif self.longest is not None:
            ratio = max(rows / self.longest[0], columns / self.longest[1])
            rows, columns = round(rows / ratio), round(columns / ratio)
        if (rows, columns) == (image.height, image.width):
            return image
        return image.resize(
            (columns, rows), getattr(require_library("PIL.Image", "images").Resampling, self.resample)
        )

    def _cropped(self, image: Any) -> Any:
        """The middle; what is smaller than the crop gets margins."""
        if self.crop is None:
            return image
        rows, columns = self.crop
        if image.height < rows or image.width < columns:
            image = self._padded(image, max(rows, image.height), max(columns, image.width))
        half = (lambda one: int(round(one / 2))) if self.rounded else (lambda one: one // 2)  # noqa: RUF046
        top, left = half(image.height - rows), half(image.width - columns)
        return image.crop((left, top, left + columns, top + rows))

    def _padded(self, image: Any, rows: int, columns: int) -> Any:
        fill = self.fill if self.mode == "RGB" else self.fill[0]
        whole = require_library("PIL.Image", "images").new(self.mode, (columns, rows), fill)
        half = floor if self.rounded else ceil
        whole.paste(image, (half((columns - image.width) / 2), half((rows - image.height) / 2)))
        return whole


@dataclass(frozen=True)
class ImageProcessor:
    """How a model is shown pictures."""

    subject: ProbedModel
    preparation: ImageProcessing | None
    """None where nothing tells."""

    @classmethod
    def of(cls, subject: ProbedModel) -> ImageProcessor:
        """The preparation that belongs to the model."""
        if size(subject)[0] not in (1, 3):
            raise DataError(
                f"{subject.model.label}: sees {size(subject)[0]} channels, and images have 1 or 3",
                hint="give a .safetensors or .npz with pixel_values",
            )
        return cls(subject, _preparation(subject))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about images that are prepared in another way than the model's own."""
        if self.preparation:
            return ()
        text = SQUARE if self.subject.takes("patches") else ASSUMED
        return (text.format(label=self.subject.model.label),)

    def inputs(self, pictures: list[ImageFile]) -> dict[str, Tensor]:
        """The model's inputs for some pictures."""
        if self.preparation is not None:
            pixels = _stacked(pictures, [self.preparation(picture) for picture in pictures])
        else:
            frame = size(self.subject)
            mode = "RGB" if frame[0] == 3 else "L"
            seen = torch.stack([fitted(picture.opened(mode), frame) for picture in pictures])
            pixels = normalised(self.subject, seen)
        return image_inputs(self.subject, pixels)


def _stacked(pictures: list[ImageFile], prepared: list[Tensor]) -> Tensor:
    """All images as one tensor; a preparation that neither resizes nor crops may leave them different."""
    for picture, one in zip(pictures, prepared, strict=True):
        if one.shape != prepared[0].shape:
            raise DataError(
                f"{picture.name}: {tuple(one.shape)} when prepared, and {pictures[0].name} is"
                f" {tuple(prepared[0].shape)}",
                hint="the model's preparation does not resize; give images of one size",
            )
    return torch.stack(prepared)


def _preparation(subject: ProbedModel) -> ImageProcessing | None:
    info = subject.info("preprocessor_config.json") or subject.info("processor_config.json")
    info = info.get("image_processor", info)
    channels = size(subject)[0]
    mode = "RGB" if channels == 3 else "L"
    config = subject.model.checkpoint.config or {}
    if subject.model.family.library == "open_clip":
        return _of_open_clip(config.get("preprocess_cfg") or {}, size(subject)[1:], mode)
    if subject.model.family.library == "timm":
        about = {**(getattr(subject.module, "pretrained_cfg", None) or {})}
        about |= config.get("pretrained_cfg") or {}
        return _of_timm(about, size(subject)[1:], mode) if about.get("mean") else None
    sized = "size" in info or info.get("do_resize") is False
    if subject.takes("patches") or not sized:
        return None
    return _of_transformers(info, mode)


def _of_open_clip(info: Mapping[str, Any], frame: Size, mode: str) -> ImageProcessing:
    """As ``open_clip.image_transform`` without augmentation; the size is the model's."""
    ways: dict[str, dict[str, Any]] = {
        "shortest": {"shortest": frame[0], "crop": frame},
        "longest": {"longest": frame, "crop": frame},
        "squash": {"exactly": frame},
    }
    fill = info.get("fill_color") or 0
    return ImageProcessing(
        **ways[info.get("resize_mode") or "shortest"],
        mean=_numbers(info.get("mean"), OPENAI[0]),
        deviation=_numbers(info.get("std"), OPENAI[1]),
        resample="BILINEAR" if info.get("interpolation") == "bilinear" else "BICUBIC",
        fill=(fill,) * 3,
        mode=mode,
    )


def _of_timm(info: Mapping[str, Any], frame: Size, mode: str) -> ImageProcessing:
    """As timm's transform for evaluation."""
    share = info.get("test_crop_pct") or info.get("crop_pct") or 0.875
    scaled = (floor(frame[0] / share), floor(frame[1] / share))
    ways: dict[str, dict[str, Any]] = {
        "center": {"shortest": scaled[0]},
        "squash": {"exactly": scaled},
        "border": {"longest": scaled},
    }
    mean = _numbers(info.get("mean"), IMAGENET[0])
    way = info.get("crop_mode") or "center"
    named = str(info.get("interpolation") or "bicubic").upper()
    return ImageProcessing(
        **ways.get(way, ways["center"]),
        crop=frame,
        mean=mean,
        deviation=_numbers(info.get("std"), IMAGENET[1]),
        resample=named if named in ("BILINEAR", "BICUBIC", "NEAREST", "LANCZOS") else "BICUBIC",
        fill=tuple(round(255 * one) for one in mean) if way == "border" else (0, 0, 0),
        mode=mode,
    )


def _of_transformers(info: Mapping[str, Any], mode: str) -> ImageProcessing:
    """As the image processors of transformers do it with Pillow."""
    kind = str(info.get("image_processor_type") or info.get("feature_extractor_type") or "")
    exactly, shortest, crop = None, None, None
    if info.get("do_resize", True) and "size" in info:
        asked = info["size"]
        if isinstance(asked, dict):
            shortest = asked.get("shortest_edge")
        elif kind.startswith(_SQUARE):
            shortest = asked
        exactly = None if shortest else _pair(asked)
    if info.get("do_center_crop", "crop_size" in info) and info.get("crop_size"):
        crop = _pair(info["crop_size"])
    code = info.get("resample", 2 if kind.startswith(_BILINEAR) else 3)
    names = {0: "NEAREST", 1: "LANCZOS", 2: "BILINEAR", 3: "BICUBIC", 4: "BOX", 5: "HAMMING"}
    plain = info.get("do_normalize") is False
    ours = OPENAI if kind.startswith("CLIP") else HALF
    return ImageProcessing(
        shortest=shortest,
        exactly=exactly,
        crop=crop,
        mean=(0.0,) * 3 if plain else _numbers(info.get("image_mean"), ours[0]),
        deviation=(1.0,) * 3 if plain else _numbers(info.get("image_std"), ours[1]),
        resample=names.get(code, "BICUBIC"),
        scale=info.get("rescale_factor", 1 / 255) if info.get("do_rescale", True) else 1.0,
        rounded=False,
        mode=mode,
    )


def _numbers(info: Any, otherwise: list[float]) -> tuple[float, ...]:
    if isinstance(info, int | float):
        return (float(info),) * 3
    return tuple(float(one) for one in (info or otherwise))


def _pair(info: Any) -> Size:
    """Rows and columns, as files write them."""
    if isinstance(info, int):
        return info, info
    if isinstance(info, dict):
        if not {"height", "width"} <= info.keys():
            raise DataError(
                f"the model's images are prepared to a size by {listing(info)}, which is not understood",
                hint="say height and width, or shortest_edge, in preprocessor_config.json",
            )
        return int(info["height"]), int(info["width"])
    return int(info[0]), int(info[1])
