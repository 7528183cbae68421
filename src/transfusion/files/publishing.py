"""Publishing: check that an output may be written, and write files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from transfusion.errors import CheckpointError, OutputError, listing
from transfusion.runtime.untrusted_files import read_json, require_regular

MARKER = "transfusion.json"
"""A file in every folder that this program writes. It lists the folder's files under `CONTENTS`."""
CONTENTS = "contents"
_LITTER = {".DS_Store", "Thumbs.db"}
"""Files that operating systems leave behind; they may be deleted."""
_LONGEST_NAME = 255
"""In bytes, on all common file systems."""


def require_writable(
    path: Path, *, force: bool, inputs: Iterable[Path] = (), folder: bool | None = None
) -> None:
    """Refuse, before any work is done, a path that must not or cannot be written.

    With ``force`` an output may be replaced, but never an input, a folder that holds an input, or a folder
    with files that this program did not write.
    """
    _require_name(path)
    whole = path.resolve()
    for one in map(Path.resolve, inputs):
        if whole == one or whole in one.parents:
            raise OutputError(
                f"{path} is, or holds, an input ({one}), and inputs are never overwritten",
                hint="choose another path for the output",
            )
    if path.exists():
        if not force:
            raise OutputError(
                f"{path} exists already", hint="give another name, or `force=True` to replace it"
            )
        _require_replaceable(path, folder)
    place = next(parent for parent in whole.parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OutputError(
            f"{path.parent} cannot be written ({error.strerror or error})",
            hint="choose another path for the output",
        ) from error


def _require_name(path: Path) -> None:
    """Refuse a name that no file can have, and a link to nothing or in a circle."""
    try:
        if not path.name or "\0" in str(path):
            raise OutputError(f"{path} cannot be an output", hint="give a name for the output")
        for place in (path, *path.parents):
            if not place.exists() and place.is_symlink():
                raise OutputError(
                    f"{place} is a link that leads nowhere", hint="remove it, or give another name"
                )
        str(path).encode()
    except OSError as error:
        raise OutputError(
            f"{path} cannot be an output ({error.strerror or error})", hint="give another name for the output"
        ) from error
    except UnicodeEncodeError as error:
        raise OutputError(
            f"{path} cannot be an output: its name is not UTF-8, and safetensors cannot open such a file",
            hint="give another name for the output",
        ) from error


def _require_replaceable(path: Path, folder: bool | None) -> None:
    if folder is not None and path.is_dir() != folder:
        is_now, should = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise OutputError(
            f"{path} is a {is_now}, but the output is a {should}", hint="give another name for the output"
        )
    if not path.is_dir():
        require_regular(path, OutputError)
    elif foreign := _foreign(path):
        raise OutputError(
            f"{path} holds files that this program did not write, and is not replaced: {listing(foreign)}",
            hint="give another name, or move these files away",
        )


def _foreign(folder: Path) -> list[str]:
    """Return the files in a folder that the list of this program, `CONTENTS`, does not name."""
    try:
        known = read_json(folder / MARKER).get(CONTENTS)
    except CheckpointError:
        known = None
    ours = set(known) if isinstance(known, list) and all(isinstance(name, str) for name in known) else set()
    return [name for name in contents(folder) if name not in ours]


def contents(folder: Path) -> list[str]:
    """Return the names of all files in a folder and its subfolders."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [path.relative_to(folder).as_posix() for path in files if path.name not in _LITTER]


def publish_file(path: Path, write: Callable[[Path], object], *, force: bool) -> Path:
    """Let ``write`` fill a temporary file, and rename the file to ``path``."""
    require_writable(path, force=force, folder=False)
    with report_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_leftovers(path)
        staged = _temporary(path, os.getpid())
        try:
            write(staged)
            staged.chmod(0o666 & ~umask())
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
    return path


@contextmanager
def report_os_errors(path: Path) -> Iterator[None]:
    """Within the block, turn errors of the operating system into `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} could not be written ({error.strerror or error}); nothing was changed",
            hint="check free disk space and permissions",
        ) from error


def path_beside(path: Path, ending: str, *, hidden: bool = False) -> Path:
    """Return a path beside a file: its name and an ending, or a hash and the ending if that is too long."""
    dot = "." * hidden
    name = f"{dot}{path.name}{ending}"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f"{dot}{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}{ending}"
    return path.with_name(name)


def _temporary(path: Path, process: int) -> Path:
    return path_beside(path, f".{process}.partial", hidden=True)


def _sweep_leftovers(path: Path) -> None:
    """Remove the temporary files of killed runs beside this file."""
    for leftover in path.parent.iterdir():
        process = leftover.name.removesuffix(".partial").rsplit(".", 1)[-1]
        if process.isdecimal() and leftover == _temporary(path, int(process)) and not _alive(int(process)):
            leftover.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with indentation."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a small safetensors file; unlike the library's writer, report a full disk as an `OutputError`."""
    path.write_bytes(save(tensors, metadata))


def write_text(path: Path, text: str) -> None:
    """Write a text file; characters that UTF-8 cannot encode are escaped as in JSON."""
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


def umask() -> int:
    """Return the umask of this process."""
    current = os.umask(0)
    os.umask(current)
    return current
