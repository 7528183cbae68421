"""Checkpoints: headers first, bytes when asked for.

A safetensors file, a ``.pt``/``.bin`` file, or a folder in the style of transformers, open_clip or timm.
Opening one reads the headers only; `Checkpoint.read` brings in a single tensor. Pickles go through
torch's restricted unpickler and nothing else. `Checkpoint.of` is one in memory, without any file.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from transfusion.errors import CheckpointError, listing
from transfusion.references import PICKLES, resolve

WEIGHTS = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
CONFIGS = ("config.json", "open_clip_config.json")
MEMORY = Path("<memory>")
"""Where a checkpoint is that no file holds."""

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
BLOCK = 2**19
"""How many numbers are worked on at a time, unless a single row has more: few enough to stay in a cache."""
MAPPED = 2**25
"""After so many bytes files are mapped anew: what was read through a mapping counts as memory in use."""
_SHARDED = re.compile(r".+-\d{5}-of-\d{5}\.(safetensors|bin)")


Rows: TypeAlias = slice | Tensor
"""Some of the first dimension: from one place to another, or by their numbers."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass
class Checkpoint:
    """A model on disk, or in memory: its tensors by name, its configuration, and its other files."""

    label: str
    """As the user wrote it."""
    root: Path
    """The folder, or the file itself."""
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]
    """The files with weights, in order."""
    config: dict[str, Any] | None = None
    config_name: str | None = None
    module: nn.Module | None = field(default=None, repr=False)
    """The module whose tensors these are, if it was given in memory."""
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)
    _seen: int = field(default=0, repr=False)
    """How much has been read through the files that are open now."""
    _stamps: dict[Path, tuple[int, int] | None] = field(default_factory=dict, init=False, repr=False)
    """The size and the time of every file when it was opened."""

    def __post_init__(self) -> None:
        self._stamps = {file: _stamp(file) for file in self.files}

    def require_unchanged(self) -> None:
        """Refuse files that somebody has changed since they were opened."""
        changed = [file.name for file, stamp in self._stamps.items() if _stamp(file) != stamp]
        if changed:
            raise CheckpointError(
                f"{self.label}: {listing(changed)} changed while it was being read",
                hint="run again when nobody is writing to it",
            )

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """One tensor, or some of its rows, as it is stored."""
        info = self.tensors[name]
        try:
            tensor: Tensor = (
                self._unpickled(info.file)[name]
                if info.file.suffix in PICKLES
                else self._mapped(info.file).get_tensor(name)
            )
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{info.file}: {name} cannot be read ({error})",
                hint="the file changed or was damaged after it was opened; fetch it again",
            ) from error
        if rows is not None:
            tensor = tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)
        self._seen += tensor.nbytes
        return tensor

    def _unpickled(self, file: Path) -> dict[str, Tensor]:
        if file not in self._open:
            self._open[file] = _unpickle(file)
        state: dict[str, Tensor] = self._open[file]
        return state

    def _mapped(self, file: Path) -> Any:
        if self._seen > MAPPED:
            self.release()
        opened = self._open.get(file)
        if opened is None:
            opened = self._open[file] = safe_open(file, framework="pt")
        return opened

    def read_finite(self, name: str, rows: Rows | None = None) -> Tensor:
        """One tensor, or some of its rows; values that are not numbers are refused."""
        tensor = self.read(name, rows)
        if tensor.is_floating_point() and not all_finite(tensor):
            raise CheckpointError(
                f"{self.label if self.in_memory else self.tensors[name].file}: {name} contains NaN or"
                " infinite values",
                hint="the model is broken, or was saved in a type too small for it",
            )
        return tensor

    def release(self) -> None:
        """Close the files that are read by mapping them; they are opened again when they are needed."""
        for file in [file for file in self._open if file.suffix not in PICKLES]:
            self._open.pop(file, None)
        self._seen = 0

    @property
    def in_memory(self) -> bool:
        return self.root == MEMORY

    @property
    def told_by(self) -> str | None:
        """What the configuration is called in messages."""
        return "its configuration" if self.in_memory else self.config_name

    @property
    def parameters(self) -> int:
        return sum(torch.Size(info.shape).numel() for info in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def companions(self) -> list[Path]:
        """The folder's other files that belong to a model: tokenizer, processor, generation."""
        if not self.root.is_dir():
            return []
        skipped = {*CONFIGS, "transfusion.json", "README.md", ".gitattributes"}
        return [
            path
            for path in sorted(self.root.iterdir())
            if path.is_file()
            and path.suffix not in PICKLES | {".safetensors", ".h5", ".msgpack", ".onnx", ".ot"}
            and path.name not in skipped
            and not path.name.endswith(".index.json")
        ]

    @classmethod
    def open(
        cls, reference: str | Path, *, config: str | Path | Mapping[str, Any] | None = None
    ) -> Checkpoint:
        """Find a model and read its headers; ``config`` is used instead of one that is found beside it."""
        root = resolve(reference)
        checkpoint = _open_folder(root, str(reference)) if root.is_dir() else _open_file(root, str(reference))
        if config is not None:
            checkpoint.configure(config)
        if not checkpoint.tensors:
            raise CheckpointError(
                f"{reference}: there is not a single tensor in it", hint="is this the right file?"
            )
        return checkpoint

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        config: str | Path | Mapping[str, Any] | None = None,
        label: str = "a state dict in memory",
        module: nn.Module | None = None,
    ) -> Checkpoint:
        """Tensors in memory as a checkpoint; they are shared, not copied."""
        _refuse_what_holds_no_values(tensors, label)
        checkpoint = cls(label, MEMORY, {}, (), module=module)
        if config is not None:
            checkpoint.configure(config)
        # Named as a pickle that is open already: `read` and `release` need not know that there is no file.
        file = MEMORY / WEIGHTS[3 if checkpoint.config_name == CONFIGS[1] else 2]
        here = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        checkpoint.tensors = {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, file) for name, tensor in here.items()
        }
        checkpoint.files, checkpoint._open = (file,), {file: here}
        return checkpoint

    def configure(self, config: str | Path | Mapping[str, Any]) -> None:
        """Use this configuration: a file of JSON, or its content."""
        self.config = dict(config) if isinstance(config, Mapping) else read_json(Path(config))
        self.config_name = CONFIGS["model_cfg" in self.config]


