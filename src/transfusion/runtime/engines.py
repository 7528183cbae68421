"""Engines run independent tasks: on threads of this process, or on workers of a Ray cluster.

`Engine.map` is all they do. A function holds headers and maps, never weights: workers read those from files.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from transfusion.errors import SettingError
from transfusion.runtime.threads import Threads

Task = TypeVar("Task")
Result = TypeVar("Result")

ENGINES = ("local", "ray")


class Engine(ABC):
    """Workers in this process or elsewhere."""

    workers: Threads
    """The threads of this process."""
    count: int
    """How many tasks run in parallel."""
    shares_memory: bool
    """Whether all workers are threads of this process."""

    @abstractmethod
    def map(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        *,
        on_result: Callable[[Task, Result], None] | None = None,
    ) -> list[Result]:
        """Return ``function(task)`` for every task, in their order.

        The function must be picklable: `functools.partial` of a function of a module. It is sent to each
        worker once, and the tasks one by one. ``on_result`` is called with every task and result as soon as
        it is ready.
        """


class LocalEngine(Engine):
    """Threads of this process."""

    shares_memory = True

    def __init__(self, workers: Threads) -> None:
        self.workers, self.count = workers, workers.count
        self._result_lock = threading.Lock()

    def map(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        *,
        on_result: Callable[[Task, Result], None] | None = None,
    ) -> list[Result]:
        def done(task: Task) -> Result:
            result = function(task)
            if on_result is not None:
                with self._result_lock:
                    on_result(task, result)
            return result

        return self.workers.each(done, tasks)


def require_engine(engine: str, address: str | None = None) -> None:
    """Refuse an unknown engine, and an address without Ray."""
    if engine not in ENGINES:
        raise SettingError(f"there is no engine {engine!r}", hint=f"choose one of {', '.join(ENGINES)}")
    if address is not None and engine != "ray":
        raise SettingError(
            f"address {address!r}: only Ray has an address", hint='add `engine="ray"`, or leave it out'
        )


@contextmanager
def open_engine(
    engine: str | Engine = "local", *, jobs: int | None = None, address: str | None = None
) -> Iterator[Engine]:
    """Open an engine by name for the ``with`` block. An engine that is open already is used as it is.

    Args:
        engine: "local" for threads, "ray" for workers of a cluster, or an open engine.
        jobs: The number of threads or workers; by default as many as there are cores.
        address: The address of a running Ray cluster; without it, one is started on this machine.

    >>> with open_engine(jobs=2) as engine:
    ...     engine.map(lambda task: 10 + task, [1, 2, 3])
    [11, 12, 13]
    """
    if isinstance(engine, Engine):
        yield engine
        return
    require_engine(engine, address)
    if engine == "local":
        with Threads.opened(jobs) as workers:
            yield LocalEngine(workers)
    else:
        from transfusion.runtime.ray_engine import RayEngine

        with Threads.opened(1) as workers, RayEngine.joined_at(address, jobs, workers) as cluster:
            yield cluster
