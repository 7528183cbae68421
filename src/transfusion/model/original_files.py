"""Checkpoints under the names of a model's authors, read under those of its library.

A stored tensor may hold several tensors of the library, such as q, k and v in one matrix. They are read as
rows of it, and joined again when an output is written: it has the names of the file that it mirrors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from transfusion.architecture.naming import PREFIXES, OriginalNames, split_rows, without_prefix
from transfusion.errors import ArchitectureError
from transfusion.families import all_families
from transfusion.files.checkpoint import CONFIGS, Checkpoint, PartT
from transfusion.files.tensor_files import Rows

WHOLE = PREFIXES[0]
"""The prefix of the model that denoises, in files with more than one model."""


@dataclass
class OriginalCheckpoint(Checkpoint):
    """A checkpoint in its authors' names, seen in those of the library."""

    stored: Checkpoint | None = None
    places: Mapping[str, tuple[str, slice]] = field(default_factory=dict)
    """The stored tensor of every tensor, and its rows there."""
    others: tuple[str, ...] = ()
    """The stored tensors of other models."""

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        assert self.stored is not None
        whole, here = self.places[name]
        if here == slice(None):
            return self.stored.read(whole, rows)
        if rows is None:
            return self.stored.read(whole, here)
        if isinstance(rows, Tensor):
            return self.stored.read(whole, rows + here.start)
        start, stop, _ = rows.indices(here.stop - here.start)
        return self.stored.read(whole, slice(here.start + start, here.start + stop))

    def _bytes(self, name: str, start: int, count: int) -> bytes:
        assert self.stored is not None
        whole, here = self.places[name]
        return self.stored._bytes(whole, (here.start or 0) * self.tensors[name].row_bytes + start, count)

    @contextmanager
    def holding_tensors(self) -> Iterator[None]:
        assert self.stored is not None
        with self.stored.holding_tensors():
            yield

    def in_stored_names(
        self, tensors: Mapping[str, PartT], join: Callable[[Sequence[PartT]], PartT]
    ) -> dict[str, PartT]:
        """Return the tensors of an output by the names of the file that it mirrors."""
        parts: dict[str, list[tuple[int, PartT]]] = {}
        for name, tensor in tensors.items():
            whole, here = self.places[name]
            parts.setdefault(whole, []).append((here.start or 0, tensor))
        in_order = {
            name: [part for _, part in sorted(found, key=lambda one: one[0])] for name, found in parts.items()
        }
        return {name: found[0] if len(found) == 1 else join(found) for name, found in in_order.items()}

    @property
    def companions(self) -> Checkpoint | None:
        assert self.stored is not None
        stored = self.stored.tensors
        return (
            replace(self.stored, tensors={name: stored[name] for name in self.others})
            if self.others
            else None
        )

    def stored_name(self, name: str) -> str:
        return self.places[name][0]

    def auxiliary_files(self) -> list[Path]:
        """Return the other files of the folder; a configuration in the authors' words is copied as it is."""
        there = [self.root / name for name in CONFIGS] if self.config is None else []
        return [*super().auxiliary_files(), *(file for file in there if file.is_file())]


def in_library_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint in the names of its library, if it is in those of its authors."""
    known = (OriginalNames.of(family, checkpoint.tensors) for family in all_families() if family.original)
    names = next((one for one in known if one is not None), None)
    if names is None:
        return checkpoint
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    places: dict[str, tuple[str, slice]] = {}
    others = _of_other_models(checkpoint, names)
    for name in checkpoint.tensors:
        if name in others:
            continue
        for ours, rows in split_rows(names, name, shapes) or [(without_prefix(name), slice(None))]:
            if ours in places:
                raise ArchitectureError(
                    f"{checkpoint.label}: {places[ours][0]} and {name} are two names of one tensor",
                    hint="save the checkpoint again with only one of the two",
                )
            places[ours] = name, rows
    tensors = {
        ours: replace(info, name=ours, shape=_shape(info.shape, rows))
        for ours, (name, rows) in places.items()
        for info in (checkpoint.tensors[name],)
    }
    config = checkpoint.config or {}
    of_library = config.get("_class_name") in names.family.model_types
    return OriginalCheckpoint(
        checkpoint.label,
        checkpoint.root,
        tensors,
        checkpoint.files,
        config=config if of_library else None,
        config_name=checkpoint.config_name if of_library else None,
        module=checkpoint.module,
        auxiliary_folder=checkpoint.auxiliary_folder,
        stored=checkpoint,
        places=places,
        others=tuple(others),
    )


def _of_other_models(checkpoint: Checkpoint, names: OriginalNames) -> dict[str, None]:
    """Return the tensors of other models: those without the prefix that all tensors of this model have."""
    if not any(name.startswith(WHOLE) for name in checkpoint.tensors):
        return {}
    return {
        name: None for name in checkpoint.tensors if not name.startswith(WHOLE) and names.module(name) is None
    }


def _shape(shape: tuple[int, ...], rows: slice) -> tuple[int, ...]:
    return shape if rows == slice(None) else (rows.stop - rows.start, *shape[1:])
