"""Engines run independent tasks: on threads of this process, or on workers of a Ray cluster.

`Engine.map` is all they do. A function holds headers and maps, never weights: workers read those from files.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch

from transfusion.errors import SettingError, reason_of
from transfusion.runtime.scratch import clear

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


# ── A pool of threads for independent tasks, with results that do not depend on t… ──────────────────


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


CLEARLY = 0.8
"""The share of the time that more threads must at most take, to be worth them."""


def fitting_threads(work: Callable[[], object], most: int) -> int:
    """Return how many threads of torch do some work fastest: one, if more are not clearly faster.

    Threads that wait for each other cost more than they bring to a small model, or on a busy machine.
    """
    before = torch.get_num_threads()
    try:
        count, fastest = 1, _seconds(work, 1)
        while 2 * count <= most and (seconds := _seconds(work, 2 * count)) < CLEARLY * fastest:
            count, fastest = 2 * count, seconds
        return count
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object], threads: int) -> float:
    """Return how long some work takes: the shortest of three times, after a first one."""
    torch.set_num_threads(threads)
    found = []
    for _ in range(4):
        start = perf_counter()
        work()
        found.append(perf_counter() - start)
    return min(found[1:])


class Threads:
    """A fixed number of threads. Tasks that a task starts run on its own thread, and on idle ones."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._busy = threading.local()
        self._pool = ThreadPoolExecutor(count, initializer=self._prepare) if count > 1 else None

    @classmethod
    @contextmanager
    def opened(cls, count: int | None = None) -> Iterator[Threads]:
        """Open threads for the ``with`` block: by default as many as torch would use."""
        threads = torch.get_num_threads()
        workers = cls(count or threads)
        torch.set_num_threads(1)
        try:
            yield workers
        finally:
            torch.set_num_threads(threads)
            clear()
            if workers._pool is not None:
                workers._pool.shutdown(cancel_futures=True)

    def each(self, do: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Return ``do(item)`` for every item, in their order."""
        items = list(items)
        if self._pool is None or len(items) < 2:
            return [do(item) for item in items]
        if self._within:
            return self._with_idle_threads(self._pool, do, items)
        return list(self._pool.map(do, items))

    def stream(self, tasks: Iterable[Callable[[], _Result]]) -> Iterator[_Result]:
        """Yield the results of tasks in their order, with only a few tasks ahead of the consumer."""
        if self._pool is None or self._within:
            yield from (task() for task in tasks)
            return
        ahead: deque[Future[_Result]] = deque()
        try:
            for task in tasks:
                ahead.append(self._pool.submit(task))
                if len(ahead) > 2 * self.count:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def _with_idle_threads(
        self, pool: ThreadPoolExecutor, do: Callable[[_Item], _Result], items: list[_Item]
    ) -> list[_Result]:
        """Run tasks on this thread, and on threads of the pool that are idle meanwhile."""
        left, results = deque(enumerate(items)), dict[int, _Result]()

        def work() -> None:
            while left:
                try:
                    place, item = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                results[place] = do(item)

        helping = [pool.submit(work) for _ in range(min(self.count, len(items)) - 1)]
        try:
            work()
        finally:
            left.clear()
            begun = [future for future in helping if not future.cancel()]
            wait(begun)
        for future in begun:
            future.result()
        return [results[place] for place in range(len(items))]

    @property
    def _within(self) -> bool:
        """Whether the current thread is one of the pool."""
        return getattr(self._busy, "within", False)

    def _prepare(self) -> None:
        self._busy.within = True
        torch.set_num_threads(1)


# ── Devices of this machine, and the types to compute in ────────────────────────────────────────────


def require_device(device: str) -> str:
    """Return the device; refuse one that cannot compute here."""
    try:
        torch.empty(1, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        raise SettingError(
            f"device {device!r} cannot be used here ({reason_of(error)})",
            hint="leave out `device` to compute on cpu",
        ) from error
    return device


def as_precision(dtype: torch.dtype | str) -> torch.dtype:
    """Return the type to compute in; refuse types in which sums lose digits."""
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float32, torch.float64):
        raise SettingError(f"dtype = {dtype}: too coarse to compute in", hint="choose float32 or float64")
    return chosen


def device_memory(device: torch.device) -> int:
    """Return all memory of a device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
