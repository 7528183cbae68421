"""Writing: everything goes to a temporary place first and appears whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import save_file
from torch import Tensor

from transfusion.checkpoint import Checkpoint
from transfusion.errors import OutputError

_OURS = ("transfusion.json", "config.json", "open_clip_config.json", "adapter_config.json")


def require_writable(
    path: Path, *, force: bool, inputs: Iterable[Path] = (), folder: bool | None = None
) -> None:
    """Refuse, before any work is done, a place that must not or cannot be written.

    With ``force`` an output may be replaced, but never an input, nor a folder that holds one, nor a
    folder that does not look like a model.
    """
    if not path.name:
        raise OutputError(f"{path} cannot be an output", hint="give a name for the output")
    whole = path.resolve()
    for one in map(Path.resolve, inputs):
        if whole == one or whole in one.parents:
            raise OutputError(
                f"{path} is, or holds, an input ({one}); it is never overwritten",
                hint="choose another place for the output",
            )
    if path.exists():
        if not force:
            raise OutputError(f"{path} exists already", hint="give another name, or --force to replace it")
        _require_replaceable(path, folder)
    place = next(parent for parent in whole.parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OutputError(
            f"{path.parent} cannot be written ({error.strerror or error})",
            hint="choose another place for the output",
        ) from error


def _require_replaceable(path: Path, folder: bool | None) -> None:
    if folder is not None and path.is_dir() != folder:
        is_now, should = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise OutputError(
            f"{path} is a {is_now}, and the output is a {should}", hint="give another name for the output"
        )
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        model = names & set(_OURS) or any(name.endswith(".safetensors") for name in names)
        if names and not model:
            raise OutputError(
                f"{path} is a folder that does not look like a model, so it is not replaced",
                hint="give another name, or remove it yourself",
            )


def publish_file(path: Path, write: Callable[[Path], object], *, force: bool) -> Path:
    """Let ``write`` fill a temporary file and put it at ``path`` in one step."""
    require_writable(path, force=force, folder=False)
    with _reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_leftovers(path)
        staged = _temporary(path, "partial")
        try:
            write(staged)
            staged.chmod(0o666 & ~_umask())
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
    return path


@contextmanager
def staged_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder that takes the place of ``path`` when the block ends without an error."""
    require_writable(path, force=force, folder=True)
    with _reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_leftovers(path)
        staged, replaced = _temporary(path, "partial"), _temporary(path, "replaced")
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
        finally:
            for leftover in (staged, replaced):
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} could not be written ({error.strerror or error}); nothing was changed",
            hint="check the space and the rights at that place",
        ) from error


def _temporary(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{what}")


def _sweep_leftovers(path: Path) -> None:
    """Remove what runs that were killed have left beside this output; keep a replaced original."""
    for leftover in path.parent.glob(f".{path.name}.*.partial"):
        process = leftover.name.removesuffix(".partial").rsplit(".", 1)[-1]
        if process.isdigit() and not _alive(int(process)):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, marked as torch's, as the libraries expect."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    path.chmod(0o666 & ~_umask())


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
