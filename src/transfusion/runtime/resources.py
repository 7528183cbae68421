"""Means: with what a result is made. They decide how soon it is there, never what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from transfusion.runtime.engines import Engine, open_engine, require_engine

PROGRAM = 320 * 2**20
"""Bytes of the program itself: 271 MB were measured with a tiny model, and large products take more."""
WORKER = 400 * 2**20
"""Bytes of a worker of Ray by itself: 354 MB were measured with a tiny model."""


@dataclass(frozen=True)
class Resources:
    """An engine by its name, how many workers, where, and with how much memory."""

    engine: str = "local"
    jobs: int | None = None
    """Threads, or workers of Ray; without a number, as many as there are cores."""
    address: str | None = None
    """Of a Ray cluster that is running."""
    memory: int | None = None
    """Bytes that this process may take; of Ray, each worker."""

    @property
    def shared(self) -> bool:
        """Whether all is done in this process."""
        return self.engine == "local"

    def opened(self) -> AbstractContextManager[Engine]:
        """The engine, for the length of a block."""
        return open_engine(self.engine, jobs=self.jobs, address=self.address)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Within the block, one cluster is used by all who hire."""
        require_engine(self.engine, self.address)
        if self.shared:
            yield
        else:
            from transfusion.runtime.ray_cluster import joined_cluster

            with joined_cluster(self.address, self.jobs):
                yield

    @property
    def program(self) -> int:
        """Bytes that a process takes before it has a model."""
        return PROGRAM if self.shared else WORKER


LOCAL = Resources()
"""All threads of this process."""
