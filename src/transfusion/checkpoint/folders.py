"""Where the weights of a model are: a folder of whatever style, an index and its shards, a single file."""

from __future__ import annotations

import re
from pathlib import Path

from transfusion.checkpoint.files import TensorInfo, headers
from transfusion.errors import CheckpointError, listing
from transfusion.inputs import read_json
from transfusion.references import PICKLES

WEIGHTS = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
_SHARDED = re.compile(r".+-\d{5}-of-\d{5}\.(safetensors|bin)")
_MIXED = "index and shards are of different models; fetch the folder again"


def weights_in(root: Path) -> dict[str, TensorInfo]:
    """The tensors of a folder or of a file, in the order of its files."""
    return _in_folder(root) if root.is_dir() else _in_file(root)


def _in_folder(root: Path) -> dict[str, TensorInfo]:
    index = next(iter(sorted(root.glob("*.index.json"))), None)
    if index is None:
        return headers(_only_weights(root))
    placed = _read_index(index)
    tensors: dict[str, TensorInfo] = {}
    for name in dict.fromkeys(placed.values()):
        tensors |= headers(root / name)
    if absent := [name for name in placed if name not in tensors]:
        raise CheckpointError(
            f"{root}: the index names {len(absent)} tensor(s) that no shard holds: {listing(absent)}",
            hint=_MIXED,
        )
    if unlisted := [name for name in tensors if name not in placed]:
        raise CheckpointError(
            f"{root}: the shards hold {len(unlisted)} tensor(s) that the index does not name:"
            f" {listing(unlisted)}",
            hint=_MIXED,
        )
    return tensors


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


def _read_index(index: Path) -> dict[str, str]:
    """The file of every tensor."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(f, str) for f in placed.values()):
        raise CheckpointError(f"{index}: there is no weight_map in it", hint="fetch the file again")
    missing = [name for name in dict.fromkeys(placed.values()) if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {index.name} names {len(missing)} shard(s) that are not there:"
            f" {listing(missing)}",
            hint="the download is incomplete; fetch the missing files",
        )
    return placed


def _in_file(path: Path) -> dict[str, TensorInfo]:
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
    return headers(path)
