"""Raw examples: images or texts with labels, before a model's preparation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transfusion.data.image_files import ImageFile
from transfusion.errors import DataError

Pair = tuple[str, ...]
"""One text, or a pair of texts."""


@dataclass(frozen=True)
class Columns:
    """The columns that the user named."""

    text: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Examples:
    """Images or texts, and their classes."""

    label: str
    """The source, for messages."""
    images: Sequence[ImageFile] | None = None
    texts: Sequence[Pair] | None = None
    labels: Sequence[int | str] | None = None
    """The class of every example: its number or its name."""
    names: tuple[str, ...] | None = None
    """The class names, in the order of their numbers."""
    task: str | None = None
    """The name of the known task, if it is one."""

    def __post_init__(self) -> None:
        if not len(self):
            raise DataError(f"{self.label}: there are no examples in it", hint="give at least one example")

    def __len__(self) -> int:
        return len(self.images if self.images is not None else self.texts or ())

    def limited(self, count: int | None) -> Examples:
        """Return the first ``count`` examples; of labelled images, equally many of every class."""
        if count is None or count >= len(self):
            return self
        chosen = _balanced(self.labels, count) if self.images is not None and self.labels else range(count)
        return replace(
            self,
            images=None if self.images is None else [self.images[one] for one in chosen],
            texts=None if self.texts is None else [self.texts[one] for one in chosen],
            labels=None if self.labels is None else [self.labels[one] for one in chosen],
        )


def _balanced(labels: Sequence[int | str], count: int) -> list[int]:
    """Return the indices of ``count`` examples, taken from the classes in turn."""
    turns: dict[int | str, int] = {}
    turn: list[tuple[int, int]] = []
    for place, label in enumerate(labels):
        turns[label] = turns.get(label, -1) + 1
        turn.append((turns[label], place))
    return sorted(place for _, place in sorted(turn)[:count])
