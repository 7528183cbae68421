"""Views of checkpoints: some tensors with other rows than those that are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from transfusion.files.checkpoint import Checkpoint
from transfusion.files.tensor_files import Rows, row_blocks

NOWHERE = -1
"""The number of a row that is not stored."""
_AT_ONCE = 2**22
"""The numbers of a stored tensor that are read at once."""


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

    def read(self, checkpoint: Checkpoint, name: str, rows: Rows | None) -> Tensor:
        """Read the view of a tensor, or some of its rows."""
        if self.dim:
            stored = checkpoint.read(name, rows)
            return self._placed(stored.shape, stored.dtype, self.rows, [(0, stored)])
        info = checkpoint.tensors[name]
        if rows is None:  # in the order of the file, block by block: the stored tensor is never held whole
            cuts = row_blocks(info.shape, _AT_ONCE)
            blocks = ((block.start, checkpoint.read(name, block)) for block in cuts)
            return self._placed(info.shape, info.dtype, self.rows, blocks)
        wanted = self.rows[rows]
        there = wanted != NOWHERE
        found = torch.full((len(wanted), *info.shape[1:]), self.fill, dtype=info.dtype)
        found[there] = checkpoint.read(name, wanted[there])
        return found

    def _placed(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        wanted: Tensor,
        blocks: Iterable[tuple[int, Tensor]],
    ) -> Tensor:
        """Return the wanted rows, from blocks of stored rows and the number of the first of each."""
        found = torch.full(self.shape(tuple(shape)), self.fill, dtype=dtype)
        for start, block in blocks:
            size = block.shape[self.dim]
            here = ((wanted >= start) & (wanted < start + size)).nonzero().flatten()
            found.index_copy_(self.dim, here, block.index_select(self.dim, wanted[here] - start))
        return found


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

    @contextmanager
    def holding_tensors(self) -> Iterator[None]:
        assert self.stored is not None
        with self.stored.holding_tensors():
            yield

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        assert self.stored is not None
        selection = self.selections.get(name)
        if selection is None:
            return self.stored.read(name, rows)
        return selection.read(self.stored, name, rows)
