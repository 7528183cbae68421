"""The same inputs for a model of another shape: images in its size, texts in its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from transfusion.errors import MismatchError
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.synthetic_images import (
    CONTRAST,
    GREY,
    image_inputs,
    normalisation,
    normalised,
    size,
)
from transfusion.running.probes.synthetic_texts import text_inputs
from transfusion.running.probes.text_encoders import TextEncoder, text_encoder

Inputs = dict[str, Tensor]
IMAGES, TEXTS = (("image",), ("patches",)), (("tokens",),)
"""The kinds of inputs of models that can be compared across shapes."""
_MASK = "attention_mask"


class InputTranslation(ABC):
    """Rewrites inputs of one model as inputs of another one."""

    @abstractmethod
    def __call__(self, inputs: Inputs) -> Inputs:
        """Return the same images or texts for the other model."""

    same_places: bool = False
    """Whether both models divide an input into the same tokens."""


class SameInputs(InputTranslation):
    """Both models take the same inputs."""

    same_places = True

    def __call__(self, inputs: Inputs) -> Inputs:
        return inputs


@dataclass(frozen=True)
class ResizedImages(InputTranslation):
    """Images in the size and the normalisation of the other model; gradients pass through."""

    source: ProbedModel
    target: ProbedModel

    def __call__(self, inputs: Inputs) -> Inputs:
        mean, deviation = self._normalisation
        pixels = inputs["pixel_values"] * deviation + mean
        return image_inputs(self.target, normalised(self.target, resized(pixels, self._frame)))

    @cached_property
    def _frame(self) -> tuple[int, int, int]:
        return size(self.target)

    @cached_property
    def _normalisation(self) -> tuple[Tensor, Tensor]:
        channels = size(self.source)[0]
        found = normalisation(self.source) or ([GREY] * channels, [CONTRAST] * channels)
        mean, deviation = (torch.tensor(one).reshape(1, channels, 1, 1) for one in found)
        return mean, deviation


@dataclass(frozen=True)
class RenamedTexts(InputTranslation):
    """The same tokens under the names that the other model's library has for them."""

    target: ProbedModel
    same_places = True

    def __call__(self, inputs: Inputs) -> Inputs:
        made = text_inputs(self.target, inputs["input_ids"])
        return {**made, _MASK: inputs[_MASK]} if _MASK in inputs else made


@dataclass(frozen=True)
class RetokenizedTexts(InputTranslation):
    """The same texts in the tokens of the other model."""

    source: TextEncoder
    target: TextEncoder
    model: ProbedModel

    def __call__(self, inputs: Inputs) -> Inputs:
        made = self.target.padded(self.source.decode(inputs["input_ids"]), self.model.positions)
        return {**text_inputs(self.model, made["input_ids"]), _MASK: made[_MASK]}


def input_translation(source: ProbedModel, target: ProbedModel) -> InputTranslation:
    """Return how inputs of one model become those of another one; refuse models of other kinds of inputs."""
    kinds = [one.model.family.inputs for one in (source, target)]
    if all(one in IMAGES for one in kinds) and source.takes("image"):
        require_same_channels(source, target)
        return ResizedImages(source, target)
    if all(one in TEXTS for one in kinds):
        encoders = text_encoder(source), text_encoder(target)
        if encoders[0] is None or encoders[1] is None or encoders[0].same_tokens(encoders[1]):
            require_same_size(source, target)
            return RenamedTexts(target)
        return RetokenizedTexts(encoders[0], encoders[1], target)
    raise other_kind(source, target)


def other_kind(source: ProbedModel, target: ProbedModel) -> MismatchError:
    """Return the error for two models that do not read the same kind of inputs."""
    words = [" and ".join(one.model.family.inputs) for one in (source, target)]
    return MismatchError(
        f"{source.model.label} reads {words[0]}, and {target.model.label} {words[1]}: models of different"
        " shapes are compared only if both read images, or both read texts",
        hint="choose a base of the same shape",
    )


def require_same_channels(source: ProbedModel, target: ProbedModel) -> None:
    """Refuse models whose images have different numbers of channels."""
    channels = [size(one)[0] for one in (source, target)]
    if channels[0] != channels[1]:
        raise MismatchError(
            f"{source.model.label} reads images of {channels[0]} channels, and {target.model.label} of"
            f" {channels[1]}",
            hint="choose a base that reads the same kind of images",
        )


def require_same_size(source: ProbedModel, target: ProbedModel) -> None:
    """Refuse vocabularies of different sizes that cannot be compared."""
    if source.vocabulary != target.vocabulary:
        raise MismatchError(
            f"{source.model.label} has {source.vocabulary} tokens and {target.model.label}"
            f" {target.vocabulary}, and not both have a tokenizer.json in their folders",
            hint="put the tokenizers' files beside the weights",
        )


def resized(images: Tensor, frame: tuple[int, int, int]) -> Tensor:
    """Return images in another size."""
    if tuple(images.shape[2:]) == frame[1:]:
        return images
    resize = nn.functional.interpolate
    return resize(images, size=frame[1:], mode="bilinear", align_corners=False, antialias=True)
