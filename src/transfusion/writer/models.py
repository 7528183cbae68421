"""A model put together in the shape of another: the same shards, index and companions, new tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from transfusion.checkpoint import Checkpoint
from transfusion.workers import Workers
from transfusion.writer.places import write_json
from transfusion.writer.shards import Parcel, write_shard
from transfusion.writer.workshop import Workshop

Shards: TypeAlias = dict[Path, dict[str, Parcel]]
"""For each of the original's files, the tensors to write."""


def write_model(
    shop: Workshop,
    shards: Shards,
    *,
    like: Checkpoint,
    config: Mapping[str, Any] | None,
    companions: Iterable[Path],
    remarks: set[str],
    epilogue: Callable[[Mapping[str, str]], Mapping[str, str]],
    workers: Workers | None = None,
) -> None:
    """Write a model's files into a workshop that has begun; finished shards are not made again.

    An output that ends in ``.safetensors`` becomes that single file, any other a folder. What is remarked
    while shards are made is kept with them. The epilogue gets the SHA-256 of every shard, and gives the
    text of further files.
    """
    alone = shop.path.suffix == ".safetensors"
    if alone:
        shards = {shop.path: {name: one for parts in shards.values() for name, one in parts.items()}}
    placed: dict[str, str] = {}
    for original, parts in shards.items():
        name = shop.path.name if alone else as_safetensors(original, alone=len(shards) == 1)
        placed |= dict.fromkeys(parts, name)
        if name in shop.finished:
            remarks |= set(shop.finished[name]["remarks"])
            continue
        digest = write_shard(shop.output / name, parts, workers)
        shop.finish(name, sha256=digest, remarks=sorted(remarks))
    digests = {name: str(told["sha256"]) for name, told in shop.finished.items()}
    texts = epilogue(digests)
    if alone:
        return
    if len(shards) > 1:
        total = sum(parcel.nbytes for parts in shards.values() for parcel in parts.values())
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        write_json(shop.output / "model.safetensors.index.json", index)
    if config is not None and like.config_name:
        write_json(shop.output / like.config_name, config)
    for companion in companions:
        shutil.copy2(companion, shop.output / companion.name)
    for name, text in texts.items():
        (shop.output / name).write_text(text)


def as_safetensors(original: Path, *, alone: bool) -> str:
    """The name under which the libraries look for what was in ``original``."""
    if original.name.startswith("open_clip"):
        return "open_clip_model.safetensors"
    if alone:
        return "model.safetensors"
    return f"{original.stem.replace('pytorch_model', 'model')}.safetensors"
