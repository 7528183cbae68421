"""Whole tensors that are held for a while, where rows from all over them are read block by block."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from transfusion.files.tensor_files import SPAN, Rows, TensorInfo, read_tensor

HELD = 2
"""The number of tensors that are held: that of the block being computed, and the next."""
LARGEST = 2**26
"""The bytes of the largest tensor that is held. Rows of larger ones are long enough to be read one by one."""


class HeldTensors:
    """The last tensors of a checkpoint whose scattered rows were read; threads share them."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def rows(self, info: TensorInfo, rows: Rows | None) -> Tensor:
        """Read a tensor, or some of its rows; of a tensor with scattered rows, the whole is read once."""
        if not isinstance(rows, Tensor) or not _is_held(info, rows):
            return read_tensor(info, rows)
        return self._whole(info).index_select(0, rows)

    def _whole(self, info: TensorInfo) -> Tensor:
        with self._lock:  # other threads need this tensor, too, and wait for it
            if info.name not in self._held:
                while len(self._held) >= HELD:
                    del self._held[next(iter(self._held))]
                self._held[info.name] = read_tensor(info)
            return self._held[info.name]


def _is_held(info: TensorInfo, rows: Tensor) -> bool:
    """Whether the whole tensor is read: not if the rows are neighbours in a large one."""
    if info.nbytes > LARGEST or not rows.numel():
        return False
    first, last = (int(end) for end in torch.aminmax(rows))
    return info.nbytes <= SPAN or (last + 1 - first) * info.row_bytes > SPAN
