"""The speed of a machine: two measured constants, which a file can hold."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from blake3 import blake3
from pydantic import Field
from typing_extensions import TypedDict

from transfusion.errors import SettingError
from transfusion.runtime.untrusted_files import read_json, validate

_FORMAT = 3
_File = TypedDict(
    "_File",
    {
        "transfusion-machine": int,
        "cores": Annotated[int, Field(gt=0, lt=2**20)],
        "operations_per_second": Annotated[float, Field(gt=1, lt=1e18)],
        "bytes_per_second": Annotated[float, Field(gt=1, lt=1e18)],
    },
)
_SIDE = 1024
"""Rows and columns of the matrices that are multiplied."""
_BYTES = 2**26
"""Size of the file that is read."""
_BLOCK = 2**19
"""Numbers that are checked and hashed at a time."""


@dataclass(frozen=True)
class Machine:
    """How fast each core of a machine is."""

    cores: int
    operations_per_second: float
    """Operations of float32 matrix products: 2 for each multiplication and its addition."""
    bytes_per_second: float
    """Bytes of weights that are read from a file in the page cache, checked and hashed."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as a file holds it."""
        return {"transfusion-machine": _FORMAT, **asdict(self)}

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read the file that ``transfusion plan --measure-machine`` wrote."""
        try:
            info = read_json(Path(path), SettingError)
            if info.get("transfusion-machine") != _FORMAT:
                raise ValueError("of another kind or release")
            valid = validate(info, _File, "constants", hint="", error=SettingError)
            return cls(valid["cores"], valid["operations_per_second"], valid["bytes_per_second"])
        except (SettingError, ValueError, TypeError) as error:
            raise SettingError(
                f"{path}: not a file of a machine's constants ({str(error).splitlines()[0]})",
                hint="write one on that machine: transfusion plan --measure-machine -o FILE.json",
            ) from error

    @classmethod
    def measure(cls, folder: str | Path | None = None) -> Machine:
        """Measure this machine in about a second; the file that is read lies in ``folder`` for a while."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return cls(os.cpu_count() or 1, 2 * _SIDE**3 / _multiplying(), _BYTES / _reading(folder))
        finally:
            torch.set_num_threads(threads)


def _seconds(run: Callable[[], object]) -> float:
    """Return the median of seven runs after one that does not count, in seconds of this thread's work."""
    run()
    taken = []
    for _ in range(7):
        begun = time.thread_time()
        run()
        taken.append(time.thread_time() - begun)
    return median(taken)


def _multiplying() -> float:
    left, right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
    into = torch.empty(_SIDE, _SIDE)
    return _seconds(lambda: torch.mm(left, right, out=into))


def _reading(folder: str | Path | None) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        file = Path(place) / "weights"
        file.write_bytes(bytes(_BYTES))

        def read() -> None:
            digest = blake3()
            weights = torch.from_file(str(file), size=_BYTES // 2, dtype=torch.bfloat16)
            for block in torch.split(weights.clone(), _BLOCK):
                torch.aminmax(block)
                digest.update(block.view(torch.uint8).numpy().data)

        return _seconds(read)
