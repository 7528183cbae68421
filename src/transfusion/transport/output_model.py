"""Models computed on demand, in blocks of rows, in memory or in files like those of an existing model."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from transfusion.errors import OutputError, listing
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.held_tensors import HELD, LARGEST
from transfusion.files.model_writer import Files, complete_model, output_shard_name, write_shards
from transfusion.files.shard_writer import Block, LazyTensor
from transfusion.files.staging import StagingFolder, TensorShape
from transfusion.files.tensor_content import BLOCK, all_finite, row_blocks
from transfusion.model.model import Model
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.runtime.engines import Engine
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.scratch import keep_blocks_only
from transfusion.transport.saved_output import SavedOutput, ignore_tensor
from transfusion.transport.shard_tasks import write_shards_by_workers


@dataclass(frozen=True)
class OutputShape:
    """The shape and the dtype of a tensor to be computed."""

    extents: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.extents).numel()


COPIES, COPIES_OF_A_CHANGE = 20, 16
"""The most blocks of rows that a thread holds, for the result and for each change. About half are freed
blocks that the allocator keeps: measured by benchmarks/transporting.py."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of an output."""

    name: str
    """The canonical name."""
    stored_as: TensorPieces
    shape: OutputShape


EntryT = TypeVar("EntryT", bound=OutputTensor)


