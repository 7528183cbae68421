"""Sources of task vectors: one fine-tune of A, in B's basis."""

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
from transfusion.architecture.layouts import Layout
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.staging import TensorShape
from transfusion.files.tensor_files import Rows
from transfusion.model.model import Model
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.transport.alpha import Alpha
from transfusion.transport.norm_folding import NormFolding
from transfusion.transport.task_vector import NewTokens, TaskVector


class TaskVectorSource(ABC):
    """One fine-tune in B's basis: changes to B's tensors, and tensors that B does not have."""

    alpha: Alpha

    @property
    @abstractmethod
    def label(self) -> str:
        """The reference that the user gave."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of its headers and of samples of its tensors."""

    @property
    @abstractmethod
    def config(self) -> Mapping[str, Any] | None:
        """The configuration of a model of its class, if known."""

    @property
    @abstractmethod
    def checkpoint(self) -> Checkpoint:
        """Its files."""

    @property
    def root(self) -> Path:
        """The folder of its files."""
        return self.checkpoint.root

    @property
    @abstractmethod
    def names(self) -> Mapping[str, TensorPieces]:
        """The tensors of a model of its class, with their names in files."""

    @property
    def buffers(self) -> frozenset[str]:
        """The tensors that are buffers."""
        return frozenset()

    @property
    def module(self) -> nn.Module | None:
        """The module in memory, if the fine-tune was given as one."""
        return None

    @property
    @abstractmethod
    def has_heads(self) -> bool:
        """Whether it has task heads. If not, B keeps its own."""

    @abstractmethod
    def owns(self, name: str) -> bool:
        """Whether it has a tensor of this name to carry over if B has none to add a change to."""

    @abstractmethod
    def shape(self, name: str) -> TensorShape:
        """Return the shape of one of its own tensors."""

    @abstractmethod
    def changes(self, name: str) -> bool:
        """Whether it has a change to B's tensor of this name."""

    @abstractmethod
    def by_rows(self, name: str) -> bool:
        """Whether a change, or one of its own tensors, can be computed in blocks of rows."""

    @abstractmethod
    def change(self, name: str, rows: slice) -> Tensor:
        """Return some rows of α·π(τ)."""

    @abstractmethod
    def own(self, name: str, rows: slice) -> Tensor:
        """Return some rows of π of one of its own tensors."""

    def added(self, name: str) -> int:
        """Return the number of rows to append to B's, for new tokens."""
        return 0

    def dropped_tokens(self) -> int:
        """Return the number of new tokens that are dropped."""
        return 0

    @property
    def left_out(self) -> list[str]:
        """The tensors of A whose changes have no place in B."""
        return []

    def auxiliary_files(self) -> list[Path]:
        """Return its tokenizer and other files."""
        return []


@dataclass
class DenseSource(TaskVectorSource):
    """The moved task vector of a dense model."""

    vector: TaskVector
    alignment: Alignment
    onto: Model
    alpha: Alpha = field(default_factory=Alpha)
    _by_rows: dict[str, bool] = field(default_factory=dict, init=False, repr=False)
    """What `by_rows` has answered: it is asked for every block."""

    @property
    def model(self) -> Model:
        return self.vector.finetuned

    @property
    def label(self) -> str:
        return self.model.label

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint

    @property
    def config(self) -> Mapping[str, Any] | None:
        return self.model.checkpoint.config

    @property
    def checkpoint(self) -> Checkpoint:
        return self.model.checkpoint

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

    def shape(self, name: str) -> TensorShape:
        info = self.model.info(name)
        return info.shape, info.dtype

    def changes(self, name: str) -> bool:
        return self.vector.covers(name) and self._fits(name)

    def _fits(self, name: str) -> bool:
        """Whether A and B have a tensor in the same shape."""
        base, onto = self.vector.base, self.onto
        return name in onto.architecture.tensors and onto.info(name).shape == base.info(name).shape

    @cached_property
    def _folding(self) -> NormFolding:
        return NormFolding(self.alignment)

    def by_rows(self, name: str) -> bool:
        if name not in self._by_rows:
            whole = not self.shape(name)[0] or self._is_special(name)
            self._by_rows[name] = not whole and self.alignment.moves_by_rows(self._layout(name))
        return self._by_rows[name]

    def _is_special(self, name: str) -> bool:
        """Whether moving a tensor takes more than its own values: parts of norms, and scales."""
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
        """Return τ; for a weight behind a norm, with the norm's scale folded in."""
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
            return torch.zeros(self.shape(name)[0])
        difference = fold.shift(self.model, name) - fold.shift(self.vector.base, name)
        return alpha * fold.scale(self.onto, name) * self.alignment.rotate(difference, layout)

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

    def added(self, name: str) -> int:
        return self.vector.added(name) if self.vector.new_tokens is NewTokens.KEEP else 0

    @property
    def _covered(self) -> list[str]:
        return [name for name in self.model.architecture.tensors if self.vector.covers(name)]

    def dropped_tokens(self) -> int:
        dropped = self.vector.new_tokens is NewTokens.DROP
        return max((self.vector.added(name) for name in self._covered if dropped), default=0)

    def auxiliary_files(self) -> list[Path]:
        return self.model.checkpoint.auxiliary_files()

    def _layout(self, name: str) -> Layout:
        return self.model.architecture.tensors[name]
