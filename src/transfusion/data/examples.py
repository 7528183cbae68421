"""Raw examples: what was found, before any model has had a look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transfusion.data.image_files import ImageFile
from transfusion.errors import DataError

Pair = tuple[str, ...]
"""The text of an example, or its two texts."""


@dataclass(frozen=True)
class Columns:
    """Which columns hold what, as far as the user said so."""

    text: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Examples:
    """Pictures or texts, and their classes."""

    label: str
    """Where they come from, for people."""
    images: Sequence[ImageFile] | None = None
    texts: Sequence[Pair] | None = None
    labels: Sequence[int | str] | None = None
    """The class of every example: a number, or a name."""
    names: tuple[str, ...] | None = None
    """What the numbers mean."""
    task: str | None = None
    """The known task that these are examples of."""

    def __post_init__(self) -> None:
        if not len(self):
            raise DataError(f"{self.label}: there are no examples in it", hint="give at least one example")

    def __len__(self) -> int:
        return len(self.images if self.images is not None else self.texts or ())

    def limited(self, count: int | None) -> Examples:
        """The first so many; of a folder of classes, as many of each as keeps them even."""
        if count is None or count >= len(self):
            return self
        chosen = _spread(self.labels, count) if self.images is not None and self.labels else range(count)
        return replace(
            self,
            images=None if self.images is None else [self.images[one] for one in chosen],
            texts=None if self.texts is None else [self.texts[one] for one in chosen],
            labels=None if self.labels is None else [self.labels[one] for one in chosen],
        )


def _spread(labels: Sequence[int | str], count: int) -> list[int]:
    """So many examples, one of every class in turn, in their order."""
    turns: dict[int | str, int] = {}
    turn: list[tuple[int, int]] = []
    for place, label in enumerate(labels):
        turns[label] = turns.get(label, -1) + 1
        turn.append((turns[label], place))
    return sorted(place for _, place in sorted(turn)[:count])