class OutputModel(SavedOutput, Generic[EntryT]):
    """A model whose tensors are computed on demand: in memory, or in files like those of another model."""

    @property
    @abstractmethod
    def like(self) -> Model:
        """The model whose files the output mirrors."""

    @property
    @abstractmethod
    def entries(self) -> list[EntryT]:
        """All tensors of the output."""

    @abstractmethod
    def rows(self, entry: EntryT, rows: slice) -> Tensor:
        """Compute some rows of a tensor."""

    @abstractmethod
    def by_rows(self, entry: EntryT) -> bool:
        """Whether a tensor can be computed in blocks of rows."""

    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """Return everything that decides the values; finished shards of an equal recipe are reused."""

    @abstractmethod
    def texts(self) -> dict[str, str]:
        """Return the text files to write beside the weights, when all tensors have been computed."""

    def config(self) -> dict[str, Any] | None:
        """Return the configuration of the output."""
        return self.like.checkpoint.config

    def auxiliary_files(self) -> list[Path]:
        """Return the files that are copied as they are."""
        return self.like.checkpoint.auxiliary_files()

    @property
    @abstractmethod
    def models(self) -> tuple[Model, ...]:
        """The models that the output is computed from."""

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints whose files are read."""
        return [model.checkpoint for model in self.models]

    @abstractmethod
    def within_memory(self, resources: Resources) -> Resources:
        """Return the resources with as many threads as fit into the memory; refuse too little of it."""

    def held_bytes(self) -> int:
        """Return the most bytes of whole tensors that are held while scattered rows of them are read."""
        largest = max((entry.shape.nbytes for entry in self.entries), default=0)
        return len(self.checkpoints) * HELD * min(LARGEST, largest)

    def block_bytes(self) -> int:
        """Return the bytes of the largest block of rows, in the type that it is computed in."""
        largest = 0
        for entry in self.entries:
            extents = entry.shape.extents
            whole, row = torch.Size(extents).numel(), torch.Size(extents[1:]).numel()
            numbers = min(whole, max(BLOCK, row)) if self.by_rows(entry) else whole
            largest = max(largest, numbers * (8 if entry.shape.dtype.itemsize > 2 else 4))
        return largest

    def prepare(self, engine: Engine | None = None) -> None:
        """Compute what is needed before the first tensor."""

    def require_unchanged(self) -> None:
        """Refuse files that are not visible here or have changed since they were opened."""
        for checkpoint in self.checkpoints:
            checkpoint.require_unchanged()

    @contextmanager
    def holding_tensors(self) -> Iterator[None]:
        """Read each tensor of the inputs once, as far as it is held for a while."""
        with ExitStack() as stack:
            for checkpoint in self.checkpoints:
                stack.enter_context(checkpoint.holding_tensors())
            yield

    def conclude(self) -> None:
        """Check the output when all tensors have been computed; refuse one that must not be kept."""

    # ── in memory ────────────────────────────────────────────────────────────────────────────

    def cuts(self, entry: EntryT) -> Iterator[slice]:
        """Yield the blocks of rows to compute."""
        return row_blocks(entry.shape.extents, BLOCK if self.by_rows(entry) else None)

    def blocks(self, entry: EntryT) -> Iterator[Block]:
        """Return functions that compute a tensor block by block, in its stored dtype."""
        return (partial(self._stored, entry, rows) for rows in self.cuts(entry))

    def _stored(self, entry: EntryT, rows: slice) -> Tensor:
        made, dtype = self.rows(entry, rows), entry.shape.dtype
        if made.is_floating_point() and not all_finite(made, dtype):
            self.require_finite_inputs(entry)
            raise OutputError(
                f"{entry.name} has values that {str(dtype).removeprefix('torch.')} cannot hold",
                hint="choose a wider `dtype`, or a smaller `alpha`",
            )
        return made.to(dtype)

    @abstractmethod
    def require_finite_inputs(self, entry: EntryT) -> None:
        """Refuse NaN and infinite values in the inputs of a tensor."""

    def tensor(self, entry: EntryT) -> Tensor:
        """Compute one tensor."""
        blocks = [block() for block in self.blocks(entry)]
        return torch.cat(blocks) if entry.shape.extents else blocks[0].clone()

    def state_dict(self) -> dict[str, Tensor]:
        """Compute the whole output in memory, under the names that its library loads."""
        self.prepare()
        state: dict[str, Tensor] = {}
        for entry in self.entries:
            state |= entry.stored_as.split(self.tensor(entry))
        self.conclude()
        stored = self.like.checkpoint.in_stored_names(state, lambda parts: torch.cat(list(parts)))
        others = self.like.checkpoint.companions
        return (
            stored if others is None else {**stored, **{name: others.read(name) for name in others.tensors}}
        )

    # ── in files ─────────────────────────────────────────────────────────────────────────────

    def write(
        self,
        staging: StagingFolder,
        on_tensor: Callable[[str], None] = ignore_tensor,
        resources: Resources = LOCAL,
    ) -> None:
        files = self.files(staging.path, on_tensor)
        with self.within_memory(resources).opened() as engine, self.holding_tensors():
            staging.begin({**self.recipe(), "files": _contents(files)})
            staging.planned = self._planned()
            self.prepare(engine)
            if engine.shares_memory:
                keep_blocks_only()
                write_shards(staging, files, changed_tensors=self.changed_tensors, workers=engine.workers)
            else:
                write_shards_by_workers(self, staging, engine, on_tensor)
            self.conclude()
            complete_model(
                staging,
                files,
                like=self.like.checkpoint,
                config=self.config(),
                auxiliary_files=self.auxiliary_files(),
                texts=self.texts(),
            )

    def _planned(self) -> dict[str, TensorShape]:
        """Return the shape and dtype of every tensor that the files must hold, by stored name."""
        planned: dict[str, LazyTensor] = {}
        names: Counter[str] = Counter()
        for entry in self.entries:
            pieces = self._lazy_tensors(entry, ignore_tensor)
            names.update(pieces.keys())
            planned |= pieces
        if twice := [name for name, count in names.items() if count > 1]:
            raise OutputError(
                f"{listing(twice)} would be written more than once",
                hint="this is a bug; please report it with the names of B's tensors",
            )
        stored = self.like.checkpoint.in_stored_names(planned, LazyTensor.joined)
        for others in self._companions().values():
            stored |= others
        return {name: (lazy_tensor.shape, lazy_tensor.dtype) for name, lazy_tensor in stored.items()}

    def files(self, path: Path, on_tensor: Callable[[str], None] = ignore_tensor) -> Files:
        """Return the weight files of an output at this path, with the tensors of each."""
        return output_shard_name(self._shards(on_tensor), path, self.like.family.library)

    @property
    def changed_tensors(self) -> set[str]:
        """Tensors that differ from B's; recorded with each finished shard for a resumed run."""
        return set()

    def _shards(self, on_tensor: Callable[[str], None]) -> dict[Path, dict[str, LazyTensor]]:
        """Return the files of ``like`` with the tensors of each. Tensors it lacks go into the last file."""
        like = self.like
        shards: dict[Path, dict[str, LazyTensor]] = {file: {} for file in like.checkpoint.files}
        for entry in self.entries:
            mine = entry.name in like.names
            file = like.info(entry.name).file if mine else like.checkpoint.files[-1]
            for piece, lazy_tensor in self._lazy_tensors(entry, on_tensor).items():
                own = like.checkpoint.tensors.get(piece) if mine else None
                shards[own.file if own else file][piece] = lazy_tensor
        join, others = like.checkpoint.in_stored_names, self._companions()
        whole = {file: join(tensors, LazyTensor.joined) | others[file] for file, tensors in shards.items()}
        return {file: tensors for file, tensors in whole.items() if tensors}

    def _companions(self) -> dict[Path, dict[str, LazyTensor]]:
        """Return the tensors of other models in the files of ``like``, which stay as they are."""
        checkpoint = self.like.checkpoint
        found: dict[Path, dict[str, LazyTensor]] = {file: {} for file in checkpoint.files}
        if (others := checkpoint.companions) is not None:
            for name, info in others.tensors.items():
                found[info.file][name] = LazyTensor(info.shape, info.dtype, partial(_as_stored, others, name))
        return found

    def _lazy_tensors(self, entry: EntryT, on_tensor: Callable[[str], None]) -> dict[str, LazyTensor]:
        """Return the stored pieces of a tensor, each computed when it is written."""
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


def _as_stored(checkpoint: Checkpoint, name: str) -> Iterator[Block]:
    shape = checkpoint.tensors[name].shape
    rows = row_blocks(shape, BLOCK) if shape else iter([None])
    return (partial(checkpoint.read, name, some) for some in rows)


def _contents(files: Files) -> dict[str, dict[str, list[Any]]]:
    return {
        file: {name: [str(lazy_tensor.dtype), *lazy_tensor.shape] for name, lazy_tensor in parts.items()}
        for file, parts in files.items()
    }
