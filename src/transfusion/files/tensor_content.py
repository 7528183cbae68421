"""The content of a tensor: finite values, blocks of rows, bytes and hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from blake3 import blake3
from torch import Tensor

BLOCK = 2**19
"""The numbers in a block, unless a single row has more: few enough to stay in the processor's cache."""


def all_finite(tensor: Tensor, stored_as: torch.dtype | None = None) -> bool:
    """Return whether all values are finite, in their own type and in the type that they are stored in.

    Checking the minimum and the maximum is enough, and much faster: both are NaN if any value is.
    """
    if not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # of float8, torch knows no minimum
        tensor = tensor.float()
    ends = torch.stack(torch.aminmax(tensor))
    return bool(torch.isfinite(ends if stored_as is None else ends.to(stored_as).double()).all())


def row_blocks(shape: Sequence[int], limit: int | None = BLOCK) -> Iterator[slice]:
    """Return the rows of a tensor in blocks of at most ``limit`` numbers, or one row; None for no limit."""
    height = shape[0] if shape else 1
    width = max(1, torch.Size(shape[1:]).numel())
    step = max(1, height if limit is None else limit // width)
    return (slice(start, min(start + step, height)) for start in range(0, height, step))


def tensor_digest(tensor: Tensor) -> bytes:
    """Return the BLAKE3 hash of dtype, shape and content."""
    digest = blake3(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(content(tensor))
    return digest.digest()


def content(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as a file holds them."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
