"""Feeding: raw examples as a model's inputs, batch by batch."""

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
    """Pictures that are opened and prepared when their turn comes."""

    label: str
    pictures: Sequence[ImageFile]
    processor: ImageProcessor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def labels(self) -> Tensor:
        """One class for every picture."""
        return self.targets

    def chosen(self, places: Sequence[int]) -> ImageBatches:
        """Some of the pictures."""
        pictures = [self.pictures[place] for place in places]
        return replace(self, pictures=pictures, targets=self.targets[list(places)])

    def batches(self, size: int) -> Iterator[Batch]:
        """Some at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield Batch(self.processor.inputs(list(self.pictures[part])), self.targets[part])

    def heaviest(self) -> Batch:
        """The example that takes most memory: all take the same."""
        return next(self.batches(1))


@dataclass(frozen=True)
class TextBatches:
    """Texts that are tokens already, and are padded when their turn comes."""

    label: str
    tokens: Sequence[Tokens]
    reader: TextTokenizer
    takes: frozenset[str]
    """What the model's code accepts."""
    targets: Tensor | None
    """None where every text is its own answer."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def labels(self) -> Tensor | None:
        """One class for every text, if texts have classes."""
        return self.targets

    def chosen(self, places: Sequence[int]) -> TextBatches:
        """Some of the texts."""
        targets = None if self.targets is None else self.targets[list(places)]
        return replace(self, tokens=[self.tokens[place] for place in places], targets=targets)

    def batches(self, size: int) -> Iterator[Batch]:
        """Some at a time, in their order."""
        for start in range(0, len(self), size):
            yield self._batch(list(range(start, min(start + size, len(self)))))

    def heaviest(self) -> Batch:
        """The longest text."""
        return self._batch([max(range(len(self)), key=lambda one: len(self.tokens[one]["input_ids"]))])

    def _batch(self, chosen: list[int]) -> Batch:
        inputs = self.reader.inputs([self.tokens[one] for one in chosen])
        given = {name: one for name, one in inputs.items() if name in self.takes}
        if self.targets is not None:
            return Batch(given, self.targets[chosen])
        ids = inputs["input_ids"]
        real = torch.tensor([len(self.tokens[one]["input_ids"]) for one in chosen])
        return Batch(given, ids.masked_fill(torch.arange(ids.shape[1])[None] >= real[:, None], IGNORED))


def accepted(module: nn.Module) -> frozenset[str]:
    """The names of what a module's code takes."""
    found = inspect.signature(module.forward).parameters
    info = {name for name, one in found.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return frozenset({"input_ids", "attention_mask"} | info)
