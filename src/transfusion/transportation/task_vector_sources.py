"""Sources: one fine-tune of A, as it looks from B."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment, NormFold
from transfusion.checkpoint.checkpoint import Checkpoint
from transfusion.checkpoint.tensor_files import Rows
from transfusion.layouts import Layout
from transfusion.model.model import Model, take_hashes
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.transportation.alpha import Alpha
from transfusion.transportation.norm_folding import NormFolding
from transfusion.transportation.output_model import OutputShape
from transfusion.transportation.task_vector import NewTokens, TaskVector


class TaskVectorSource(ABC):
    """What a fine-tune asks of B: changes of B's tensors, and tensors of its own. All in B's basis."""

    alpha: Alpha

    @property
    @abstractmethod
    def label(self) -> str:
        """As the user wrote it."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A hash of all that it consists of."""

    @property
    @abstractmethod
    def config(self) -> Mapping[str, Any] | None:
        """The configuration of a model of its kind, as far as that is known."""

    @property
    @abstractmethod
    def checkpoint(self) -> Checkpoint:
        """Its files."""

    @property
    def models(self) -> tuple[Model, ...]:
        """Those among its files that are models, beside the base."""
        return ()

    @property
    def root(self) -> Path:
        """Where its files are."""
        return self.checkpoint.root

    @property
    @abstractmethod
    def names(self) -> Mapping[str, TensorPieces]:
        """The tensors of a model of its kind, and how its files name them."""

    @property
    def buffers(self) -> frozenset[str]:
        """Those among its tensors that hold no weights."""
        return frozenset()

    @property
    def module(self) -> nn.Module | None:
        """The module that it is, if it was given in memory."""
        return None

    @property
    @abstractmethod
    def has_heads(self) -> bool:
        """Whether it says anything about heads; if not, B keeps those that it has."""

    @abstractmethod
    def owns(self, name: str) -> bool:
        """Whether it has a tensor of this name itself, which B gets where there is nothing to add it to."""

    @abstractmethod
    def shape(self, name: str) -> OutputShape:
        """Of a tensor of its own."""

    @abstractmethod
    def changes(self, name: str) -> bool:
        """Whether it has a change to add to B's tensor."""

    def scattered(self, name: str) -> bool:
        """Whether rows that lie side by side in the output come from all over the fine-tune's tensor."""
        return False

    @abstractmethod
    def by_rows(self, name: str) -> bool:
        """Whether a change, or a tensor of its own, can be had some rows at a time."""

    @abstractmethod
    def change(self, name: str, rows: slice) -> Tensor:
        """Some rows of α·π(τ)."""

    @abstractmethod
    def own(self, name: str, rows: slice) -> Tensor:
        """Some rows of a tensor that is its own: carried over as it is, with its axes moved."""

    @abstractmethod
    def blame(self, name: str) -> None:
        """Refuse a tensor that has values which are not numbers."""

    @abstractmethod
    def reads(self) -> int:
        """How many bytes all of this takes to read."""

    def holds(self) -> int:
        """How many bytes it has in memory when a change is asked for, however few rows of it."""
        return 0

    def added(self, name: str) -> int:
        """How many rows of its own follow those of B."""
        return 0

    def lost(self) -> int:
        """How many tokens of its own do not come along."""
        return 0

    def auxiliary_files(self) -> list[Path]:
        """Its tokenizer and other files."""
        return []


