"""Shards: safetensors files written as their tensors are made, block by block.

The header of a safetensors file names every tensor with its type, shape and place. All of that is known
before any number is, so a file of any size can be written with the memory of one block.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from transfusion.checkpoint import SAFETENSORS_DTYPES, content
from transfusion.writer.places import umask

_WORDS = {dtype: word for word, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class Parcel:
    """A tensor that is yet to be made: what a header says about it, and how to get it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterable[Tensor]]
    """Its content, from the first number to the last."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @classmethod
    def of(cls, tensor: Tensor) -> Parcel:
        """A tensor that is there already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: [tensor])


def write_shard(path: Path, tensors: Mapping[str, Parcel]) -> str:
    """One safetensors file, marked as torch's, as the libraries expect; gives its SHA-256."""
    wide_first = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    ordered = {name: tensors[name] for name in wide_first}  # so that every tensor is aligned
    with path.open("wb") as file, _pen(file) as write:
        write(_header(ordered))
        for name, parcel in ordered.items():
            written = 0
            for block in parcel.blocks():
                bytes_ = content(block.to(parcel.dtype))
                written += len(bytes_)
                write(bytes_)
            if written != parcel.nbytes:
                raise AssertionError(f"{name}: {written} bytes were made, and {parcel.nbytes} announced")
        digest = write.finish()
        os.fsync(file.fileno())
    path.chmod(0o666 & ~umask())
    return digest


def _header(tensors: Mapping[str, Parcel]) -> bytes:
    told: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, parcel in tensors.items():
        told[name] = {
            "dtype": _WORDS[parcel.dtype],
            "shape": list(parcel.shape),
            "data_offsets": [place, place + parcel.nbytes],
        }
        place += parcel.nbytes
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Pen:
    """Writes and hashes in a thread of its own, one block behind the thread that makes them."""

    def __init__(self, file: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self._file, self._thread = file, thread
        self._digest = hashlib.sha256()
        self._last: Future[None] | None = None

    def __call__(self, block: bytes | memoryview) -> None:
        self._wait()
        self._last = self._thread.submit(self._put, block)

    def _put(self, block: bytes | memoryview) -> None:
        self._file.write(block)
        self._digest.update(block)

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def finish(self) -> str:
        self._wait()
        self._file.flush()
        return self._digest.hexdigest()


@contextmanager
def _pen(file: BinaryIO) -> Iterator[_Pen]:
    with ThreadPoolExecutor(1) as thread:
        yield _Pen(file, thread)
