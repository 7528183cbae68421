"""Staging: a hidden folder beside an output, in which the output is written and from which a run resumes.

``.NAME.partial`` holds the output so far, and a journal with the recipe of the run and the finished shards.
A killed run leaves the folder behind. The recipe names the inputs by their fingerprints: the next run with
the same recipe keeps the finished shards, a run with any other starts from nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from filelock import FileLock, Timeout
from typing_extensions import TypedDict

from transfusion import __version__
from transfusion.errors import CheckpointError, ClusterError, OutputError, TransfusionError, listing
from transfusion.files.publishing import (
    CONTENTS,
    MARKER,
    contents,
    path_beside,
    report_os_errors,
    require_writable,
    write_json,
)
from transfusion.files.tensor_files import headers
from transfusion.runtime.untrusted_files import parse_json, read_json, read_text, validate

_AT_CWD, _EXCHANGE = -100, 2

TensorShape: TypeAlias = tuple[tuple[int, ...], torch.dtype]


class FinishedShard(TypedDict):
    """A file of an output that is complete."""

    file: str
    bytes: int
    changed_tensors: list[str]
    """The changed tensors that were first met in this file."""


@dataclass
class StagingFolder:
    """The folder in which one output is written."""

    path: Path
    """The path of the output, which is not touched before the output is complete."""
    root: Path
    finished: dict[str, FinishedShard] = field(default_factory=dict)
    """The journal's entry for each finished file."""
    planned: Mapping[str, TensorShape] | None = None
    """The tensors that the output must hold; None if the output is no model or adapter."""

    @property
    def output(self) -> Path:
        """The folder to write to. If the output is a single file, only that file is moved to ``path``."""
        return self.root / "output"

    @property
    def making(self) -> Path:
        """A folder for files that other processes have begun; it may not exist."""
        return self.root / "making"

    @property
    def _journal(self) -> Path:
        return self.root / "journal.jsonl"

    def begin(self, recipe: Mapping[str, Any] | None = None) -> None:
        """Resume an earlier run of the same recipe, which names the inputs, or start from nothing."""
        first, *lines = [*_lines(self._journal), None]
        same = recipe is not None and first == {"recipe": json.loads(json.dumps(recipe))}
        self.finished = {
            details["file"]: details
            for details in _finished(lines if same else ())
            if (file := self.output / details["file"]).is_file() and file.stat().st_size == details["bytes"]
        }
        self.output.mkdir(exist_ok=True)
        shutil.rmtree(self.making, ignore_errors=True)
        for file in self.output.iterdir():
            if file.name not in self.finished:
                _remove(file)
        staged = self._journal.with_suffix(".new")
        staged.write_text(
            "".join(_line(details) for details in ({"recipe": recipe}, *self.finished.values()))
        )
        os.replace(staged, self._journal)

    def finish(self, name: str, *, changed_tensors: Iterable[str]) -> None:
        """Add a complete file of the output to the journal."""
        details = FinishedShard(
            file=name,
            bytes=(self.output / name).stat().st_size,
            changed_tensors=list(changed_tensors),
        )
        with self._journal.open("a") as journal:
            journal.write(_line(details))
        self.finished[name] = details

    def publish(self) -> None:
        """Move the output to ``path`` in one step.

        The journal is removed first: after the exchange the staging folder holds the older output, which no
        run may resume.
        """
        self._require_all_tensors()
        single = self.output / self.path.name
        made = single if single.is_file() and self.path.suffix == ".safetensors" else self.output
        if made.is_dir():
            self._mark()
        self._journal.unlink(missing_ok=True)
        if self.path.is_dir() and made.is_dir():
            _exchange(made, self.path, self.root / "replaced")
        else:
            os.replace(made, self.path)

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
        (self.root / "kept").mkdir(exist_ok=True)
        return self.root / "kept" / name

    def tidy(self) -> None:
        """Remove unfinished files; remove the whole folder if no finished or kept file is left."""
        shutil.rmtree(self.making, ignore_errors=True)
        if not self.finished and not any((self.root / "kept").glob("*")):
            shutil.rmtree(self.root, ignore_errors=True)
        elif self.output.exists():
            for file in self.output.iterdir():
                if file.name not in self.finished:
                    _remove(file)


@contextmanager
def open_staging(path: Path, *, force: bool) -> Iterator[StagingFolder]:
    """Open a staging folder whose output replaces ``path`` when the block ends without an error."""
    _restore(path)
    require_writable(path, force=force, folder=path.suffix != ".safetensors")
    with report_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        root = _root(path)
        root.mkdir(exist_ok=True)
        staging = StagingFolder(path, root)
        with _locked(staging), _explained(staging):
            yield staging
            staging.publish()
    shutil.rmtree(root, ignore_errors=True)


@contextmanager
def staged_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """Open a temporary folder that replaces ``path`` when the block ends without an error."""
    with open_staging(path, force=force) as staging:
        staging.begin()
        yield staging.output


def _root(path: Path) -> Path:
    return path_beside(path, ".partial", hidden=True)


@contextmanager
def _locked(staging: StagingFolder) -> Iterator[None]:
    try:
        with FileLock(staging.root / "lock", timeout=0):
            yield
    except Timeout as error:
        raise OutputError(
            f"another run is writing {staging.path} at this moment",
            hint="wait until it is done, or give another name for the output",
        ) from error


@contextmanager
def _explained(staging: StagingFolder) -> Iterator[None]:
    """Keep finished and kept files when a run is interrupted, but nothing when its inputs are refused."""
    going_on = f"the same command resumes from {staging.root}"
    try:
        yield
    except TransfusionError as error:
        full = isinstance(error, OutputError) and isinstance(error.__cause__, OSError)
        if isinstance(error, ClusterError) or full:  # the inputs are not at fault
            staging.tidy()
            if staging.root.exists():
                error.hint = f"{error.hint}; {going_on}"
        else:
            shutil.rmtree(staging.root, ignore_errors=True)
        raise
    except BaseException as error:
        staging.tidy()
        if isinstance(error, OSError) and staging.root.exists():
            raise OutputError(
                f"{staging.path} could not be written ({error.strerror or error}); nothing was changed",
                hint=f"check free disk space and permissions; {going_on}",
            ) from error
        if staging.root.exists():
            error.add_note(going_on)
        raise


def _restore(path: Path) -> None:
    """Put back an output whose replacement was interrupted between the two renames of `_exchange`."""
    replaced = _root(path) / "replaced"
    if replaced.exists() and not path.exists():
        os.rename(replaced, path)


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


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value) + "\n"


def _lines(journal: Path) -> Iterator[Any]:
    """Return the entries of a journal, up to a truncated line."""
    try:
        for line in read_text(journal).splitlines():
            yield parse_json(line, journal)
    except CheckpointError:
        return


def _finished(lines: Iterable[Any]) -> Iterator[FinishedShard]:
    """Return the finished files of a journal, up to the first invalid entry."""
    try:
        for line in lines:
            yield validate(line, FinishedShard, "the journal", hint="")
    except CheckpointError:
        return
