"""Images as inputs of a model, prepared by the library that the model belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from transfusion.data.image_files import ImageFile
from transfusion.errors import DataError
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.synthetic_images import fitted, image_inputs, normalised, size
from transfusion.runtime.optional_libraries import require_library

Transform: TypeAlias = Callable[[Any], Tensor]
"""From a Pillow image to (channels, rows, columns)."""
SQUARE = "{label}: images are made square for it, where its own library keeps their proportions"
ASSUMED = (
    "{label}: nothing in its folder says how images are prepared; they are cropped to the frame and scaled"
    " as synthetic images are"
)


@dataclass(frozen=True)
class ImageProcessor:
    """Prepares images for one model."""

    subject: ProbedModel
    transform: Transform | None
    """The library's own; None if the model's folder does not describe it."""

    @classmethod
    def of(cls, subject: ProbedModel) -> ImageProcessor:
        """Build the transform that the model's folder describes."""
        if size(subject)[0] not in (1, 3):
            raise DataError(
                f"{subject.model.label}: takes {size(subject)[0]} channels, and images have 1 or 3",
                hint="give a .safetensors or .npz with pixel_values",
            )
        build = {"open_clip": _of_open_clip, "timm": _of_timm}.get(
            subject.model.family.library, _of_transformers
        )
        try:
            return cls(subject, build(subject))
        except (AssertionError, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise DataError(
                f"{subject.model.label}: the preparation of images that its folder asks for is not"
                f" understood ({_reason(error)})",
                hint="look at preprocessor_config.json, or at the image settings of the model's config",
            ) from error

    @property
    def notes(self) -> tuple[str, ...]:
        """A note for users if images are prepared otherwise than by the model's own library."""
        if self.transform:
            return ()
        text = SQUARE if self.subject.takes("patches") else ASSUMED
        return (text.format(label=self.subject.model.label),)

    def inputs(self, images: list[ImageFile]) -> dict[str, Tensor]:
        """Return the model's inputs for a batch of images."""
        frame = size(self.subject)
        opened = [image.opened("RGB" if frame[0] == 3 else "L") for image in images]
        if self.transform is None:
            pixels = normalised(self.subject, torch.stack([fitted(one, frame) for one in opened]))
        else:
            pixels = self._transformed(self.transform, images, opened)
        return image_inputs(self.subject, pixels)

    def _transformed(self, transform: Transform, images: list[ImageFile], opened: list[Any]) -> Tensor:
        pixels: list[Tensor] = []
        for image, one in zip(images, opened, strict=True):
            try:
                pixels.append(transform(one))
            except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
                raise DataError(
                    f"{image.name}: cannot be prepared for {self.subject.model.label} ({_reason(error)})",
                    hint="look at the image, and at the preparation that the model's folder asks for",
                ) from error
            if pixels[-1].shape != pixels[0].shape:
                raise DataError(
                    f"{image.name}: {tuple(pixels[-1].shape)} when prepared, and {images[0].name} is"
                    f" {tuple(pixels[0].shape)}",
                    hint="the model's preparation does not resize; give images of one size",
                )
        return torch.stack(pixels)


def _of_open_clip(subject: ProbedModel) -> Transform:
    """The transform of ``preprocess_cfg``, at the model's size."""
    transforms = require_library("open_clip.transform", "open-clip")
    config = (subject.model.checkpoint.config or {}).get("preprocess_cfg") or {}
    known = ("mean", "std", "interpolation", "resize_mode")
    built: Transform = transforms.image_transform(
        size(subject)[1:],
        is_train=False,
        fill_color=config.get("fill_color") or 0,
        **{key: config[key] for key in known if key in config},
    )
    return built


def _of_timm(subject: ProbedModel) -> Transform | None:
    """The transform of ``pretrained_cfg`` for tests, at the model's size."""
    timm = require_library("timm.data", "timm")
    config = {**(getattr(subject.module, "pretrained_cfg", None) or {})}
    config |= (subject.model.checkpoint.config or {}).get("pretrained_cfg") or {}
    if not config.get("mean"):
        return None
    chosen = timm.resolve_data_config({"input_size": size(subject)}, config, use_test_size=True)
    built: Transform = timm.create_transform(**chosen, is_training=False)
    return built


def _of_transformers(subject: ProbedModel) -> Transform | None:
    """The image processor that the folder names, computed with Pillow; no code of the folder is run."""
    files = [subject.info(name) for name in ("processor_config.json", "preprocessor_config.json")]
    config = files[0].get("image_processor") or files[1] or files[0]
    if subject.takes("patches") or ("size" not in config and config.get("do_resize") is not False):
        return None
    transformers = require_library("transformers")
    pillow = {"backend": "pil"} if hasattr(transformers, "ViTImageProcessorPil") else {"use_fast": False}
    processor = transformers.AutoImageProcessor.from_pretrained(
        str(subject.folder),
        config=getattr(subject.module, "config", None),
        local_files_only=True,
        trust_remote_code=False,
        **pillow,
    )
    processor.do_convert_rgb = False  # images are opened with the model's channels

    def transform(image: Any) -> Tensor:
        found = processor(image, return_tensors="pt")["pixel_values"]
        if not isinstance(found, Tensor) or found.ndim != 4:
            raise ValueError(f"{type(processor).__name__} does not make one tensor of an image")
        return found[0]

    return transform


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
