"""A model put together in the shape of another: the same shards, index and companions, new tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from transfusion.checkpoint import Checkpoint
from transfusion.workers import Workers
from transfusion.writer.places import write_json, write_text
from transfusion.writer.shards import Parcel, write_shard
from transfusion.writer.workshop import Workshop

Files: TypeAlias = dict[str, dict[str, Parcel]]
"""For each file of an output, the tensors that go into it."""


def named(shards: Mapping[Path, dict[str, Parcel]], path: Path, library: str) -> Files:
    """What goes into each of the original's files, by the names under which this library looks for them.

    An output that ends in ``.safetensors`` becomes that single file, any other a folder.
    """
    if path.suffix == ".safetensors":
        return {path.name: {name: one for parts in shards.values() for name, one in parts.items()}}
    names = _names(list(shards), library)
    files: Files = {name: {} for name in names}
    for name, parts in zip(names, shards.values(), strict=True):
        files[name] |= parts
    return files


def write_shards(shop: Workshop, files: Files, *, remarks: set[str], workers: Workers | None = None) -> None:
    """Write the weights into a workshop that has begun; finished shards are not made again.

    What is remarked while shards are made is kept with them.
    """
    remarks |= remarks_in(shop)
    for name, parts in files.items():
        if name not in shop.finished:
            before = set(remarks)
            digest = write_shard(shop.output / name, parts, workers)
            shop.finish(name, sha256=digest, remarks=sorted(remarks - before))


def remarks_in(shop: Workshop) -> set[str]:
    """What was remarked while the finished shards were made."""
    return {remark for told in shop.finished.values() for remark in told["remarks"]}


def complete_model(
    shop: Workshop,
    files: Files,
    *,
    like: Checkpoint,
    config: Mapping[str, Any] | None,
    companions: Iterable[Path],
    texts: Callable[[Mapping[str, str]], Mapping[str, str]],
) -> None:
    """Write what belongs beside the weights; ``texts`` gets the SHA-256 of every shard, and gives the text
    of further files.
    """
    told = texts({name: told["sha256"] for name, told in shop.finished.items()})
    if shop.path.suffix == ".safetensors":
        return
    if len(files) > 1:
        total = sum(parcel.nbytes for parts in files.values() for parcel in parts.values())
        placed = {tensor: name for name, parts in files.items() for tensor in parts}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        write_json(shop.output / "model.safetensors.index.json", index)
    if config is not None and like.config_name:
        write_json(shop.output / like.config_name, config)
    for companion in companions:
        shutil.copy2(companion, shop.output / companion.name)
    for name, text in told.items():
        write_text(shop.output / name, text)


def _names(originals: Sequence[Path], library: str) -> list[str]:
    """The names under which the library looks for what was in these files, one for each.

    open_clip reads a single file, so all go there. Shards keep their names, unless two would then share one.
    """
    if library == "open_clip" and any(original.name.startswith("open_clip") for original in originals):
        return ["open_clip_model.safetensors"] * len(originals)
    if len(originals) == 1:
        return ["model.safetensors"]
    names = [f"{original.stem.replace('pytorch_model', 'model')}.safetensors" for original in originals]
    if len({name.casefold() for name in names}) == len(names):
        return names
    return [f"model-{number:05}-of-{len(names):05}.safetensors" for number in range(1, len(names) + 1)]
