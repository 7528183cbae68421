"""Writing: everything goes to a temporary place first and appears whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import save_file
from torch import Tensor

from transfusion.checkpoint import Checkpoint
from transfusion.errors import OutputError


def require_writable(path: Path, *, force: bool) -> None:
    """Refuse, before any work is done, a place that exists or that cannot be written."""
    if path.exists() and not force:
        raise OutputError(f"{path} exists already", hint="give another name, or --force to replace it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OutputError(
            f"{path.parent} cannot be written ({error.strerror or error})",
            hint="choose another place for the output",
        ) from error


def publish_file(path: Path, write: Callable[[Path], object], *, force: bool) -> Path:
    """Let ``write`` fill a temporary file and put it at ``path`` in one step."""
    require_writable(path, force=force)
    if path.is_dir():
        raise OutputError(f"{path} is a folder", hint="give a file name for the output")
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(staged)
        staged.chmod(0o666 & ~_umask())
        os.replace(staged, path)
    except OSError as error:
        raise OutputError(
            f"{path} could not be written ({error.strerror or error}); nothing was changed",
            hint="check the space and the rights at that place",
        ) from error
    finally:
        staged.unlink(missing_ok=True)
    return path


@contextmanager
def staged_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder that takes the place of ``path`` when the block ends without an error."""
    require_writable(path, force=force)
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.replaced")
    try:
        staged.mkdir()
        yield staged
        if path.exists():
            os.rename(path, replaced)
        try:
            os.rename(staged, path)
        except OSError:
            if replaced.exists():
                os.rename(replaced, path)
            raise
    except OSError as error:
        raise OutputError(
            f"{path} could not be written ({error.strerror or error}); nothing was changed",
            hint="check the space and the rights at that place",
        ) from error
    finally:
        for leftover in (staged, replaced):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, marked as torch's, as the libraries expect."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


Shards: TypeAlias = dict[Path, dict[str, Callable[[], Tensor]]]
"""For each of the original's files, the tensors to write and how to get each."""


def write_model(
    path: Path,
    shards: Shards,
    *,
    like: Checkpoint,
    config: Mapping[str, Any] | None,
    story: Callable[[], Mapping[str, Any]],
    force: bool,
) -> Path:
    """A model in the shape of another: the same shards, index and companions, new tensors.

    A path that ends in ``.safetensors`` becomes that single file; any other becomes a folder.
    ``story`` is asked once all tensors are written, and kept as ``transfusion.json``.
    """
    if path.suffix == ".safetensors":
        tensors = {name: get() for parts in shards.values() for name, get in parts.items()}
        story()
        return publish_file(path, lambda staged: write_shard(staged, tensors), force=force)
    with staged_folder(path, force=force) as staged:
        placed: dict[str, str] = {}
        total = 0
        for original, parts in shards.items():
            name = as_safetensors(original, alone=len(shards) == 1)
            tensors = {key: get() for key, get in parts.items()}
            total += sum(tensor.nbytes for tensor in tensors.values())
            placed |= dict.fromkeys(tensors, name)
            write_shard(staged / name, tensors)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": placed}
            write_json(staged / "model.safetensors.index.json", index)
        if config is not None and like.config_name:
            write_json(staged / like.config_name, config)
        for companion in like.companions():
            shutil.copy2(companion, staged / companion.name)
        write_json(staged / "transfusion.json", story())
    return path


def as_safetensors(original: Path, *, alone: bool) -> str:
    """The name under which the libraries look for what was in ``original``."""
    if original.name.startswith("open_clip"):
        return "open_clip_model.safetensors"
    if alone:
        return "model.safetensors"
    return f"{original.stem.replace('pytorch_model', 'model')}.safetensors"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
