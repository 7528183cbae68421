"""Tensors that files store otherwise than the table has them: under the authors' names, or in pieces.

A stored tensor may hold several tensors of the library, such as q, k and v in one matrix. They are read as
rows of it, and joined again when an output is written: it has the names of the file that it mirrors.

Files may also store each member of a stack (an expert) and each part of a concatenation as a tensor of its
own. Pieces are joined into the table's tensor when they are read, and split when they are written. A
permutation of experts then moves values from one stored name to another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from transfusion.architecture.naming import PREFIXES, OriginalNames, split_rows, without_part, without_prefix
from transfusion.errors import ArchitectureError, listing
from transfusion.families import all_families
from transfusion.files.checkpoint import Checkpoint, CheckpointView, RowSelection
from transfusion.files.tensor_files import Rows, TensorInfo

WHOLE = PREFIXES[0]
"""The prefix of the model that denoises, in files with more than one model."""
_PIECE = re.compile(r"(?P<whole>.+)#(?P<member>\d{1,9})(\[(?P<part>\d{1,9})\])?")


Reader: TypeAlias = Callable[[str, Rows | None], Tensor]
"""Reads a stored tensor, or some of its rows."""
_Place: TypeAlias = tuple[int, int]
"""The number of a member, and of a part of it."""
_ALONE = -1
"""The member of a tensor that is no stack."""


def in_library_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint in the names of its library, if it is in those of its authors."""
    tried = (OriginalNames.of(family, checkpoint.tensors) for family in all_families() if family.original)
    if not (known := [one for one in tried if one is not None]):
        return checkpoint
    signed = (one for one in known if one.sign(checkpoint.tensors))
    names = max(signed, key=lambda one: len(one.family.signature), default=known[0])
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    whole = any(name.startswith(WHOLE) for name in shapes)  # then other names are those of other models
    selections: dict[str, RowSelection] = {}
    others: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        parts = split_rows(names, name, shapes)
        if parts is None and whole and not name.startswith(WHOLE):
            others[name] = info
            continue
        for ours, rows in parts or [(without_prefix(name), None)]:
            if ours in selections:
                raise ArchitectureError(
                    f"{checkpoint.label}: {selections[ours].stored} and {name} are two names of one tensor",
                    hint="save the checkpoint again with only one of the two",
                )
            selections[ours] = RowSelection(rows, stored=name)
    of_diffusers, config = names.family.library == "diffusers", checkpoint.config or {}
    read = not of_diffusers or config.get("_class_name") in names.family.model_types
    return CheckpointView.over(
        checkpoint,
        selections,
        selections,
        config=checkpoint.config if read else None,
        config_name=checkpoint.config_name if read else None,
        companions=replace(checkpoint, tensors=others) if others else None,
    )


@dataclass(frozen=True)
class TensorPieces:
    """The stored names that make up one tensor."""

    pieces: tuple[tuple[str, ...], ...]
    """For each member of a stack, the names of its parts; their first dimensions are concatenated."""
    stacked: bool = False
    """Whether members are stacked; otherwise there is one, and it is the tensor."""

    height: int = 0
    """The first dimension of one part; known where there are several."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for parts in self.pieces for name in parts)

    def renamed(self, prefix: str, before: str = "") -> TensorPieces:
        """Return the same pieces with the prefix ``before`` of their names replaced."""
        pieces = (tuple(prefix + name.removeprefix(before) for name in parts) for parts in self.pieces)
        return replace(self, pieces=tuple(pieces))

    def info(self, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
        """Return the shape and type of the whole tensor from the headers, and the file of the first piece."""
        first = tensors[self.pieces[0][0]]
        if not self.stacked and len(self.pieces[0]) == 1:
            return first
        height = sum(tensors[name].shape[0] for name in self.pieces[0])
        members = (len(self.pieces),) if self.stacked else ()
        return TensorInfo(first.name, (*members, height, *first.shape[1:]), first.dtype, first.file)

    def join(self, read: Reader, rows: Rows | None = None) -> Tensor:
        """Read the tensor, or some of its rows, from its pieces; the rows of a stack are its members."""
        if self.stacked:
            members = torch.arange(len(self.pieces))[slice(None) if rows is None else rows].tolist()
            return torch.stack([_joined(self.pieces[member], read) for member in members])
        (parts,) = self.pieces
        if len(parts) == 1:
            return read(parts[0], rows)
        return _joined(parts, read) if rows is None else self._across(parts, read, rows)

    def _across(self, parts: tuple[str, ...], read: Reader, rows: Rows) -> Tensor:
        """Read rows that may lie in any of the parts, in the order of ``rows``."""
        wanted = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        where = wanted // self.height
        order = torch.argsort(where, stable=True)
        found = [read(name, wanted[where == part] - part * self.height) for part, name in enumerate(parts)]
        return torch.cat(found).index_select(0, torch.argsort(order))

    def place(self, name: str) -> tuple[slice, slice]:
        """Return the rows of the tensor that a piece fills; in a stack, the member and its rows."""
        member, part = next(
            (member, parts.index(name)) for member, parts in enumerate(self.pieces) if name in parts
        )
        inside = slice(part * self.height, (part + 1) * self.height)
        return (slice(member, member + 1), inside) if self.stacked else (inside, slice(None))

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the pieces of a tensor by stored name; the parts of a member have equal sizes."""
        if len(self.names) == 1 and not self.stacked:
            return {self.pieces[0][0]: tensor}
        return {
            name: piece.clone()
            for member, parts in zip(tensor if self.stacked else (tensor,), self.pieces, strict=True)
            for name, piece in zip(parts, member.chunk(len(parts)), strict=True)
        }