@dataclass
class DenseSource(TaskVectorSource):
    """A whole model: its task vector, moved."""

    vector: TaskVector
    alignment: Alignment
    onto: Model
    alpha: Alpha = field(default_factory=Alpha)

    @property
    def model(self) -> Model:
        return self.vector.finetuned

    @property
    def label(self) -> str:
        return self.model.label

    @property
    def digest(self) -> str:
        take_hashes(self.model)
        return self.model.digest

    @property
    def config(self) -> Mapping[str, Any] | None:
        return self.model.checkpoint.config

    @property
    def checkpoint(self) -> Checkpoint:
        return self.model.checkpoint

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.model,)

    @cached_property
    def names(self) -> Mapping[str, TensorPieces]:
        known = self.model.architecture
        return {name: self.model.names[name] for name in (*known.tensors, *known.buffers)}

    @property
    def buffers(self) -> frozenset[str]:
        return self.model.architecture.buffers

    @property
    def module(self) -> nn.Module | None:
        return self.model.checkpoint.module

    @property
    def has_heads(self) -> bool:
        return bool(self.model.architecture.heads)

    def owns(self, name: str) -> bool:
        return name in self.model.architecture.tensors

    def shape(self, name: str) -> OutputShape:
        info = self.model.info(name)
        return OutputShape(info.shape, info.dtype)

    def changes(self, name: str) -> bool:
        return self.vector.covers(name)

    def scattered(self, name: str) -> bool:
        return self.alignment.scatters(self._layout(name))

    @cached_property
    def _folding(self) -> NormFolding:
        return NormFolding(self.alignment)

    def by_rows(self, name: str) -> bool:
        whole = not self.shape(name).extents or self._is_special(name)
        return not whole and self.alignment.moves_by_rows(self._layout(name))

    def _is_special(self, name: str) -> bool:
        """Whether a tensor does not move by its own numbers alone."""
        fold = self._folding
        return fold.is_part(name) or fold.is_rotated_scale(name, self.model.architecture)

    def change(self, name: str, rows: slice) -> Tensor:
        if self._is_special(name):
            return self._special_change(name)
        alpha, whole = self.alpha.at(name), not self.by_rows(name)
        moved = self._moved(partial(self._difference, name), name, rows)
        fold = self._fold(name)
        moved = self._folding.divided(moved, self.onto, self._layout(name), fold, None if whole else rows)
        return moved if alpha == 1 else alpha * moved

    def _difference(self, name: str, rows: Rows | None = None) -> Tensor:
        """τ; of what reads through a norm, with the norm's scale in it."""
        if (fold := self._fold(name)) is None:
            return self.vector.difference(name, rows)
        scaled = self._folding.scaled
        return scaled(self.model, name, fold, rows) - scaled(self.vector.base, name, fold, rows)

    def _fold(self, name: str) -> NormFold | None:
        return self._folding.fold_of(name, self._layout(name), self.vector.base.architecture)

    def _special_change(self, name: str) -> Tensor:
        fold, layout, alpha = self._folding, self._layout(name), self.alpha.at(name)
        if not fold.is_part(name):
            return alpha * fold.move_scale(self.vector.difference(name), layout)
        if name in self.model.architecture.scales:
            return torch.zeros(self.shape(name).extents)
        difference = fold.shift(self.model, name) - fold.shift(self.vector.base, name)
        return alpha * fold.scale(self.onto, name) * self.alignment.turn(difference, layout)

    def own(self, name: str, rows: slice) -> Tensor:
        if (fold := self._fold(name)) is None:
            return self._moved(partial(self.model.raw, name), name, rows)
        moved = self._moved(lambda some: self._folding.scaled(self.model, name, fold, some), name, rows)
        some = rows if self.by_rows(name) else None
        return self._folding.divided(moved, self.onto, self._layout(name), fold, some)

    def _moved(self, read: Callable[..., Tensor], name: str, rows: slice) -> Tensor:
        if self.by_rows(name):
            return self.alignment.move_rows(read, self._layout(name), rows)
        return self.alignment.move(read(None), self._layout(name))

    def blame(self, name: str) -> None:
        self.vector.blame(name)

    def added(self, name: str) -> int:
        return self.vector.added(name) if self.vector.new_tokens is NewTokens.KEEP else 0

    def lost(self) -> int:
        if self.vector.new_tokens is not NewTokens.DROP:
            return 0
        covered = (name for name in self.model.architecture.tensors if self.vector.covers(name))
        return max((self.vector.added(name) for name in covered), default=0)

    def auxiliary_files(self) -> list[Path]:
        return self.model.checkpoint.auxiliary_files()

    def reads(self) -> int:
        both = (name for name in self.model.architecture.tensors if self.vector.covers(name))
        return self.model.checkpoint.nbytes + sum(self.vector.base.info(name).nbytes for name in both)

    def _layout(self, name: str) -> Layout:
        return self.model.architecture.tensors[name]
