"""Views of checkpoints: some tensors with other rows than those that are stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from transfusion.checkpoint.checkpoint import Checkpoint
from transfusion.checkpoint.tensor_files import Rows

NOWHERE = -1
"""The number of a row that is not stored."""


@dataclass(frozen=True, eq=False)
class RowSelection:
    """The rows of a view of one tensor: for each, the stored row, or `NOWHERE`."""

    rows: Tensor
    dim: int = 0
    """The dimension that is selected from."""
    fill: float = 0.0
    """The values of a row that is not stored."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return (*stored[: self.dim], len(self.rows), *stored[self.dim + 1 :])

    def of(self, stored: Tensor) -> Tensor:
        """Return the selected rows of a whole tensor."""
        return self._filled(stored.index_select(self.dim, self._stored), self.rows, self.dim)

    @property
    def _stored(self) -> Tensor:
        return self.rows[self.rows != NOWHERE]

    def _filled(self, found: Tensor, wanted: Tensor, dim: int) -> Tensor:
        """Return stored rows at their places among the wanted ones, and the fill elsewhere."""
        there = (wanted != NOWHERE).nonzero().flatten()
        if len(there) == len(wanted):
            return found
        shape = (*found.shape[:dim], len(wanted), *found.shape[dim + 1 :])
        return torch.full(shape, self.fill, dtype=found.dtype).index_copy_(dim, there, found)

    def read(self, checkpoint: Checkpoint, name: str, rows: Rows | None) -> Tensor:
        """Read the view of a tensor, or some of its rows; only their stored rows are read."""
        if rows is None or self.dim:
            return self.of(checkpoint.read(name, rows))
        wanted = self.rows[rows]
        return self._filled(checkpoint.read(name, wanted[wanted != NOWHERE]), wanted, 0)


@dataclass
class CheckpointView(Checkpoint):
    """A checkpoint, some of whose tensors are read with other rows."""

    stored: Checkpoint | None = None
    selections: Mapping[str, RowSelection] = field(default_factory=dict)
    """By the name of the tensor."""

    @classmethod
    def over(
        cls,
        stored: Checkpoint,
        selections: Mapping[str, RowSelection],
        config: dict[str, Any] | None = None,
        only: Collection[str] | None = None,
    ) -> CheckpointView:
        """Return a view of a checkpoint, with another configuration if it has one; ``only`` some tensors."""
        tensors = {
            name: replace(info, shape=selections[name].shape(info.shape)) if name in selections else info
            for name, info in stored.tensors.items()
            if only is None or name in only
        }
        return cls(
            stored.label,
            stored.root,
            tensors,
            stored.files,
            stored.config if config is None else config,
            stored.config_name,
            stored.module,
            stored.auxiliary_folder,
            stored=stored,
            selections=selections,
        )

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        assert self.stored is not None
        selection = self.selections.get(name)
        if selection is None:
            return self.stored.read(name, rows)
        return selection.read(self.stored, name, rows)
