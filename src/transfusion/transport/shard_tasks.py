"""Shards written by workers in other processes.

A worker gets the prepared output (headers and maps) and the name of a file. It writes the file under a
temporary name and moves it to the staging folder when it is complete. A worker that dies leaves no partial
file there, and another worker starts the file again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion.files.model_writer import changed_tensors_in
from transfusion.files.shard_writer import write_shard
from transfusion.files.staging import StagingFolder
from transfusion.runtime.engines import Engine

if TYPE_CHECKING:
    from transfusion.transport.output_model import OutputModel


@dataclass(frozen=True)
class WrittenShard:
    """A file that a worker has written, or the reason why it could not."""

    changed_tensors: tuple[str, ...] = ()
    error: tuple[int | None, str] | None = None
    """The error of the operating system: number and message."""


@dataclass(eq=False)
class ShardTasks:
    """The picklable view of an output for workers."""

    output: OutputModel[Any]
    path: Path
    """The path of the output."""
    folder: Path
    """The staging folder, for complete files."""
    making: Path
    """The folder for files that are being written."""

    def require_unchanged(self) -> None:
        """Refuse inputs that are not visible here or have changed; Ray workers call this."""
        self.output.require_unchanged()


def write_shards_by_workers(
    output: OutputModel[Any],
    staging: StagingFolder,
    engine: Engine,
    on_tensor: Callable[[str], None],
) -> None:
    """Let workers write the files that are not finished; record each file when it is done."""
    output.changed_tensors.update(changed_tensors_in(staging))
    files, stored_name = output.files(staging.path), output.like.checkpoint.stored_name

    def finish(name: str, made: WrittenShard) -> None:
        if made.error is not None:
            raise OSError(*made.error)
        output.changed_tensors.update(made.changed_tensors)
        staging.finish(name, changed_tensors=made.changed_tensors)
        for entry in output.entries:
            if stored_name(entry.stored_as.names[0]) in files[name]:
                on_tensor(entry.name)

    staging.making.mkdir(exist_ok=True)
    tasks = ShardTasks(output, staging.path, staging.output.resolve(), staging.making.resolve())
    unfinished = [name for name in files if name not in staging.finished]
    engine.each(tasks, write_file, unfinished, on_result=finish)


def write_file(tasks: ShardTasks, name: str) -> WrittenShard:
    """Write one file of an output, on a worker."""
    tasks.output.changed_tensors.clear()
    parts = tasks.output.files(tasks.path)[name]
    staged = tasks.making / f"{name}.{socket.gethostname()}.{os.getpid()}"
    try:
        with tasks.output.holding_tensors():
            write_shard(staged, parts)
        tasks.require_unchanged()
        os.replace(staged, tasks.folder / name)
    except OSError as error:
        message = f"{error.strerror or error} on {socket.gethostname()}, for {tasks.folder / name}"
        return WrittenShard(error=(error.errno, message))
    return WrittenShard(tuple(sorted(tasks.output.changed_tensors)))
