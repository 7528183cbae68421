"""Engines: where pieces of work are done that do not need each other.

An engine is given a subject, what to do with it, and the pieces. The subject is sent to other processes
once, so it must be possible to pickle it; it holds headers and maps, never weights, which whoever works on
it reads from its files. What comes out is the same on every engine.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from transfusion.errors import SettingError
from transfusion.runtime.threads import Threads

Subject = TypeVar("Subject")
Item = TypeVar("Item")
Result = TypeVar("Result")

ENGINES = ("local", "ray")


class Engine(ABC):
    """A number of workers, in this process or elsewhere."""

    workers: Threads
    """The threads of this process."""
    count: int
    """How many pieces can be done side by side."""
    shares_memory: bool
    """Whether all workers are in this process, so that within a piece they can share it."""

    @abstractmethod
    def each(
        self,
        subject: Subject,
        do: Callable[[Subject, Item], Result],
        items: Sequence[Item],
        *,
        affinity: Callable[[Item], str] | None = None,
        on_result: Callable[[Item, Result], None] | None = None,
    ) -> list[Result]:
        """What ``do`` makes of every item, in their order. Items with the same word for ``near`` go, if
        possible, to the worker that had such a one before, and may have kept something of it. ``heard`` is
        told every result as soon as it is there.
        """

    @abstractmethod
    def map_reduce(
        self,
        subject: Subject,
        do: Callable[[Subject, Item], Any],
        items: Sequence[Item],
        join: Callable[[Subject, list[Any]], Result],
        *,
        affinity: Callable[[Item], str] | None = None,
    ) -> Result:
        """What ``join`` makes of the parts that ``do`` makes of the items. Parts may be large: they go from
        worker to worker, and do not come here.
        """


class LocalEngine(Engine):
    """Threads of this process."""

    shares_memory = True

    def __init__(self, workers: Threads) -> None:
        self.workers, self.count = workers, workers.count
        self._result_lock = threading.Lock()

    def each(
        self,
        subject: Subject,
        do: Callable[[Subject, Item], Result],
        items: Sequence[Item],
        *,
        affinity: Callable[[Item], str] | None = None,
        on_result: Callable[[Item, Result], None] | None = None,
    ) -> list[Result]:
        def done(item: Item) -> Result:
            result = do(subject, item)
            if on_result is not None:
                with self._result_lock:
                    on_result(item, result)
            return result

        return self.workers.each(done, items)

    def map_reduce(
        self,
        subject: Subject,
        do: Callable[[Subject, Item], Any],
        items: Sequence[Item],
        join: Callable[[Subject, list[Any]], Result],
        *,
        affinity: Callable[[Item], str] | None = None,
    ) -> Result:
        return join(subject, self.each(subject, do, items))


def require_engine(engine: str, address: str | None = None) -> None:
    """Refuse an engine that there is not, and an address that it has no use for."""
    if engine not in ENGINES:
        raise SettingError(f"there is no engine {engine!r}", hint=f"choose one of {', '.join(ENGINES)}")
    if address is not None and engine != "ray":
        raise SettingError(f"address {address!r}: only Ray has one", hint="add --engine ray, or leave it out")


@contextmanager
def open_engine(
    engine: str | Engine = "local", *, jobs: int | None = None, address: str | None = None
) -> Iterator[Engine]:
    """An engine by its name, for the length of a block; one that is there already is used as it is.

    ``jobs`` is the number of workers: threads, or processes of Ray; as many as there are cores, if not said.
    ``address`` is that of a Ray cluster that is running; without it, one is started on this machine.
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
