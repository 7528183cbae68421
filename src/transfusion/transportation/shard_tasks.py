"""Sending: the files of an output, each written by a worker in another process.

A worker gets the output as it was prepared, which holds headers and maps, and the name of a file. It writes
that beside the output so far, and moves it there when it is whole; so a worker that dies leaves nothing
half-written, and whoever takes up its file begins anew.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion.checkpoint.model_writer import changed_tensors_in
from transfusion.checkpoint.shard_writer import write_shard
from transfusion.checkpoint.staging import StagingFolder
from transfusion.runtime.engines import Engine

if TYPE_CHECKING:
    from transfusion.transportation.output_model import OutputModel


@dataclass(frozen=True)
class WrittenShard:
    """A file that a worker has written, or why it could not."""

    sha256: str = ""
    changed_tensors: tuple[str, ...] = ()
    trouble: tuple[int | None, str] | None = None
    """What the operating system said, by its number and in words."""


@dataclass(eq=False)
class ShardTasks:
    """An output as workers get it."""

    output: OutputModel[Any]
    path: Path
    """Where the output will be."""
    folder: Path
    """Where its files go until then."""
    making: Path
    """Where they are as long as they are not whole."""

    def require_unchanged(self) -> None:
        """Refuse inputs that cannot be seen here, or have changed."""
        self.output.require_unchanged()


def write_shards_by_workers(
    output: OutputModel[Any], staging: StagingFolder, engine: Engine, on_tensor: Callable[[str], None]
) -> None:
    """Let workers write the files that are not finished yet; each is noted down as it arrives."""
    output.changed_tensors.update(changed_tensors_in(staging))
    on_result: dict[str, list[str]] = {}
    files = output.files(staging.path, lambda name: None)
    for entry in output.entries:
        file = next(name for name, parts in files.items() if entry.stored_as.names[0] in parts)
        on_result.setdefault(file, []).append(entry.name)

    def finish(name: str, made: WrittenShard) -> None:
        if made.trouble is not None:
            raise OSError(*made.trouble)
        output.changed_tensors.update(made.changed_tensors)
        staging.finish(name, sha256=made.sha256, changed_tensors=list(made.changed_tensors))
        for tensor in on_result.get(name, ()):
            on_tensor(tensor)

    staging.making.mkdir(exist_ok=True)
    sent = ShardTasks(output, staging.path, staging.output.resolve(), staging.making.resolve())
    waiting = [name for name in files if name not in staging.finished]
    engine.each(sent, write_file, waiting, on_result=finish)


def write_file(sent: ShardTasks, name: str) -> WrittenShard:
    """Write one file of an output, on a worker; what else it has written is forgotten."""
    sent.output.changed_tensors.clear()
    parts = sent.output.files(sent.path)[name]
    staged = sent.making / f"{name}.{socket.gethostname()}.{os.getpid()}"
    try:
        digest = write_shard(staged, parts)
        sent.require_unchanged()
        os.replace(staged, sent.folder / name)
    except OSError as error:
        said = f"{error.strerror or error} on {socket.gethostname()}, for {sent.folder / name}"
        return WrittenShard(trouble=(error.errno, said))
    return WrittenShard(digest, tuple(sorted(sent.output.changed_tensors)))