def _joined(parts: tuple[str, ...], read: Reader) -> Tensor:
    return read(parts[0], None) if len(parts) == 1 else torch.cat([read(name, None) for name in parts])


def gather_pieces(
    names: Mapping[str, str], tensors: Mapping[str, TensorInfo], label: str
) -> dict[str, TensorPieces]:
    """Return how every tensor is stored.

    ``names`` are canonical names of tensors and of pieces: ``name#member[part]``, or ``name[part]`` where
    there is no stack.
    """
    found: dict[str, dict[_Place | None, str]] = {}
    for ours, name in names.items():
        whole, place = _place(ours)
        found.setdefault(whole, {})[place] = name
    return {whole: _stored(whole, places, tensors, label) for whole, places in found.items()}


def _place(ours: str) -> tuple[str, _Place | None]:
    """Return the tensor of a name, and the place of the piece in it; None if the name is the whole tensor."""
    if piece := _PIECE.fullmatch(ours):
        return piece["whole"], (int(piece["member"]), int(piece["part"] or 0))
    whole, part = without_part(ours)
    return whole, None if part is None else (_ALONE, part)


def _stored(
    whole: str, found: Mapping[_Place | None, str], tensors: Mapping[str, TensorInfo], label: str
) -> TensorPieces:
    pieces = {place: name for place, name in found.items() if place is not None}
    if not pieces:
        return TensorPieces(((found[None],),))
    if None in found:
        raise ArchitectureError(
            f"{label}: {found[None]} is stored both whole and in pieces ({listing(pieces.values(), 2)})",
            hint="save the checkpoint again with only one of the two",
        )
    last, parts = (max(numbers) for numbers in zip(*pieces, strict=True))
    stacked, parts = last != _ALONE, parts + 1
    members = range(last + 1) if stacked else (_ALONE,)
    absent = (
        whole + f"#{member}" * stacked + f"[{part}]" * (parts > 1)
        for member in members
        for part in range(parts)
        if (member, part) not in pieces
    )
    if missing := len(members) * parts - len(pieces):  # counted, not listed: a name may hold any number
        raise ArchitectureError(
            f"{label}: {whole} is stored in pieces (such as {next(iter(pieces.values()))}), but"
            f" {missing} of them are missing: {listing(islice(absent, 8))}",
            hint="the download may be incomplete; fetch it again",
        )
    kinds = {(tensors[name].shape, tensors[name].dtype): name for name in pieces.values()}
    if len(kinds) > 1 or () in {shape for shape, _ in kinds}:
        shown = (
            f"{name} {shape} {str(dtype).removeprefix('torch.')}" for (shape, dtype), name in kinds.items()
        )
        raise ArchitectureError(
            f"{label}: the pieces of {whole} differ in shape or type, or have no dimension: {listing(shown)}",
            hint="the checkpoint mixes files of several models; fetch it again",
        )
    height = tensors[next(iter(pieces.values()))].shape[0]
    return TensorPieces(tuple(tuple(pieces[m, p] for p in range(parts)) for m in members), stacked, height)
