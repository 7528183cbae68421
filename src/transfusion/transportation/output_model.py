"""Outputs: models that are yet to be made, in the shape of one that exists, some rows at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from transfusion.checkpoint.checkpoint import Checkpoint
from transfusion.checkpoint.model_writer import Files, complete_model, output_shard_name, write_shards
from transfusion.checkpoint.shard_writer import Block, LazyTensor
from transfusion.checkpoint.staging import StagingFolder, TensorShape
from transfusion.checkpoint.tensor_content import BLOCK, all_finite, row_blocks
from transfusion.errors import OutputError, listing
from transfusion.model.model import Model, take_hashes
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.runtime.engines import Engine
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transportation.output_memory import OutputMemory
from transfusion.transportation.saved_output import SavedOutput, ignore_tensor
from transfusion.transportation.shard_tasks import write_shards_by_workers


@dataclass(frozen=True)
class OutputShape:
    """What a tensor will look like."""

    extents: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.extents).numel()


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of an output."""

    name: str
    """Canonical."""
    stored_as: TensorPieces
    shape: OutputShape


EntryT = TypeVar("EntryT", bound=OutputTensor)


class OutputModel(SavedOutput, Generic[EntryT]):
    """A model that is made when it is asked for: in memory, or in files like those of another."""

    @property
    @abstractmethod
    def like(self) -> Model:
        """The model whose files it mirrors."""

    @property
    @abstractmethod
    def entries(self) -> list[EntryT]:
        """All its tensors."""

    @abstractmethod
    def rows(self, entry: EntryT, rows: slice) -> Tensor:
        """Some rows of a tensor."""

    @abstractmethod
    def by_rows(self, entry: EntryT) -> bool:
        """Whether there is any use in asking for less than all rows."""

    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """All that decides the numbers."""

    @abstractmethod
    def texts(self, files: Mapping[str, str]) -> dict[str, str]:
        """What to write beside the weights, once their files and hashes are known."""

    def config(self) -> dict[str, Any] | None:
        """The configuration of the output."""
        return self.like.checkpoint.config

    def auxiliary_files(self) -> list[Path]:
        """Files that are copied as they are."""
        return self.like.checkpoint.auxiliary_files()

    @property
    @abstractmethod
    def models(self) -> tuple[Model, ...]:
        """Those that it is made of."""

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All whose files are read."""
        return [model.checkpoint for model in self.models]

    @abstractmethod
    def bound(self) -> OutputMemory:
        """How much memory it takes to make."""

    def prepare(self, engine: Engine | None = None) -> None:
        """Find out what must be known before the first tensor is made."""

    def require_unchanged(self) -> None:
        """Refuse files that cannot be seen here, or have changed since they were opened."""
        for checkpoint in self.checkpoints:
            checkpoint.require_unchanged()

    def conclude(self) -> None:
        """Look back, once everything is made, and refuse what should not be kept."""

    # ── in memory ────────────────────────────────────────────────────────────────────────────

    def cuts(self, entry: EntryT) -> Iterator[slice]:
        """The rows of a tensor that are made at a time."""
        return row_blocks(entry.shape.extents, BLOCK if self.by_rows(entry) else None)

    def blocks(self, entry: EntryT) -> Iterator[Block]:
        """A tensor, some rows at a time, in the type that it is stored in."""
        return (partial(self._stored, entry, rows) for rows in self.cuts(entry))

    def _stored(self, entry: EntryT, rows: slice) -> Tensor:
        made, dtype = self.rows(entry, rows), entry.shape.dtype
        if made.is_floating_point() and not all_finite(made, dtype):
            self.blame(entry)
            raise OutputError(
                f"{entry.name} has values that {str(dtype).removeprefix('torch.')} cannot hold",
                hint="choose a wider --dtype, or a smaller --alpha",
            )
        return made.to(dtype)

    @abstractmethod
    def blame(self, entry: EntryT) -> None:
        """Refuse an input of a tensor that has values which are not numbers."""

    def tensor(self, entry: EntryT) -> Tensor:
        """One tensor."""
        return (
            torch.cat([block() for block in self.blocks(entry)])
            if entry.shape.extents
            else self._scalar(entry)
        )

    def _scalar(self, entry: EntryT) -> Tensor:
        return next(self.blocks(entry))().clone()

    def state_dict(self) -> dict[str, Tensor]:
        """The whole output in memory, under the names that its library loads."""
        self.prepare()
        state: dict[str, Tensor] = {}
        for entry in self.entries:
            state |= entry.stored_as.split(self.tensor(entry))
        self.conclude()
        return state

    # ── in files ─────────────────────────────────────────────────────────────────────────────

    def write(
        self,
        staging: StagingFolder,
        on_tensor: Callable[[str], None] = ignore_tensor,
        resources: Resources = LOCAL,
    ) -> None:
        files = self.files(staging.path, on_tensor)
        with self.bound().within(resources).opened() as engine:
            take_hashes(*self.models, engine=engine)
            staging.begin({**self.recipe(), "files": _contents(files)})
            staging.planned = self._planned()
            self.prepare(engine)
            if engine.shares_memory:
                write_shards(staging, files, changed_tensors=self.changed_tensors, workers=engine.workers)
            else:
                write_shards_by_workers(self, staging, engine, on_tensor)
            complete_model(
                staging,
                files,
                like=self.like.checkpoint,
                config=self.config(),
                auxiliary_files=self.auxiliary_files(),
                texts=self._epilogue,
            )

    def _planned(self) -> dict[str, TensorShape]:
        """Every tensor that the files must hold, by the name that it is stored under."""
        planned = [
            (name, (lazy_tensor.shape, lazy_tensor.dtype))
            for entry in self.entries
            for name, lazy_tensor in self._lazy_tensors(entry, ignore_tensor).items()
        ]
        names = Counter(name for name, _ in planned)
        if twice := [name for name, count in names.items() if count > 1]:
            raise OutputError(
                f"{listing(twice)} would be written more than once",
                hint="this is a fault of the program; please report it with the names of B's tensors",
            )
        return dict(planned)

    def files(self, path: Path, on_tensor: Callable[[str], None] = ignore_tensor) -> Files:
        """The files with weights of an output at this place, and what goes into them."""
        return output_shard_name(self._shards(on_tensor), path, self.like.family.library)

    @property
    def changed_tensors(self) -> set[str]:
        """What is to be remembered of finished shards when a run is taken up."""
        return set()

    def _epilogue(self, files: Mapping[str, str]) -> dict[str, str]:
        self.conclude()
        return self.texts(files)

    def _shards(self, on_tensor: Callable[[str], None]) -> dict[Path, dict[str, LazyTensor]]:
        """The model's files with the tensors that go into each; what it does not have joins the last."""
        like = self.like
        shards: dict[Path, dict[str, LazyTensor]] = {file: {} for file in like.checkpoint.files}
        for entry in self.entries:
            mine = entry.name in like.names
            file = like.info(entry.name).file if mine else like.checkpoint.files[-1]
            for piece, lazy_tensor in self._lazy_tensors(entry, on_tensor).items():
                own = like.checkpoint.tensors.get(piece) if mine else None
                shards[own.file if own else file][piece] = lazy_tensor
        return {file: tensors for file, tensors in shards.items() if tensors}

    def _lazy_tensors(self, entry: EntryT, on_tensor: Callable[[str], None]) -> dict[str, LazyTensor]:
        """The stored pieces of a tensor, each to be made when it is its turn."""
        shape, stored = entry.shape, entry.stored_as

        def whole() -> Iterator[Block]:
            on_tensor(entry.name)
            yield from self.blocks(entry)

        def piece(name: str) -> Iterator[Block]:
            if name == stored.names[0]:
                on_tensor(entry.name)
            yield partial(self._piece, entry, *stored.place(name))

        if len(stored.names) == 1 and not stored.stacked:
            return {stored.names[0]: LazyTensor(shape.extents, shape.dtype, whole)}
        extents = (stored.height, *shape.extents[2 if stored.stacked else 1 :])
        return {name: LazyTensor(extents, shape.dtype, partial(piece, name)) for name in stored.names}

    def _piece(self, entry: EntryT, rows: slice, inside: slice) -> Tensor:
        made = self._stored(entry, rows) if self.by_rows(entry) else self.tensor(entry)[rows]
        return made[0, inside] if entry.stored_as.stacked else made


def _contents(files: Files) -> dict[str, dict[str, list[Any]]]:
    return {
        file: {name: [str(lazy_tensor.dtype), *lazy_tensor.shape] for name, lazy_tensor in parts.items()}
        for file, parts in files.items()
    }
