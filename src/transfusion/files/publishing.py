"""Publishing: an output is written in a hidden folder beside it, and appears whole or not at all.

``.NAME.partial`` holds the output so far, the recipe of the run, and a note for each finished shard. A killed
run leaves the folder behind. The recipe names the inputs by their fingerprints: the next run with the same
recipe keeps the finished shards, a run with any other starts from nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save
from torch import Tensor
from typing_extensions import TypedDict

from transfusion import __version__
from transfusion.errors import (
    CheckpointError,
    ClusterError,
    OutputError,
    TransfusionError,
    UselessResultError,
    listing,
)
from transfusion.files.tensor_files import headers
from transfusion.runtime.untrusted_files import read_json, require_regular, validate

MARKER = "transfusion.json"
"""A file in every folder that this program writes. It lists the folder's files under `CONTENTS`."""
CONTENTS = "contents"
_LITTER = {".DS_Store", "Thumbs.db"}
"""Files that operating systems leave behind; they may be deleted."""
_LONGEST_NAME = 255
"""In bytes, on all common file systems."""
_AT_CWD, _EXCHANGE = -100, 2

TensorShape: TypeAlias = tuple[tuple[int, ...], torch.dtype]


# ── may it be written? ────────────────────────────────────────────────────────────────────


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
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else "its name is not UTF-8"
        raise OutputError(
            f"{path} cannot be an output ({reason})", hint="give another name for the output"
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
        ours = validate(read_json(folder / MARKER).get(CONTENTS), list[str], MARKER, hint="")
    except CheckpointError:
        ours = []
    return [name for name in contents(folder) if name not in set(ours)]


def contents(folder: Path) -> list[str]:
    """Return the names of all files in a folder and its subfolders."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [path.relative_to(folder).as_posix() for path in files if path.name not in _LITTER]


# ── staging ───────────────────────────────────────────────────────────────────────────────


class FinishedShard(TypedDict):
    """The note about a file of an output that is complete."""

    bytes: int
    changed_tensors: list[str]
    """The changed tensors that were first met in this file."""


@dataclass
class StagingFolder:
    """The folder in which one output is written."""

    path: Path
    """The path of the output, which is not touched before the output is complete."""
    root: Path
    is_folder: bool
    """Whether the output is a folder, or the file of its name in `output`."""
    finished: dict[str, FinishedShard] = field(default_factory=dict)
    planned: Mapping[str, TensorShape] | None = None
    """The tensors that the output must hold; None if the output is no model or adapter."""

    @property
    def output(self) -> Path:
        """The folder to write to."""
        return self.root / "output"

    @property
    def _recipe(self) -> Path:
        return self.root / "recipe.json"

    @property
    def _notes(self) -> Path:
        """A folder with one note for each finished file: hundreds of shards are noted one by one."""
        return self.root / "finished"

    def begin(self, recipe: Mapping[str, Any] | None = None) -> None:
        """Resume an earlier run of the same recipe, which names the inputs, or start from nothing."""
        known = json.loads(json.dumps(recipe))
        if recipe is None or _read(self._recipe, dict[str, Any]) != known:
            shutil.rmtree(self._notes, ignore_errors=True)
        for folder in (self._notes, self.output):
            folder.mkdir(exist_ok=True)
        notes = {path.stem: _read(path, FinishedShard) for path in self._notes.iterdir()}
        self.finished = {
            name: note for name, note in notes.items() if note and _size(self.output / name) == note["bytes"]
        }
        self._remove_unfinished()
        if recipe is not None:
            write_json(self._recipe, known)

    def finish(self, name: str, *, changed_tensors: Iterable[str]) -> None:
        """Note that a file of the output is complete."""
        size = (self.output / name).stat().st_size
        self.finished[name] = FinishedShard(bytes=size, changed_tensors=list(changed_tensors))
        write_json(self._notes / f"{name}.json", self.finished[name])

    def publish(self) -> None:
        """Move the output to ``path`` in one step.

        The recipe is removed first: after the exchange the staging folder holds the older output, which no
        run may resume.
        """
        self._require_all_tensors()
        if self.is_folder:
            self._mark()
        self._recipe.unlink(missing_ok=True)
        if self.is_folder and self.path.is_dir():
            _exchange(self.output, self.path, self.root / "replaced")
        else:
            os.replace(self.output if self.is_folder else self.output / self.path.name, self.path)

    def _require_all_tensors(self) -> None:
        """Refuse an output that does not hold every planned tensor exactly once, with its shape and type."""
        if self.planned is None:
            return
        found = [info for file in self.output.glob("*.safetensors") for info in headers(file).values()]
        counts = Counter(info.name for info in found)
        odd = {name for name in {*counts, *self.planned} if counts[name] != 1 or name not in self.planned}
        odd |= {info.name for info in found if self.planned.get(info.name) != (info.shape, info.dtype)}
        if odd:
            raise OutputError(
                f"{self.path} would not hold every planned tensor exactly once: {listing(sorted(odd))};"
                " nothing was written",
                hint="this is a bug; please report it with the names of B's files",
            )

    def _mark(self) -> None:
        """List all files in the marker, so that only files of this program are ever replaced."""
        marker = self.output / MARKER
        details = read_json(marker) if marker.exists() else {"transfusion": __version__}
        write_json(marker, {**details, CONTENTS: sorted({MARKER, *contents(self.output)})})

    def keep(self, name: str) -> Path:
        """Return a path for a file that is kept if this run fails, and is no part of the output."""
        (self.root / "kept").mkdir(parents=True, exist_ok=True)
        return self.root / "kept" / name

    def tidy(self) -> None:
        """Remove unfinished files; remove the whole folder if no finished or kept file is left."""
        if self.finished or any((self.root / "kept").glob("*")):
            self._remove_unfinished()
        else:
            shutil.rmtree(self.root, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for path in self.output.glob("*"):
            if path.name not in self.finished:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def staging_of(path: Path, folder: bool | None = None) -> StagingFolder:
    """Return the staging folder of a path, to read files that another process keeps there."""
    return StagingFolder(path, _hidden(path), path.suffix != ".safetensors" if folder is None else folder)


@contextmanager
def open_staging(path: Path, *, force: bool, folder: bool | None = None) -> Iterator[StagingFolder]:
    """Open a staging folder whose output replaces ``path`` when the block ends without an error.

    The output is a folder, unless it is said not to be or ends in ``.safetensors``. If the run is
    interrupted, finished and kept files stay; if its inputs are refused, nothing does.
    """
    staging = staging_of(path, folder)
    replaced = staging.root / "replaced"
    if replaced.exists() and not path.exists():  # `_exchange` was interrupted between its two renames
        os.rename(replaced, path)
    require_writable(path, force=force, folder=staging.is_folder)
    try:
        staging.root.mkdir(parents=True, exist_ok=True)
        with FileLock(staging.root / "lock", timeout=0):
            try:
                yield staging
                staging.publish()
            except BaseException as error:
                _clear_after(error, staging)
                raise
    except Timeout as error:
        raise OutputError(
            f"another run is writing {path} at this moment",
            hint="wait until it is done, or give another name for the output",
        ) from error
    except OSError as error:
        raise OutputError(
            f"{path} could not be written ({error.strerror or error}); nothing was changed",
            hint="check free disk space and permissions" + _resuming(staging),
        ) from error
    shutil.rmtree(staging.root, ignore_errors=True)


def _clear_after(error: BaseException, staging: StagingFolder) -> None:
    """Remove what no second run can use, and say from where one resumes."""
    full = isinstance(error, OutputError) and isinstance(error.__cause__, OSError)
    again = full or isinstance(error, ClusterError | UselessResultError)
    if isinstance(error, TransfusionError) and not again:
        shutil.rmtree(staging.root, ignore_errors=True)  # the inputs are at fault
        return
    staging.tidy()
    if isinstance(error, UselessResultError):
        kept = f"; what was found is kept in {staging.root}" if staging.root.exists() else ""
        error.hint = f"{error.hint or ''}{kept}"
    elif isinstance(error, TransfusionError):
        error.hint = f"{error.hint}{_resuming(staging)}"
    elif staging.root.exists() and not isinstance(error, OSError):
        error.add_note(_resuming(staging).removeprefix("; "))


def _resuming(staging: StagingFolder) -> str:
    return f"; the same command resumes from {staging.root}" if staging.root.exists() else ""


def _exchange(made: Path, path: Path, aside: Path) -> None:
    """Replace a folder by another: in one step where the system can, else by two renames."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(made.absolute()), os.fsencode(path.absolute())
        swap = getattr(libc, "renameat2", None)
        if swap is not None and swap(_AT_CWD, names[0], _AT_CWD, names[1], _EXCHANGE) == 0:
            return
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    try:
        os.rename(made, path)
    except OSError:
        os.rename(aside, path)
        raise


def _hidden(path: Path) -> Path:
    """Return the staging folder of a path; a name that would be too long is replaced by its hash."""
    name = f".{path.name}.partial"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}.partial"
    return path.with_name(name)


def _read(file: Path, schema: type[Any]) -> Any:
    """Return what an earlier run noted; None if the file is absent or damaged."""
    try:
        return validate(read_json(file), schema, file, hint="")
    except CheckpointError:
        return None


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


# ── files ─────────────────────────────────────────────────────────────────────────────────


def publish_file(path: Path, write: Callable[[Path], object], *, force: bool) -> Path:
    """Let ``write`` fill a temporary file, and rename the file to ``path``."""
    with open_staging(path, force=force, folder=False) as staging:
        staging.begin()
        write(staging.output / path.name)
    return path


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with indentation."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a small safetensors file; unlike the library's writer, report a full disk as an `OutputError`."""
    path.write_bytes(save(tensors, metadata))


def write_text(path: Path, text: str) -> None:
    """Write a text file; characters that UTF-8 cannot encode are escaped as in JSON."""
    path.write_bytes(text.encode("utf-8", "backslashreplace"))
