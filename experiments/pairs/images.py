"""Images of the registries in one form, three colours of 32 × 32 pixels, and how a task shows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from experiments.pairs import data
from experiments.pairs.data import Examples, shuffled
from experiments.pairs.vits import Shift

SIDE = 32
GROUPS = {
    "digits": tuple(
        f"digit {name}"
        for name in ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    ),
    "clothes": (
        *("t-shirt", "pair of trousers", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    "photographs": (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
}
"""The names of the classes, by where the images come from."""
NAMES = tuple(name for names in GROUPS.values() for name in names)
TEMPLATES = ("a photo of a {}.", "an image of a {}.", "a small picture of a {}.", "this is a {}.")
UNCHANGED = Shift()
EACH, TESTS = 20_000, 2_000
"""Images of every group, and how many of them are for tests."""


@cache
def group(name: str) -> Examples:
    """Some images of a group in the common form; the first of them are for tests."""
    read = {"digits": data.digits, "clothes": data.clothes, "photographs": data.photographs}[name]
    found = read()[:EACH]
    room = (SIDE - found.images.shape[-1]) // 2
    images = nn.functional.pad(found.images, (room,) * 4).expand(-1, 3, -1, -1)
    return Examples(images, found.labels)


def part(name: str, which: str) -> Examples:
    """Of a group: ``test``, or the half that base ``a`` or ``b`` sees."""
    half = (EACH - TESTS) // 2
    first, last = {
        "test": (0, TESTS),
        "a": (TESTS, TESTS + half),
        "b": (TESTS + half, EACH),
    }[which]
    return group(name)[first:last]


@cache
def every(which: str) -> Examples:
    """A part of all groups, with all classes counted through, in no order."""
    parts = [part(name, which) for name in GROUPS]
    labels = [one.labels + 10 * number for number, one in enumerate(parts)]
    whole = Examples(torch.cat([one.images for one in parts]), torch.cat(labels))
    return whole[shuffled(len(whole))]


@dataclass(frozen=True)
class Seen:
    """How a task shows its images: shifted, and perhaps laid over photographs."""

    shift: Shift = UNCHANGED
    over: float = 0.0
    """How bright the photographs behind are; 0 for none."""
    blurred: int = 0
    """Over how many pixels colours run together."""

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Bytes to numbers around zero."""
        if self.over:
            behind = group("photographs").images
            chosen = behind[torch.randint(len(behind), (len(images),), generator=generator)].float()
            images = torch.maximum(images.float(), self.over * chosen)
        if self.blurred:
            room = self.blurred // 2
            padded = nn.functional.pad(images.float(), (room,) * 4, mode="replicate")
            images = nn.functional.avg_pool2d(padded, self.blurred, 1)
        return self.shift(images, generator)
