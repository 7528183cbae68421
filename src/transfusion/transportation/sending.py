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

from transfusion.engines import Engine
from transfusion.writer import Workshop, remarks_in, write_shard

if TYPE_CHECKING:
    from transfusion.transportation.output import Output


@dataclass(frozen=True)
class Written:
    """A file that a worker has written, or why it could not."""

    sha256: str = ""
    remarks: tuple[str, ...] = ()
    trouble: tuple[int | None, str] | None = None
    """What the operating system said, by its number and in words."""


@dataclass(eq=False)
class Sent:
    """An output as workers get it."""

    output: Output[Any]
    path: Path
    """Where the output will be."""
    folder: Path
    """Where its files go until then."""
    making: Path
    """Where they are as long as they are not whole."""

    def require_unchanged(self) -> None:
        """Refuse inputs that cannot be seen here, or have changed."""
        self.output.require_unchanged()


def send_shards(
    output: Output[Any], shop: Workshop, engine: Engine, on_tensor: Callable[[str], None]
) -> None:
    """Let workers write the files that are not finished yet; each is noted down as it arrives."""
    output.remarks.update(remarks_in(shop))
    heard: dict[str, list[str]] = {}
    files = output.files(shop.path, lambda name: None)
    for entry in output.entries:
        file = next(name for name, parts in files.items() if entry.stored_as.names[0] in parts)
        heard.setdefault(file, []).append(entry.name)

    def finish(name: str, made: Written) -> None:
        if made.trouble is not None:
            raise OSError(*made.trouble)
        output.remarks.update(made.remarks)
        shop.finish(name, sha256=made.sha256, remarks=list(made.remarks))
        for tensor in heard.get(name, ()):
            on_tensor(tensor)

    shop.making.mkdir(exist_ok=True)
    sent = Sent(output, shop.path, shop.output.resolve(), shop.making.resolve())
    waiting = [name for name in files if name not in shop.finished]
    engine.each(sent, write_file, waiting, heard=finish)


def write_file(sent: Sent, name: str) -> Written:
    """Write one file of an output, on a worker; what else it has written is forgotten."""
    sent.output.remarks.clear()
    parts = sent.output.files(sent.path)[name]
    staged = sent.making / f"{name}.{socket.gethostname()}.{os.getpid()}"
    try:
        digest = write_shard(staged, parts)
        sent.require_unchanged()
        os.replace(staged, sent.folder / name)
    except OSError as error:
        said = f"{error.strerror or error} on {socket.gethostname()}, for {sent.folder / name}"
        return Written(trouble=(error.errno, said))
    return Written(digest, tuple(sorted(sent.output.remarks)))
