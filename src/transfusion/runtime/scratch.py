"""Scratch memory that a thread reuses instead of new pages, and temporary folders for large files."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_scratch = _Scratch()


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of this shape, with the type and device of ``like``.

    The tensor is valid until this thread asks for the same name again.
    """
    key, size = (name, like.dtype, like.device), torch.Size(shape).numel()
    buffer = _scratch.buffers.get(key)
    if buffer is None or buffer.numel() < size:
        _scratch.buffers.pop(key, None)
        buffer = _scratch.buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
    return buffer[:size].view(*shape)


def clear() -> None:
    """Free the scratch memory of this thread."""
    _scratch.buffers.clear()


_TRIM, _THRESHOLD = -1, -3
"""Options of the C library's malloc: memory that a thread keeps, and the size from which it keeps none."""


def give_back_at_once() -> None:
    """Make the C library return the memory of tensors to the system as soon as they are freed.

    By default it keeps much of it for later, in each thread: half as much again was measured.
    """
    _set_malloc({_THRESHOLD: 2**18, _TRIM: 2**17})


def keep_blocks_only() -> None:
    """Make the C library keep the memory of freed blocks for the next ones, but not that of larger tensors.

    A new page costs more than reading a page of weights: it was a fifth of a transport's work.
    """
    _set_malloc({_THRESHOLD: 2**23, _TRIM: 2**25})


def _set_malloc(options: dict[int, int]) -> None:
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            for option, value in options.items():
                mallopt(option, value)


IN_MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
SPARE = 4
"""The files may take this part of the free memory at the most: one in so many."""


@contextmanager
def scratch_folder(nbytes: int, *, on_disk: bool) -> Iterator[Path]:
    """Within the block there is a folder for files of about ``nbytes``.

    ``on_disk`` keeps them out of memory, in the folder that TMPDIR names: where memory is limited, and where
    workers in other processes or on other machines read them.
    """
    place = IN_MEMORY if not on_disk and _fits(nbytes) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def _fits(nbytes: int) -> bool:
    if "TMPDIR" in os.environ or not os.access(IN_MEMORY, os.W_OK):
        return False
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return SPARE * nbytes < free and nbytes < shutil.disk_usage(IN_MEMORY).free
