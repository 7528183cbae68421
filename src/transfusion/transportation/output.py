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

from transfusion.checkpoint import BLOCK, Checkpoint, all_finite, row_blocks
from transfusion.engines import Engine
from transfusion.engines.means import HERE, Means
from transfusion.errors import OutputError, listing
from transfusion.model import Model, take_hashes
from transfusion.storage import Stored
from transfusion.transportation.bounds import Bound
from transfusion.transportation.saved import Saved, nobody_watching
from transfusion.transportation.sending import send_shards
from transfusion.writer import (
    Block,
    Files,
    Parcel,
    TensorShape,
    Workshop,
    complete_model,
    named,
    write_shards,
)


@dataclass(frozen=True)
class Shape:
    """What a tensor will look like."""

    extents: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.extents).numel()


@dataclass(frozen=True)
class Entry:
    """One tensor of an output."""

    name: str
    """Canonical."""
    stored_as: Stored
    shape: Shape


EntryT = TypeVar("EntryT", bound=Entry)


class Output(Saved, Generic[EntryT]):
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

    def companions(self) -> list[Path]:
        """Files that are copied as they are."""
        return self.like.checkpoint.companions()

    @property
    @abstractmethod
    def models(self) -> tuple[Model, ...]:
        """Those that it is made of."""

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All whose files are read."""
        return [model.checkpoint for model in self.models]

    @abstractmethod
    def bound(self) -> Bound:
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
        shop: Workshop,
        on_tensor: Callable[[str], None] = nobody_watching,
        means: Means = HERE,
    ) -> None:
        files = self.files(shop.path, on_tensor)
        with self.bound().within(means).hired() as engine:
            take_hashes(*self.models, engine=engine)
            shop.begin({**self.recipe(), "files": _contents(files)})
            shop.planned = self._planned()
            self.prepare(engine)
            if engine.shares_memory:
                write_shards(shop, files, remarks=self.remarks, workers=engine.workers)
            else:
                send_shards(self, shop, engine, on_tensor)
            complete_model(
                shop,
                files,
                like=self.like.checkpoint,
                config=self.config(),
                companions=self.companions(),
                texts=self._epilogue,
            )

    def _planned(self) -> dict[str, TensorShape]:
        """Every tensor that the files must hold, by the name that it is stored under."""
        planned = [
            (name, (parcel.shape, parcel.dtype))
            for entry in self.entries
            for name, parcel in self._parcels(entry, nobody_watching).items()
        ]
        names = Counter(name for name, _ in planned)
        if twice := [name for name, count in names.items() if count > 1]:
            raise OutputError(
                f"{listing(twice)} would be written more than once",
                hint="this is a fault of the program; please report it with the names of B's tensors",
            )
        return dict(planned)

    def files(self, path: Path, on_tensor: Callable[[str], None] = nobody_watching) -> Files:
        """The files with weights of an output at this place, and what goes into them."""
        return named(self._shards(on_tensor), path, self.like.family.library)

    @property
    def remarks(self) -> set[str]:
        """What is to be remembered of finished shards when a run is taken up."""
        return set()

    def _epilogue(self, files: Mapping[str, str]) -> dict[str, str]:
        self.conclude()
        return self.texts(files)

    def _shards(self, on_tensor: Callable[[str], None]) -> dict[Path, dict[str, Parcel]]:
        """The model's files with the tensors that go into each; what it does not have joins the last."""
        like = self.like
        shards: dict[Path, dict[str, Parcel]] = {file: {} for file in like.checkpoint.files}
        for entry in self.entries:
            mine = entry.name in like.names
            file = like.info(entry.name).file if mine else like.checkpoint.files[-1]
            for piece, parcel in self._parcels(entry, on_tensor).items():
                own = like.checkpoint.tensors.get(piece) if mine else None
                shards[own.file if own else file][piece] = parcel
        return {file: tensors for file, tensors in shards.items() if tensors}

    def _parcels(self, entry: EntryT, on_tensor: Callable[[str], None]) -> dict[str, Parcel]:
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
            return {stored.names[0]: Parcel(shape.extents, shape.dtype, whole)}
        extents = (stored.height, *shape.extents[2 if stored.stacked else 1 :])
        return {name: Parcel(extents, shape.dtype, partial(piece, name)) for name in stored.names}

    def _piece(self, entry: EntryT, rows: slice, inside: slice) -> Tensor:
        made = self._stored(entry, rows) if self.by_rows(entry) else self.tensor(entry)[rows]
        return made[0, inside] if entry.stored_as.stacked else made


def _contents(files: Files) -> dict[str, dict[str, list[Any]]]:
    return {
        file: {name: [str(parcel.dtype), *parcel.shape] for name, parcel in parts.items()}
        for file, parts in files.items()
    }
