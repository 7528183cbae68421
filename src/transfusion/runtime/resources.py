"""Resources: engine, workers, memory and device of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

from transfusion.errors import SettingError
from transfusion.runtime.settings import RESOURCES, setting

if TYPE_CHECKING:
    from transfusion.runtime.engines import Engine


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the number of bytes that a text such as "2GB" names.

    >>> parse_bytes("2GB"), parse_bytes("1.5 GiB"), parse_bytes("512mb")
    (2000000000, 1610612736, 512000000)
    """
    count = 0.0
    if found := _SIZE.fullmatch(text):
        power = " kmgt".index(found[2].lower()) if found[2] else 0
        count = float(found[1]) * (1024 if found[3] else 1000) ** power
    if not isfinite(count) or count < 1:
        raise SettingError(
            f"{text!r} is not a size", hint="give a number and a unit, such as 512MB, 2GB or 1.5GiB"
        )
    return int(count)


def format_bytes(count: float) -> str:
    """Return a number of bytes as text.

    >>> format_bytes(12), format_bytes(2_500_000), format_bytes(3e9)
    ('12 bytes', '2.5 MB', '3.00 GB')
    """
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def at_least(count: int) -> str:
    """Return a number of bytes as text, rounded up.

    >>> at_least(337_650_000), at_least(2_001_000_000)
    ('338.0 MB', '2.01 GB')
    """
    digit = 10**6 if count < 999 * 10**6 else 10**7
    return format_bytes(-(-count // digit) * digit)


# ── resources of a run ───────────────────────────────────────────────────────────────────────

PROGRAM = 320 * 2**20
"""Bytes of the program itself. 271 MB were measured with a tiny model; large matrix products take more."""
WORKER = 400 * 2**20
"""Bytes of a Ray worker itself. 354 MB were measured with a tiny model."""
LIBRARY = 150 * 2**20
"""Bytes of a library that runs models, and of small activations. 140 MB were measured with transformers."""


@dataclass(frozen=True)
class Resources:
    """Where a run computes, and with how much.

    >>> resources = transfusion.Resources(jobs=2, memory=2_000_000_000)
    >>> pi = transfusion.align("models/a", "models/b", resources=resources)
    """

    engine: str | Engine = setting(
        "local",
        "Threads of this process, or workers of a Ray cluster.",
        choices=("local", "ray"),
        shown=True,
        panel=RESOURCES,
    )
    jobs: int | None = setting(
        None,
        "The number of threads, or of Ray workers.",
        kind=int,
        least=1,
        most=4096,
        shown="all cores",
        panel=RESOURCES,
    )
    address: str | None = setting(
        None,
        "The address of a running Ray cluster.",
        metavar="HOST:PORT",
        shown="one is started here",
        panel=RESOURCES,
    )
    memory: int | None = setting(
        None,
        "The memory limit of this process, or of each worker of Ray: 2GB or 512MiB, for example.",
        parse=parse_bytes,
        metavar="SIZE",
        shown="as much as all threads need",
        panel=RESOURCES,
    )
    device: str = setting(
        "cpu", "The device to compute on: cpu, cuda, cuda:1, mps.", shown=True, panel=RESOURCES
    )

    @property
    def shared(self) -> bool:
        """Whether all workers are threads of this process."""
        return self.engine == "local" if isinstance(self.engine, str) else self.engine.shares_memory

    def opened(self) -> AbstractContextManager[Engine]:
        """Open the engine for the length of a block."""
        from transfusion.runtime.engines import open_engine

        return open_engine(self.engine, jobs=self.jobs, address=self.address)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Share one Ray cluster among all engines that are opened within the block."""
        from transfusion.runtime.engines import require_engine

        with ExitStack() as stack:
            if isinstance(self.engine, str):
                require_engine(self.engine, self.address)
            if self.engine == "ray":
                from transfusion.runtime.ray_engine import joined_cluster

                stack.enter_context(joined_cluster(self.address, self.jobs))
            yield

    def require_in_process(self) -> None:
        """Refuse engines and limits that a run of whole models cannot use."""
        if self.engine != "local" or self.memory is not None or self.address is not None:
            raise SettingError(
                "whole models run in this process: it has no other engine and no limit of memory",
                hint="leave out `engine`, `address` and `memory`",
            )

    @contextmanager
    def in_process(self) -> Iterator[None]:
        """Compute with ``jobs`` threads of torch within the block, for runs that hold whole models."""
        import torch

        self.require_in_process()
        before = torch.get_num_threads()
        torch.set_num_threads(self.jobs or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def program(self) -> int:
        """Bytes that this process, or each worker of Ray, takes before it has read a model."""
        return PROGRAM if self.shared else WORKER

    def within_memory(self, each: int, what: str, fixed: int = 0) -> Resources:
        """Return the resources with as many threads as fit into `memory`: each takes so many bytes, beside
        the program and ``fixed`` bytes.

        A limit that is too small for one thread, or for those of an open engine, is refused. ``what`` says
        what the bytes are for.
        """
        import torch

        if self.memory is None:
            return self
        given = None if isinstance(self.engine, str) else self.engine
        threads = given.count if given else self.jobs or torch.get_num_threads()
        needed = fixed + each * (threads if given and self.shared else 1)
        if self.memory < self.program + needed:
            raise SettingError(
                f"memory of {format_bytes(self.memory)} is too little: {what} takes {format_bytes(needed)},"
                f" and the program itself {format_bytes(self.program)}",
                hint=f"give at least {at_least(self.program + needed)}",
            )
        if given or not self.shared:  # a worker of Ray has one thread
            return self
        return replace(self, jobs=min(threads, (self.memory - self.program - fixed) // max(1, each)))


LOCAL = Resources()
"""All threads of this process."""
