"""Whole tensors that are held for a while, where rows from all over them are read block by block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from transfusion.files.read_hashes import HashedSection
from transfusion.files.shared_read import SharedRead
from transfusion.files.tensor_content import content
from transfusion.files.tensor_files import SPAN, Rows, TensorInfo, read_tensor

HELD = 2
"""The number of tensors that are held: that of the block being computed, and the next."""
LARGEST = 2**26
"""The bytes of the largest tensor that is held. Rows of larger ones are long enough to be read one by one."""


class HeldTensors:
    """The last tensors of a checkpoint whose scattered rows were read; threads share them.

    Memory that is no longer needed is used for the next tensor: new pages cost more than reading.
    """

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._changed = threading.Condition()
        self.sections: Mapping[str, Sequence[HashedSection]] = {}
        """What is hashed while it is read, by the names of stored tensors."""

    def rows(self, info: TensorInfo, rows: Rows | None) -> Tensor:
        """Read a tensor, or some of its rows; of a tensor with scattered rows, the whole is read once."""
        sections = self.sections.get(info.name, ())
        for section in sections:
            section.hash.used = True
        if isinstance(rows, Tensor):
            if not _is_held(info, rows):
                return read_tensor(info, rows)
            with self._whole(info) as tensor:
                return tensor.index_select(0, rows)
        found = read_tensor(info, rows)
        if sections:
            start = 0 if rows is None else rows.indices(info.shape[0])[0] * info.row_bytes
            for section in sections:
                section.update(start, content(found))
        return found

    @contextmanager
    def _whole(self, info: TensorInfo) -> Iterator[Tensor]:
        with self._changed:
            place = self._place_of(info)
            place.users += 1
        try:
            place.reading.join()
            yield place.tensor
        except OSError:
            place.info = None
            raise
        finally:
            with self._changed:
                place.users -= 1
                self._changed.notify_all()

    def _place_of(self, info: TensorInfo) -> _Place:
        while (place := self._held_or_begun(info)) is None:
            self._changed.wait()
        return place

    def _held_or_begun(self, info: TensorInfo) -> _Place | None:
        """Return the place that holds a tensor; else begin to read it into a new or the oldest free one."""
        for place in self._places:
            if place.info is info:
                return place
        if len(self._places) < HELD:
            place = _Place()
        elif free := [place for place in self._places if not place.users]:
            place = free[0]
            self._places.remove(place)
        else:
            return None
        place.begin(info, self.sections.get(info.name, ()))
        self._places.append(place)
        return place


class _Place:
    """Memory for one tensor."""

    reading: SharedRead

    def __init__(self) -> None:
        self.info: TensorInfo | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.tensor = torch.empty(0)
        self.users = 0

    def begin(self, info: TensorInfo, sections: Sequence[HashedSection]) -> None:
        if len(self.memory) < info.nbytes:
            self.memory = torch.empty(info.nbytes, dtype=torch.uint8)
        self.tensor = self.memory[: info.nbytes].view(info.dtype).view(info.shape)
        self.info, self.reading = info, SharedRead(info, self.tensor, sections)


def held_bytes(nbytes: int) -> int:
    """Return the most memory that a checkpoint holds for tensors of this size whose rows are scattered."""
    return HELD * nbytes if nbytes <= LARGEST else nbytes


def _is_held(info: TensorInfo, rows: Tensor) -> bool:
    """Whether the whole tensor is read: not if the rows are neighbours in a large one."""
    if info.nbytes > LARGEST or not rows.numel():
        return False
    first, last = (int(end) for end in torch.aminmax(rows))
    return info.nbytes <= SPAN or (last + 1 - first) * info.row_bytes > SPAN
