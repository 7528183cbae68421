"""Shards: safetensors files that are written while their tensors are computed, block by block.

The header of a safetensors file names every tensor with its type, shape and offset. The header is known
before any value is computed, so a file of any size can be written with the memory of one block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from transfusion.files.publishing import umask
from transfusion.files.tensor_content import content
from transfusion.files.tensor_files import SAFETENSORS_DTYPES
from transfusion.runtime.threads import Threads

_FLUSHED = 2**26
"""The bytes after which the disk is given work."""
_WORDS = {dtype: word for word, dtype in SAFETENSORS_DTYPES.items()}


Block: TypeAlias = Callable[[], Tensor]
"""Computes some rows of a tensor."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed when its shard is written: its header entry and its source."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterable[Block]]
    """Return the blocks of rows in order. Blocks may be computed in parallel."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wrap a tensor that is in memory."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: [lambda: tensor])

    @classmethod
    def joined(cls, parts: Sequence[LazyTensor]) -> LazyTensor:
        """Concatenate the rows of some tensors of one type."""
        first = parts[0]
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        return cls(shape, first.dtype, lambda: chain.from_iterable(part.blocks() for part in parts))


def write_shard(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    workers: Threads | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file, marked as torch's unless it has other metadata."""
    wide_first = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    ordered = {name: tensors[name] for name in wide_first}  # so that every tensor is aligned
    blocks = (block for lazy_tensor in ordered.values() for block in lazy_tensor.blocks())
    made = workers.stream(blocks) if workers else (block() for block in blocks)
    written, header = 0, _header(ordered, metadata or {"format": "pt"})
    announced = len(header) + sum(lazy_tensor.nbytes for lazy_tensor in ordered.values())
    pieces: Iterable[bytes | memoryview] = chain([header], map(content, made))
    with path.open("wb", buffering=0) as file, _Flushing(file.fileno()) as flushing:
        for piece in pieces:
            _write(file, piece)
            written += len(piece)
            flushing.note(written)
        if written != announced:
            raise AssertionError(
                f"{path}: {written} bytes were written, but the header announces {announced}"
            )
        flushing.finish()
    path.chmod(0o666 & ~umask())


def _write(file: FileIO, piece: bytes | memoryview) -> None:
    """Write all of a piece: the system may take less at once."""
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]


class _Flushing:
    """Flushes a file to the disk while it is being written, so that little is left to wait for at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._flushed = descriptor, 0
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def __enter__(self) -> _Flushing:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def note(self, written: int) -> None:
        """Start to flush if there is enough, and nothing else is being flushed."""
        if written - self._flushed >= _FLUSHED and (self._running is None or self._running.done()):
            self._wait()
            self._running, self._flushed = self._pool.submit(os.fsync, self._descriptor), written

    def finish(self) -> None:
        """Flush all; return when everything is on the disk."""
        self._wait()
        os.fsync(self._descriptor)

    def _wait(self) -> None:
        if self._running is not None:
            self._running.result()


def _header(tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> bytes:
    info: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, lazy_tensor in tensors.items():
        info[name] = {
            "dtype": _WORDS[lazy_tensor.dtype],
            "shape": list(lazy_tensor.shape),
            "data_offsets": [place, place + lazy_tensor.nbytes],
        }
        place += lazy_tensor.nbytes
    text = json.dumps(info, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
