"""Resources: engine, workers, memory and device of a run. They change its speed, never its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfusion.errors import SettingError
from transfusion.runtime.byte_sizes import parse_bytes
from transfusion.runtime.memory_budget import MemoryBudget
from transfusion.runtime.settings import RESOURCES, setting

if TYPE_CHECKING:
    from transfusion.runtime.engines import Engine


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

        if not isinstance(self.engine, str):
            yield
            return
        require_engine(self.engine, self.address)
        if self.shared:
            yield
        else:
            from transfusion.runtime.ray_cluster import joined_cluster

            with joined_cluster(self.address, self.jobs):
                yield

    @contextmanager
    def in_process(self) -> Iterator[None]:
        """Compute with ``jobs`` threads of torch within the block, for runs that hold whole models."""
        import torch

        if self.engine != "local" or self.memory is not None or self.address is not None:
            raise SettingError(
                "whole models run in this process: it has no other engine and no limit of memory",
                hint="leave out `engine`, `address` and `memory`",
            )
        before = torch.get_num_threads()
        torch.set_num_threads(self.jobs or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def budget(self) -> MemoryBudget:
        """The memory of this process, or of each worker of Ray."""
        return MemoryBudget.for_process(self.memory, local=self.shared)


LOCAL = Resources()
"""All threads of this process."""
