"""Resources: engine, workers, memory and device of a run. They change its speed, never its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from transfusion.errors import SettingError
from transfusion.runtime.engines import Engine, open_engine, require_engine
from transfusion.runtime.memory_budget import MemoryBudget


@dataclass(frozen=True)
class Resources:
    """Where a run computes, and with how much.

    ``engine`` is ``"local"`` (threads of this process), ``"ray"``, or an engine that is open already.
    ``jobs`` is the number of threads, or of Ray workers; the default is one per core.
    ``address`` is the address of a running Ray cluster; without it, a cluster is started on this machine.
    ``memory`` is the limit of this process in bytes; with Ray, of each worker.
    ``device`` is the torch device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.

    >>> resources = transfusion.Resources(jobs=2, memory=2_000_000_000)
    >>> pi = transfusion.align("models/a", "models/b", resources=resources)
    """

    engine: str | Engine = "local"
    jobs: int | None = None
    address: str | None = None
    memory: int | None = None
    device: str = "cpu"

    @property
    def shared(self) -> bool:
        """Whether all workers are threads of this process."""
        return self.engine.shares_memory if isinstance(self.engine, Engine) else self.engine == "local"

    def opened(self) -> AbstractContextManager[Engine]:
        """Open the engine for the length of a block."""
        return open_engine(self.engine, jobs=self.jobs, address=self.address)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Share one Ray cluster among all engines that are opened within the block."""
        if isinstance(self.engine, Engine):
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
