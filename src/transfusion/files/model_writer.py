"""Write a model with the files of another: the same shards, index and auxiliary files, but new tensors."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from transfusion.files.checkpoint import Checkpoint
from transfusion.files.publishing import write_json, write_text
from transfusion.files.shard_writer import LazyTensor, write_shard
from transfusion.files.staging import StagingFolder
from transfusion.runtime.threads import Threads

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
    changed_tensors |= changed_tensors_in(staging)
    for name, parts in files.items():
        if name not in staging.finished:
            before = set(changed_tensors)
            write_shard(staging.output / name, parts, workers)
            staging.finish(name, changed_tensors=sorted(changed_tensors - before))


def changed_tensors_in(staging: StagingFolder) -> set[str]:
    """Return the changed tensors of the finished shards."""
    return {changed for info in staging.finished.values() for changed in info["changed_tensors"]}


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
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        write_json(staging.output / f"{_stem(files)}.safetensors.index.json", index)
    if config is not None and like.config_name:
        write_json(staging.output / like.config_name, config)
    for auxiliary_file in auxiliary_files:
        shutil.copy2(auxiliary_file, staging.output / auxiliary_file.name)
    for name, text in texts.items():
        write_text(staging.output / name, text)


def _stem(files: Iterable[str]) -> str:
    """Return the beginning of the name of an index; diffusers looks for its own."""
    return DIFFUSION if all(name.startswith(DIFFUSION) for name in files) else "model"


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
