"""Find the weights of a model: in a folder, in an index and its shards, or in a single file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from transfusion.errors import CheckpointError, listing
from transfusion.files.lora_keys import is_lora
from transfusion.files.references import PICKLES
from transfusion.files.tensor_files import TensorInfo, content, headers, read_stored, row_blocks
from transfusion.runtime.untrusted_files import path_inside, read_json, require_closed, validate

WEIGHTS = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
)
_KINDS = PICKLES | {".safetensors"}
_SHARDED = re.compile(r".+-\d{5}-of-\d{5}\.(safetensors|bin)")
Shard: TypeAlias = Mapping[str, TensorInfo]
_ADAPTER_FOLDER = "give the adapter's folder, which also holds its adapter_config.json"
_PEFT = "base_model.model."
_MIXED = "index and shards belong to different models; fetch the folder again"


def weights_in(root: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a folder or of a file, in the order of its files."""
    tensors = _in_folder(root) if root.is_dir() else _in_file(root)
    if is_lora(tensors):
        _refuse_lora(root, tensors)
    return tensors


def _refuse_lora(root: Path, names: Iterable[str]) -> None:
    """Refuse a LoRA in the place of a model. PEFT keeps a part of it in another file."""
    if any(name.startswith(_PEFT) for name in names):
        raise CheckpointError(f"{root}: these are the weights of an adapter", hint=_ADAPTER_FOLDER)
    raise CheckpointError(
        f"{root}: this is a LoRA, and not a model",
        hint="give it to 'transport' as FINETUNED, with its base as `base`; 'inspect' shows what it is for",
    )


def _in_folder(root: Path) -> dict[str, TensorInfo]:
    require_closed(root)
    index = next(iter(sorted(root.glob("*.index.json"))), None)
    if index is None:
        return headers(_only_weights(root))
    placed = _read_index(index)
    shards = {name: headers(root / name) for name in dict.fromkeys(placed.values())}
    _require_agreement(root, placed, shards)
    _refuse_other_copies(root, placed, shards)
    return {name: shards[file][name] for file in shards for name in shards[file] if placed[name] == file}


def _require_agreement(root: Path, placed: Mapping[str, str], shards: Mapping[str, Shard]) -> None:
    """Refuse tensors that are not in the shard that the index names, or that the index does not name."""
    if absent := [name for name, file in placed.items() if name not in shards[file]]:
        raise CheckpointError(
            f"{root}: the index names {len(absent)} tensor(s) that their shard does not hold:"
            f" {listing(f'{name} in {placed[name]}' for name in absent)}",
            hint=_MIXED,
        )
    if unlisted := [name for shard in shards.values() for name in shard if name not in placed]:
        raise CheckpointError(
            f"{root}: the shards hold {len(unlisted)} tensor(s) that the index does not name:"
            f" {listing(unlisted)}",
            hint=_MIXED,
        )


def _refuse_other_copies(root: Path, placed: Mapping[str, str], shards: Mapping[str, Shard]) -> None:
    """Refuse copies of a tensor in other shards than the index names, unless they are equal."""
    for file, shard in shards.items():
        for name, info in shard.items():
            if placed[name] != file and not _same(info, shards[placed[name]][name]):
                raise CheckpointError(
                    f"{root}: {name} is in {placed[name]}, as the index says, and differs in {file}",
                    hint=_MIXED,
                )


def _same(one: TensorInfo, other: TensorInfo) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    blocks = row_blocks(one.shape) if one.shape else [None]
    return all(content(read_stored(one, rows)) == content(read_stored(other, rows)) for rows in blocks)


def _only_weights(root: Path) -> Path:
    for name in WEIGHTS:
        if (root / name).exists():
            return root / name
    candidates = sorted(path for path in root.iterdir() if path.suffix in _KINDS)
    if not candidates:
        adapter = (root / "adapter_config.json").exists()
        raise CheckpointError(
            f"{root}: no weights in this folder (looked for {listing(WEIGHTS)})",
            hint="this is an adapter; give it to 'transport' as FINETUNED, with its base as `base`"
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
            hint="give the path of one of the files",
        )
    if candidates[0].name.startswith("adapter_model"):
        raise CheckpointError(
            f"{root}: this is an adapter, not a model",
            hint="give it to 'transport' as FINETUNED, with its base as `base`",
        )
    return candidates[0]


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of every tensor."""
    found = read_json(index)
    if "weight_map" not in found:
        raise CheckpointError(f"{index}: it has no weight_map", hint="fetch the file again")
    placed = validate(
        found["weight_map"], dict[str, str], f"{index}: weight_map", hint="fetch the file again"
    )
    if not placed:
        raise CheckpointError(f"{index}: its weight_map is empty", hint="fetch the file again")
    for name in dict.fromkeys(placed.values()):
        if Path(name).suffix not in _KINDS:
            raise CheckpointError(
                f"{index}: it names {name!r}, which is not a kind of file that holds weights",
                hint="fetch the file again",
            )
        path_inside(index.parent, index.parent / name)
    missing = [name for name in dict.fromkeys(placed.values()) if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {index.name} names {len(missing)} shard(s) that do not exist:"
            f" {listing(missing)}",
            hint="the download is incomplete; fetch the missing files",
        )
    return placed


def _in_file(path: Path) -> dict[str, TensorInfo]:
    if path.suffix not in _KINDS:
        raise CheckpointError(
            f"{path}: not a kind of file that holds weights",
            hint="give a .safetensors, .bin or .pt file, or a folder",
        )
    if path.name.startswith("adapter_model"):
        raise CheckpointError(
            f"{path}: these are the weights of an adapter",
            hint=_ADAPTER_FOLDER,
        )
    return headers(path)
