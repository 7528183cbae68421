"""Storage: how a tensor of a table lies in its files, whole or in pieces.

Files may keep the members of a stack apart, one tensor per expert, and the parts of what a table
concatenates too, as modules in memory may do elsewhere. Where a permutation moves experts, values then
go from one stored name to another. Everything above sees one tensor; it is joined here on its way in and
split on its way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from transfusion.checkpoint import TensorInfo
from transfusion.errors import ArchitectureError, listing
from transfusion.naming import without_part

_PIECE = re.compile(r"(?P<whole>.+)#(?P<member>\d+)(\[(?P<part>\d+)\])?")


_Place: TypeAlias = tuple[int, int]
"""The number of a member, and of a part of it."""
_ALONE = -1
"""The member of a tensor that is no stack."""


@dataclass(frozen=True)
class Stored:
    """The stored names that make up one tensor."""

    pieces: tuple[tuple[str, ...], ...]
    """For each member of a stack, the names of its parts; their first dimensions are concatenated."""
    stacked: bool = False
    """Whether members are stacked; otherwise there is one, and it is the tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for parts in self.pieces for name in parts)

    def info(self, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
        """What the headers say about the tensor as a whole; its file is that of its first piece."""
        first = tensors[self.pieces[0][0]]
        if len(self.names) == 1 and not self.stacked:
            return first
        height = sum(tensors[name].shape[0] for name in self.pieces[0])
        members = (len(self.pieces),) if self.stacked else ()
        return TensorInfo(first.name, (*members, height, *first.shape[1:]), first.dtype, first.file)

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor, from its pieces."""
        if not self.stacked:
            return _joined(self.pieces[0], read)
        return torch.stack([_joined(parts, read) for parts in self.pieces])

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """The pieces of a tensor, by stored name; parts of one member are of one size."""
        if len(self.names) == 1 and not self.stacked:
            return {self.pieces[0][0]: tensor}
        return {
            name: piece.clone()
            for member, parts in zip(tensor if self.stacked else (tensor,), self.pieces, strict=True)
            for name, piece in zip(parts, member.chunk(len(parts)), strict=True)
        }

    def apart(self, compute: Callable[[], Tensor]) -> dict[str, Callable[[], Tensor]]:
        """For every piece how to get it, once; the tensor is computed with the first that is asked for."""
        waiting: dict[str, Tensor] = {}

        def get(name: str) -> Tensor:
            if not waiting:
                waiting.update(self.split(compute()))
            return waiting.pop(name)

        return {name: partial(get, name) for name in self.names}


def _joined(parts: tuple[str, ...], read: Callable[[str], Tensor]) -> Tensor:
    return read(parts[0]) if len(parts) == 1 else torch.cat([read(name) for name in parts])


def gather(names: Mapping[str, str], tensors: Mapping[str, TensorInfo], label: str) -> dict[str, Stored]:
    """How every tensor is stored, from canonical names of tensors and of pieces: ``name#member[part]``,
    or ``name[part]`` where there is no stack.
    """
    found: dict[str, dict[_Place | None, str]] = {}
    for ours, name in names.items():
        whole, place = _place(ours)
        found.setdefault(whole, {})[place] = name
    return {whole: _stored(whole, places, tensors, label) for whole, places in found.items()}


def _place(ours: str) -> tuple[str, _Place | None]:
    """The tensor that a name is about, and the place of the piece in it, unless it is the whole."""
    if piece := _PIECE.fullmatch(ours):
        return piece["whole"], (int(piece["member"]), int(piece["part"] or 0))
    whole, part = without_part(ours)
    return whole, None if part is None else (_ALONE, part)


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
    last, parts = (max(numbers) for numbers in zip(*pieces, strict=True))
    stacked, parts = last != _ALONE, parts + 1
    members = range(last + 1) if stacked else (_ALONE,)
    absent = [
        whole + f"#{member}" * stacked + f"[{part}]" * (parts > 1)
        for member in members
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
    return Stored(tuple(tuple(pieces[m, p] for p in range(parts)) for m in members), stacked)
