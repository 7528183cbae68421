"""Write a model: shards while their tensors are computed, block by block, then configuration and index.

The header of a safetensors file names every tensor with its type, shape and offset. The header is known
before any value is computed, so a file of any size can be written with the memory of one block.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from transfusion.files.checkpoint import Checkpoint
from transfusion.files.publishing import StagingFolder, write_json, write_text
from transfusion.files.tensor_files import SAFETENSORS_DTYPES, content
from transfusion.runtime.engines import Threads

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
    with path.open("wb") as file:
        for piece in pieces:
            written += file.write(piece)
        if written != announced:
            raise AssertionError(
                f"{path}: {written} bytes were written, but the header announces {announced}"
            )
        file.flush()
        os.fsync(file.fileno())


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


# ── models ────────────────────────────────────────────────────────────────────────────────

DIFFUSION = "diffusion_pytorch_model"
"""The name of weights in folders of diffusers."""
Files: TypeAlias = dict[str, dict[str, LazyTensor]]
"""For each file of an output, the tensors that go into it."""


def output_shard_name(shards: Mapping[Path, dict[str, LazyTensor]], path: Path, library: str) -> Files:
    """Return the tensors of each output file, by the file names that the library expects.

    An output that ends in ``.safetensors`` becomes that single file, any other a folder.
    """
    if path.suffix == ".safetensors":
        return {path.name: {name: one for parts in shards.values() for name, one in parts.items()}}
    names = _names(list(shards), library)
    files: Files = {name: {} for name in names}
    for name, parts in zip(names, shards.values(), strict=True):
        files[name] |= parts
    return files


def write_shards(
    staging: StagingFolder,
    files: Files,
    *,
    changed_tensors: set[str],
    workers: Threads | None = None,
) -> None:
    """Write the weights into a staging folder; finished shards are not written again.

    The names of changed tensors are kept with each shard.
    """
    changed_tensors |= {name for shard in staging.finished.values() for name in shard["changed_tensors"]}
    for name, parts in files.items():
        if name not in staging.finished:
            before = set(changed_tensors)
            write_shard(staging.output / name, parts, workers)
            staging.finish(name, changed_tensors=sorted(changed_tensors - before))


def write_behind(staging: StagingFolder, folders: Files) -> None:
    """Write the weights of the modules behind an encoder, each into a folder of its own; they are small."""
    for folder, tensors in folders.items():
        (staging.output / folder).mkdir(exist_ok=True)
        write_shard(staging.output / folder / "model.safetensors", tensors)


def complete_model(
    staging: StagingFolder,
    files: Files,
    *,
    like: Checkpoint,
    config: Mapping[str, Any] | None,
    auxiliary_files: Iterable[Path],
    texts: Mapping[str, str],
) -> None:
    """Write the configuration, the index, the auxiliary files and further texts."""
    if staging.path.suffix == ".safetensors":
        return
    if len(files) > 1:
        total = sum(lazy_tensor.nbytes for parts in files.values() for lazy_tensor in parts.values())
        placed = {tensor: name for name, parts in files.items() for tensor in parts}
        stem = DIFFUSION if all(name.startswith(DIFFUSION) for name in files) else "model"
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        write_json(staging.output / f"{stem}.safetensors.index.json", index)
    if config is not None and like.config_name:
        write_json(staging.output / like.config_name, config)
    for auxiliary_file in auxiliary_files:
        shutil.copy2(auxiliary_file, staging.output / auxiliary_file.name)
    for name, text in texts.items():
        (staging.output / name).parent.mkdir(exist_ok=True)
        write_text(staging.output / name, text)


def _names(originals: Sequence[Path], library: str) -> list[str]:
    """Return an output name for each file: the name under which the library looks for its tensors.

    open_clip reads a single file, so all tensors go there. Shards keep their names unless two would be equal.
    """
    if library == "open_clip" and any(original.name.startswith("open_clip") for original in originals):
        return ["open_clip_model.safetensors"] * len(originals)
    if len(originals) == 1:
        return [f"{DIFFUSION if library == 'diffusers' else 'model'}.safetensors"]
    if library == "diffusers":
        return [f"{original.stem}.safetensors" for original in originals]
    names = [f"{original.stem.replace('pytorch_model', 'model')}.safetensors" for original in originals]
    if len({name.casefold() for name in names}) == len(names):
        return names
    return [f"model-{number:05}-of-{len(names):05}.safetensors" for number in range(1, len(names) + 1)]
