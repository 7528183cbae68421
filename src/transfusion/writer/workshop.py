"""The workshop: a hidden folder beside an output, in which the output is made and from which it is resumed.

``.NAME.partial`` holds the output so far, and a journal of the shards that are finished and of the recipe
they were made by. A run that is killed leaves it behind. The next run of the same recipe goes on with what
is finished; a run of any other recipe begins anew, so nothing is ever put together from different inputs.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from transfusion.errors import ClusterError, OutputError, TransfusionError
from transfusion.writer.places import reported, require_writable, write_json

_AT_CWD, _EXCHANGE = -100, 2


@dataclass
class Workshop:
    """Where one output is made."""

    path: Path
    """The place of the output, untouched until all of it is there."""
    root: Path
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What is known about each file that is finished."""
    _recipe: Any = None

    @property
    def output(self) -> Path:
        """The folder to write to; with a single file as output, that file in it takes the place."""
        return self.root / "output"

    @property
    def making(self) -> Path:
        """A folder beside the output, for files that other processes have begun; it may not be there."""
        return self.root / "making"

    @property
    def _journal(self) -> Path:
        return self.root / "journal.json"

    def begin(self, recipe: Mapping[str, Any] | None = None) -> None:
        """Take up what an earlier run of the same recipe has finished, or begin anew."""
        self._recipe = json.loads(json.dumps(recipe))
        known = _read(self._journal)
        same = recipe is not None and known.get("recipe") == self._recipe
        self.finished = {
            name: told
            for name, told in (known.get("finished", {}) if same else {}).items()
            if (file := self.output / name).is_file() and file.stat().st_size == told["bytes"]
        }
        self.output.mkdir(exist_ok=True)
        shutil.rmtree(self.making, ignore_errors=True)
        for file in self.output.iterdir():
            if file.name not in self.finished:
                _remove(file)
        self._write_down()

    def finish(self, name: str, **told: Any) -> None:
        """Write down that a file of the output is complete."""
        self.finished[name] = {"bytes": (self.output / name).stat().st_size, **told}
        self._write_down()

    def _write_down(self) -> None:
        staged = self._journal.with_suffix(".new")
        write_json(staged, {"recipe": self._recipe, "finished": self.finished})
        os.replace(staged, self._journal)

    def publish(self) -> None:
        """Put the output in its place in one step.

        The journal goes first: after the exchange an older output lies here, and nobody may go on with that.
        """
        self._journal.unlink(missing_ok=True)
        single = self.output / self.path.name
        made = single if single.is_file() and self.path.suffix == ".safetensors" else self.output
        if self.path.is_dir() and made.is_dir():
            _exchange(made, self.path, self.root / "replaced")
        else:
            os.replace(made, self.path)

    def keep(self, name: str) -> Path:
        """A place for a file that is worth keeping when this run fails, and is not part of the output."""
        (self.root / "kept").mkdir(exist_ok=True)
        return self.root / "kept" / name

    def tidy(self) -> None:
        """Remove what is not finished, and everything if there is nothing worth keeping."""
        shutil.rmtree(self.making, ignore_errors=True)
        if not self.finished and not any((self.root / "kept").glob("*")):
            shutil.rmtree(self.root, ignore_errors=True)
        elif self.output.exists():
            for file in self.output.iterdir():
                if file.name not in self.finished:
                    _remove(file)


@contextmanager
def workshop(path: Path, *, force: bool) -> Iterator[Workshop]:
    """A workshop whose output takes the place of ``path`` when the block ends without an error."""
    _restore(path)
    require_writable(path, force=force, folder=path.suffix != ".safetensors")
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        root = _root(path)
        root.mkdir(exist_ok=True)
        shop = Workshop(path, root)
        with _locked(shop), _explained(shop):
            yield shop
            shop.publish()
    shutil.rmtree(root, ignore_errors=True)


@contextmanager
def staged_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder that takes the place of ``path`` when the block ends without an error."""
    with workshop(path, force=force) as shop:
        shop.begin()
        yield shop.output


def _root(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


@contextmanager
def _locked(shop: Workshop) -> Iterator[None]:
    try:
        with FileLock(shop.root / "lock", timeout=0):
            yield
    except Timeout as error:
        raise OutputError(
            f"another run is writing {shop.path} at this moment",
            hint="wait until it is done, or give another name for the output",
        ) from error


@contextmanager
def _explained(shop: Workshop) -> Iterator[None]:
    """Keep what is finished when a run is interrupted; keep no shards of a run that cannot succeed."""
    try:
        yield
    except ClusterError as error:  # which is no fault of the inputs
        shop.tidy()
        if shop.finished:
            error.hint = f"{error.hint}; the same command goes on from {shop.root}"
        raise
    except TransfusionError:
        shop.finished = {}
        shop.tidy()
        raise
    except BaseException as error:
        shop.tidy()
        going_on = f"the same command goes on from {shop.root}"
        if isinstance(error, OSError) and shop.root.exists():
            raise OutputError(
                f"{shop.path} could not be written ({error.strerror or error}); nothing was changed",
                hint=f"check the space and the rights there; {going_on}",
            ) from error
        if shop.root.exists():
            error.add_note(going_on)
        raise


def _restore(path: Path) -> None:
    """Put back an output that a run was killed at replacing, where that takes more than one step."""
    replaced = _root(path) / "replaced"
    if replaced.exists() and not path.exists():
        os.rename(replaced, path)


def _exchange(made: Path, path: Path, aside: Path) -> None:
    """Let a folder take the place of another: in one step where the system can, else in two."""
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


def _read(journal: Path) -> dict[str, Any]:
    try:
        value = json.loads(journal.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
