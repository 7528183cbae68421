"""Batches of images and texts, prepared when their turn comes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from transfusion.data.image_files import ImageFile
from transfusion.evaluation.batches import Batch
from transfusion.evaluation.image_processor import ImageProcessor
from transfusion.evaluation.predictions import IGNORED
from transfusion.evaluation.text_batches import TextTokenizer, Tokens


@dataclass(frozen=True)
class ImageBatches:
    """Images that are opened and prepared batch by batch."""

    label: str
    images: Sequence[ImageFile]
    processor: ImageProcessor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.images)

    @property
    def labels(self) -> Tensor:
        """The class of every image."""
        return self.targets

    def chosen(self, indices: Sequence[int]) -> ImageBatches:
        """Return the images with these indices."""
        images = [self.images[index] for index in indices]
        return replace(self, images=images, targets=self.targets[list(indices)])

    def batches(self, size: int) -> Iterator[Batch]:
        """Iterate over the batches."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield Batch(self.processor.inputs(list(self.images[part])), self.targets[part])

    def heaviest(self) -> Batch:
        """Return one image; all need the same memory."""
        return next(self.batches(1))


@dataclass(frozen=True)
class TextBatches:
    """Tokenized texts that are padded batch by batch."""

    label: str
    tokens: Sequence[Tokens]
    tokenizer: TextTokenizer
    takes: frozenset[str]
    """The arguments of the model's forward method."""
    targets: Tensor | None
    """None if the texts themselves are the targets."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def labels(self) -> Tensor | None:
        """The class of every text, if texts have classes."""
        return self.targets

    def chosen(self, indices: Sequence[int]) -> TextBatches:
        """Return the texts with these indices."""
        targets = None if self.targets is None else self.targets[list(indices)]
        return replace(self, tokens=[self.tokens[index] for index in indices], targets=targets)

    def batches(self, size: int) -> Iterator[Batch]:
        """Iterate over the batches, in order."""
        for start in range(0, len(self), size):
            yield self._batch(list(range(start, min(start + size, len(self)))))

    def heaviest(self) -> Batch:
        """Return the longest text."""
        return self._batch([max(range(len(self)), key=lambda one: len(self.tokens[one]["input_ids"]))])

    def _batch(self, chosen: list[int]) -> Batch:
        inputs = self.tokenizer.inputs([self.tokens[one] for one in chosen])
        given = {name: one for name, one in inputs.items() if name in self.takes}
        if self.targets is not None:
            return Batch(given, self.targets[chosen])
        ids = inputs["input_ids"]
        real = torch.tensor([len(self.tokens[one]["input_ids"]) for one in chosen])
        return Batch(given, ids.masked_fill(torch.arange(ids.shape[1])[None] >= real[:, None], IGNORED))


def accepted_inputs(module: nn.Module) -> frozenset[str]:
    """Return the names of the inputs that a module takes."""
    found = inspect.signature(module.forward).parameters
    info = {name for name, one in found.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return frozenset({"input_ids", "attention_mask"} | info)
