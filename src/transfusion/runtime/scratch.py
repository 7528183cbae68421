"""Memory: buffers that a thread reuses instead of new pages, and what the C library keeps of freed memory."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_thread = threading.local()


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of this shape, with the type and device of ``like``.

    The tensor is valid until this thread asks for the same name again.
    """
    key, size = (name, like.dtype, like.device), torch.Size(shape).numel()
    buffers: dict[Any, Tensor] = _thread.__dict__.setdefault("buffers", {})
    if key not in buffers or buffers[key].numel() < size:
        buffers.pop(key, None)  # before a larger one is made
        buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
    return buffers[key][:size].view(*shape)


def clear() -> None:
    """Free the scratch memory of this thread."""
    _thread.__dict__.clear()


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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
