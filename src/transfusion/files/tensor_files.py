"""Files of weights: read headers, and tensors or some of their rows.

Tensors of safetensors files are read, not mapped: a file that is truncated during a run gives a known error,
where a mapping would end the program with a signal. Pickles are loaded by the restricted unpickler only.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transfusion.errors import CheckpointError, SettingError
from transfusion.runtime.untrusted_files import require_regular

PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Rows: TypeAlias = slice | Tensor
"""Some rows of a tensor: a range, or their indices."""

Stamp: TypeAlias = tuple[int, int, int]
"""Size, modification time and change time of a file; programs can set back the second only."""

_LARGEST_HEADER = 100_000_000
"""The limit of safetensors: a longer header is refused before it is read."""
SPAN = 2**22
"""Scattered rows within so many bytes are selected from one read of the whole range."""
WIDE_SPAN, DENSE = 2**25, 4
"""The same, if they are at least one row in so many."""


@dataclass(frozen=True)
class TensorInfo:
    """The header entry of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int = 0
    """The first byte in a safetensors file."""
    stamp: Stamp | None = None
    """The stamp of the file before its header was read; None for a tensor in memory."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return self.dtype.itemsize * torch.Size(self.shape[1:]).numel()


def headers(file: Path) -> dict[str, TensorInfo]:
    """Return the name, shape and type of every tensor in a file of weights."""
    details = stamp(require_regular(file))
    if file.suffix in PICKLES:
        return {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, file, stamp=details)
            for name, tensor in unpickle(file).items()
        }
    header, start = _header(file)
    if "transfusion" in header.pop("__metadata__", {}):
        raise CheckpointError(f"{file}: a file of π, not a model", hint="check the order of the arguments")
    for name, info in header.items():
        if info["dtype"] not in SAFETENSORS_DTYPES:
            raise CheckpointError(
                f"{file}: {name} is stored as {info['dtype']}, which is not supported",
                hint="quantised checkpoints cannot be moved; use the original weights",
            )
    return {
        name: TensorInfo(
            name,
            tuple(info["shape"]),
            SAFETENSORS_DTYPES[info["dtype"]],
            file,
            start + info["data_offsets"][0],
            details,
        )
        for name, info in header.items()
    }


def header_metadata(file: Path) -> dict[str, str]:
    """Return the free entries in the header of a safetensors file; none of a pickle."""
    if require_regular(file).suffix in PICKLES:
        return {}
    return dict(_header(file)[0].get("__metadata__", {}))


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, which the library has checked, and where its data begins."""
    try:
        with safe_open(file, framework="pt"):
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(_LARGEST_HEADER, file.stat().st_size):
                raise ValueError(f"a header of {length} bytes")
            return json.loads(opened.read(length)), 8 + length
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: not a complete safetensors file ({error})",
            hint="an interrupted download may have truncated it; fetch it again",
        ) from error


def stamp(file: Path | int) -> Stamp:
    """Return a stamp that changes when a file, given by path or descriptor, is replaced or written."""
    details = os.stat(file)
    return details.st_size, details.st_mtime_ns, details.st_ctime_ns


def read_tensor(info: TensorInfo, rows: Rows | None = None) -> Tensor:
    """Read a tensor of a safetensors file, or some of its rows; refuse a file that has changed."""
    if isinstance(rows, Tensor):
        return _picked(info, rows)
    if rows is None:
        shape, start = info.shape, 0
    else:
        first, last, _ = rows.indices(info.shape[0])
        shape, start = (max(0, last - first), *info.shape[1:]), first * info.row_bytes
    found = torch.empty(shape, dtype=info.dtype)
    read_into(info, [(start, content(found))])
    return found


def _picked(info: TensorInfo, rows: Tensor) -> Tensor:
    """Read rows from anywhere: as one range, if they lie close together, or one by one."""
    if not rows.numel():
        return read_tensor(info, slice(0, 0))
    first, last = (int(end) for end in torch.aminmax(rows))
    span, size = last + 1 - first, info.row_bytes
    if span * size <= (WIDE_SPAN if span <= DENSE * len(rows) else SPAN):
        return read_tensor(info, slice(first, last + 1)).index_select(0, rows - first)
    picked = torch.empty((len(rows), *info.shape[1:]), dtype=info.dtype)
    into = content(picked)
    places = range(0, len(into), size)
    starts = (rows * size).tolist()
    read_into(info, [(start, into[at : at + size]) for start, at in zip(starts, places, strict=True)])
    return picked


def read_into(info: TensorInfo, ranges: Iterable[tuple[int, memoryview]]) -> None:
    """Fill buffers from these bytes of a stored tensor on; refuse a file that has changed."""
    with FileIO(info.file) as file:
        if stamp(file.fileno()) != info.stamp:
            raise OSError("the file changed while it was being read")
        for start, buffer in ranges:
            file.seek(info.offset + start)
            count = file.readinto(buffer)
            while count < len(buffer):  # interrupted by a signal, or more than the system reads at once
                more = file.readinto(buffer[count:])
                if not more:
                    raise OSError("the file ends too early")
                count += more


_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Under which keys trainers store the weights, beside the state of a training."""


def unpickle(file: Path) -> dict[str, Tensor]:
    """Load the tensors of a pickle; refuse a pickle that would execute code."""
    try:
        with warnings.catch_warnings(action="ignore"):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: this pickle holds more than tensors and could execute code; it was not loaded",
            hint="convert it to safetensors where you trust it, or save only its state_dict()",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: not a complete checkpoint ({(str(error) or type(error).__name__).splitlines()[0]})",
            hint="an interrupted download may have truncated it; fetch it again",
        ) from error
    if isinstance(state, dict):
        state = next((state[key] for key in _WRAPPERS if isinstance(state.get(key), dict)), state)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise CheckpointError(
            f"{file}: a dictionary of tensors was expected",
            hint="save the model's state_dict() alone",
        )
    return state


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a type that weights can be stored in, by its name."""
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and chosen not in FLOATS:
        known = ", ".join(str(one).removeprefix("torch.") for one in FLOATS)
        raise SettingError(f"dtype = {dtype} is not a choice", hint=f"choose one of {known}")
    return chosen


# ── content ───────────────────────────────────────────────────────────────────────────────

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