def _refuse_what_holds_no_values(tensors: Mapping[str, Tensor], label: str) -> None:
    odd = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if odd or not tensors:
        raise CheckpointError(
            f"{label}: a mapping of names to tensors was expected"
            + (f", and {listing(odd)} are something else" if odd else ", and it is empty"),
            hint="give a module, or its state_dict() alone",
        )
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{label}: {len(empty)} tensor(s) have no values yet (device meta): {listing(empty)}",
            hint="load the weights into memory first, without offloading",
        )


# ── folders and files ────────────────────────────────────────────────────────────────────────


def _open_folder(root: Path, label: str) -> Checkpoint:
    if index := next((path for path in sorted(root.glob("*.index.json"))), None):
        files, placed = _read_index(index)
    else:
        files, placed = [_only_weights(root)], None
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors |= headers(file)
    if placed is not None:
        absent = [name for name, file in placed.items() if tensors.get(name) is None]
        if absent:
            raise CheckpointError(
                f"{root}: the index names {len(absent)} tensor(s) that no shard holds: {listing(absent)}",
                hint="index and shards are of different models; fetch the folder again",
            )
        unlisted = [name for name in tensors if name not in placed]
        if unlisted:
            raise CheckpointError(
                f"{root}: the shards hold {len(unlisted)} tensor(s) that the index does not name:"
                f" {listing(unlisted)}",
                hint="index and shards are of different models; fetch the folder again",
            )
    for name in CONFIGS:
        if (root / name).exists():
            return Checkpoint(label, root, tensors, tuple(files), read_json(root / name), name)
    return Checkpoint(label, root, tensors, tuple(files))


def _only_weights(root: Path) -> Path:
    for name in WEIGHTS:
        if (root / name).exists():
            return root / name
    candidates = sorted(path for path in root.iterdir() if path.suffix in PICKLES | {".safetensors"})
    if not candidates:
        adapter = (root / "adapter_config.json").exists()
        raise CheckpointError(
            f"{root}: no weights in this folder (looked for {listing(WEIGHTS)})",
            hint="this is an adapter; give it to 'transport' as FINETUNED, with its base as --base"
            if adapter
            else "give the folder that holds the model's files",
        )
    if any(_SHARDED.fullmatch(path.name) for path in candidates):
        raise CheckpointError(
            f"{root}: shards without an index ({listing(path.name for path in candidates)})",
            hint="fetch the .index.json that belongs to them",
        )
    if len(candidates) > 1:
        raise CheckpointError(
            f"{root}: several files with weights ({listing(path.name for path in candidates)})",
            hint="name the one you mean",
        )
    if candidates[0].name.startswith("adapter_model"):
        raise CheckpointError(
            f"{root}: this is an adapter, not a model",
            hint="give it to 'transport' as FINETUNED, with its base as --base",
        )
    return candidates[0]


