"""A pair of bases, and what all pairs have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from experiments.pairs.training import Recipe, kept, key

GROUPS = {"corruption": "corruptions", "other": "other tasks"}
"""What tasks can be, and what several of them are called: a corruption spoils what a base can do already."""
STARTS = {"a": 1, "b": 2}
"""Added to a hundred times the seed: where the two bases of a pair start from."""


class Task(Protocol):
    """What every task has: it is a dataclass with a name and a way to learn it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> str:
        """One of the groups; no part of what a model is kept under."""
        ...

    @property
    def tuning(self) -> Recipe: ...


T = TypeVar("T", bound=Task)


@dataclass(frozen=True, kw_only=True)
class Pair(ABC, Generic[T]):
    """Two bases of one architecture that share neither seed nor data, and tasks for them.

    Of the data, as many examples as are asked for are for tests, and half of the others for each base.
    """

    name: str
    about: str
    config: dict[str, Any]
    packages: tuple[str, ...]
    training: Recipe
    tests: int
    tasks: tuple[T, ...]

    # What a kind of model does for itself

    @abstractmethod
    def new_base(self, which: str, seed: int) -> Any:
        """Train a base."""

    @abstractmethod
    def new_tuned(self, base: Path, which: str, task: T, seed: int) -> Any:
        """Fine-tune a base with what it was trained on."""

    @abstractmethod
    def load(self, folder: Path) -> Any:
        """A model, of the class that it was saved as."""

    @abstractmethod
    def untouched(self, b: Any, tuned: Any) -> Any:
        """B for the task, before anything moves."""

    @abstractmethod
    def accuracy(self, model: Any, task: T) -> float:
        """Percent right on the task, on data that nobody was trained on."""

    @abstractmethod
    def support(self, model: Any, b: Any, task: T) -> float:
        """Percent right on what B could do before."""

    @abstractmethod
    def inputs(self, which: str, count: int) -> Mapping[str, Tensor]:
        """Unlabelled, unshifted inputs of one base's own half, as its model takes them."""

    @abstractmethod
    def task_inputs(self, task: T, count: int) -> Mapping[str, Tensor]:
        """Unlabelled inputs of a task from A's half, as its model takes them."""

    # What all have in common

    def base(self, which: str, seed: int) -> Path:
        """The folder of A or B; it is trained if it is not there."""
        return kept(self._base_key(which, seed), lambda: self.new_base(which, seed))

    def tuned(self, which: str, task: T, seed: int) -> Path:
        """The folder of a base's fine-tune; it is trained if it is not there."""
        name = f"{self.name}-{which}-{task.name}-seed-{seed}"
        made_by = asdict(task) | {"base": self._base_key(which, seed)}
        for harmless in ("about", "support"):
            made_by.pop(harmless, None)
        return kept(key(name, made_by), lambda: self.new_tuned(self.base(which, seed), which, task, seed))

    def _base_key(self, which: str, seed: int) -> str:
        made_by = asdict(self) | {"seed": self.seed_of(which, seed)}
        for harmless in ("about", "tasks"):
            del made_by[harmless]
        return key(f"{self.name}-{which}-seed-{seed}", made_by)

    def seed_of(self, which: str, seed: int) -> int:
        return 100 * seed + STARTS[which]


@dataclass(frozen=True, kw_only=True)
class OfAnother(Pair[T]):
    """A of another pair with its fine-tunes, and another B for it."""

    origin: Pair[T]

    def base(self, which: str, seed: int) -> Path:
        return self.origin.base("a", seed) if which == "a" else super().base(which, seed)

    def tuned(self, which: str, task: T, seed: int) -> Path:
        return self.origin.tuned("a", task, seed) if which == "a" else super().tuned(which, task, seed)
