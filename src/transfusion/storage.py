"""Storage: how a tensor of a table lies in its files, whole or in pieces.

Files may keep the members of a stack apart, one tensor per expert, and the parts of what a table
concatenates too. Where a permutation moves experts, values then go from one stored name to another.
Everything above sees one tensor; it is joined here on its way in and split on its way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from transfusion.checkpoint import Rows, TensorInfo
from transfusion.errors import ArchitectureError, listing

_PIECE = re.compile(r"(?P<whole>.+)#(?P<member>\d+)(\[(?P<part>\d+)\])?")


Reader: TypeAlias = Callable[[str, Rows | None], Tensor]
"""Reads a stored tensor, or some of its rows."""
_Place: TypeAlias = tuple[int, int]
"""The number of a member, and of a part of it."""


@dataclass(frozen=True)
class Stored:
    """The stored names that make up one tensor."""

    pieces: tuple[tuple[str, ...], ...]
    """For each member of a stack, the names of its parts; their first dimensions are concatenated."""
    stacked: bool = False
    """Whether members are stacked; otherwise there is one name, and it is the tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for parts in self.pieces for name in parts)

    def info(self, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
        """What the headers say about the tensor as a whole; its file is that of its first piece."""
        first = tensors[self.pieces[0][0]]
        if not self.stacked:
            return first
        height = sum(tensors[name].shape[0] for name in self.pieces[0])
        return TensorInfo(first.name, (len(self.pieces), height, *first.shape[1:]), first.dtype, first.file)

    def join(self, read: Reader, rows: Rows | None = None) -> Tensor:
        """The tensor, or some of its rows, from its pieces; the rows of a stack are its members."""
        if not self.stacked:
            return read(self.pieces[0][0], rows)
        members = self.pieces if rows is None else self._members(rows)
        return torch.stack([torch.cat([read(name, None) for name in parts]) for parts in members])

    def _members(self, rows: Rows) -> Sequence[tuple[str, ...]]:
        return self.pieces[rows] if isinstance(rows, slice) else [self.pieces[row] for row in rows.tolist()]

    def place(self, name: str) -> tuple[slice, int, int]:
        """Where a piece lies in the tensor: its row, and which of how many parts of that row."""
        for member, parts in enumerate(self.pieces):
            if name in parts:
                return slice(member, member + 1), parts.index(name), len(parts)
        raise KeyError(name)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """The pieces of a tensor, by stored name; parts of one member are of one size."""
        if not self.stacked:
            return {self.pieces[0][0]: tensor}
        return {
            name: piece.clone()
            for member, parts in zip(tensor, self.pieces, strict=True)
            for name, piece in zip(parts, member.chunk(len(parts)), strict=True)
        }


def gather(names: Mapping[str, str], tensors: Mapping[str, TensorInfo], label: str) -> dict[str, Stored]:
    """How every tensor is stored, from canonical names of tensors and of pieces (``name#member[part]``)."""
    found: dict[str, dict[_Place | None, str]] = {}
    for ours, name in names.items():
        piece = _PIECE.fullmatch(ours)
        whole, place = (piece["whole"], _place(piece)) if piece else (ours, None)
        found.setdefault(whole, {})[place] = name
    return {whole: _stored(whole, places, tensors, label) for whole, places in found.items()}


def _place(piece: re.Match[str]) -> _Place:
    return int(piece["member"]), int(piece["part"] or 0)


def _stored(
    whole: str, found: Mapping[_Place | None, str], tensors: Mapping[str, TensorInfo], label: str
) -> Stored:
    pieces = {place: name for place, name in found.items() if place is not None}
    if not pieces:
        return Stored(((found[None],),))
    if None in found:
        raise ArchitectureError(
            f"{label}: {found[None]} is there as a whole and in pieces ({listing(pieces.values(), 2)})",
            hint="save the checkpoint again with one of them",
        )
    members, parts = (max(numbers) + 1 for numbers in zip(*pieces, strict=True))
    absent = [
        f"{whole}#{member}" + f"[{part}]" * (parts > 1)
        for member in range(members)
        for part in range(parts)
        if (member, part) not in pieces
    ]
    if absent:
        raise ArchitectureError(
            f"{label}: {whole} is stored in pieces (such as {next(iter(pieces.values()))}), and"
            f" {len(absent)} of them are missing: {listing(absent)}",
            hint="the download may be incomplete; fetch it again",
        )
    kinds = {(tensors[name].shape, tensors[name].dtype): name for name in pieces.values()}
    if len(kinds) > 1 or () in {shape for shape, _ in kinds}:
        shown = (
            f"{name} {shape} {str(dtype).removeprefix('torch.')}" for (shape, dtype), name in kinds.items()
        )
        raise ArchitectureError(
            f"{label}: the pieces of {whole} differ in shape or type, or have no dimension: {listing(shown)}",
            hint="the checkpoint was put together from several; fetch it again",
        )
    return Stored(tuple(tuple(pieces[m, p] for p in range(parts)) for m in range(members)), stacked=True)