def _read_index(index: Path) -> tuple[list[Path], dict[str, str]]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(f, str) for f in placed.values()):
        raise CheckpointError(f"{index}: there is no weight_map in it", hint="fetch the file again")
    files = [index.parent / name for name in dict.fromkeys(placed.values())]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {index.name} names {len(missing)} shard(s) that are not there:"
            f" {listing(missing)}",
            hint="the download is incomplete; fetch the missing files",
        )
    return files, placed


def _open_file(path: Path, label: str) -> Checkpoint:
    if path.suffix not in PICKLES | {".safetensors"}:
        raise CheckpointError(
            f"{path}: not a kind of file that holds weights",
            hint="give a .safetensors, .bin or .pt file, or a folder",
        )
    if path.name.startswith("adapter_model"):
        raise CheckpointError(
            f"{path}: these are the weights of an adapter",
            hint="give the adapter's folder, which also holds its adapter_config.json",
        )
    checkpoint = Checkpoint(label, path, headers(path), (path,))
    for name in CONFIGS:
        if (path.parent / name).exists():
            checkpoint.config, checkpoint.config_name = read_json(path.parent / name), name
            break
    return checkpoint


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        told = file.stat()
    except OSError:
        return None
    return told.st_size, told.st_mtime_ns


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path}: not readable as JSON ({error})", hint="fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object was expected", hint="fetch the file again")
    return value


def headers(file: Path) -> dict[str, TensorInfo]:
    """What a file of weights says that it holds."""
    if file.suffix in PICKLES:
        return {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, file)
            for name, tensor in _unpickle(file).items()
        }
    result: dict[str, TensorInfo] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            if "transfusion" in (opened.metadata() or {}):
                raise CheckpointError(
                    f"{file}: a file of π, not a model", hint="the arguments may be in another order"
                )
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                piece = opened.get_slice(name)
                dtype = SAFETENSORS_DTYPES.get(piece.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"{file}: {name} is stored as {piece.get_dtype()}, which is not supported",
                        hint="quantised checkpoints cannot be moved; use the original weights",
                    )
                result[name] = TensorInfo(name, tuple(piece.get_shape()), dtype, file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: not a whole safetensors file ({error})",
            hint="it may be truncated by an interrupted download; fetch it again",
        ) from error
    return result


def _unpickle(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: this pickle holds more than tensors and would execute code; it was not loaded",
            hint="convert it to safetensors where you trust it, or save only its state_dict()",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{file}: not a whole checkpoint ({str(error).splitlines()[0]})",
            hint="it may be truncated by an interrupted download; fetch it again",
        ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise CheckpointError(
            f"{file}: a dictionary of tensors was expected",
            hint="save the model's state_dict() alone",
        )
    return state


def all_finite(tensor: Tensor, stored_as: torch.dtype | None = None) -> bool:
    """Whether all values are numbers, in their own type and in the one that they are to be stored in.

    The smallest and the largest show it at a fraction of the cost of looking at each: NaN would be both.
    """
    if not tensor.numel():
        return True
    ends = torch.stack(torch.aminmax(tensor))
    return bool(torch.isfinite(ends if stored_as is None else ends.to(stored_as)).all())


def row_blocks(shape: Sequence[int], limit: int | None = BLOCK) -> Iterator[slice]:
    """The rows of a tensor in blocks of at most so many numbers, or of one row; without limit, all."""
    height = shape[0] if shape else 1
    width = max(1, torch.Size(shape[1:]).numel())
    step = max(1, height if limit is None else limit // width)
    return (slice(start, min(start + step, height)) for start in range(0, height, step))


def tensor_digest(tensor: Tensor) -> bytes:
    """A hash of dtype, shape and content."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(content(tensor))
    return digest.digest()


def content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, as a file has them."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
