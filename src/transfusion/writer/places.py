"""Places: what may be written where, and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_leftovers(path)
        staged = _temporary(path, "partial")
        try:
            write(staged)
            staged.chmod(0o666 & ~umask())
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
    return path


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Within the block, errors of the operating system are told as ours."""
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
    """Remove what runs that were killed have left beside this file."""
    for leftover in path.parent.glob(f".{path.name}.*.partial"):
        process = leftover.name.removesuffix(".partial").rsplit(".", 1)[-1]
        if process.isdigit() and not _alive(int(process)):
            leftover.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file, for people to read too."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def umask() -> int:
    """What this process withholds from the rights of new files."""
    current = os.umask(0)
    os.umask(current)
    return current
