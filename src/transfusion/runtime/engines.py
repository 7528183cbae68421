"""Engines run independent tasks: on threads of this process, or on workers of a Ray cluster.

`map` is all they do. A function holds headers and maps, never weights: workers read those from files.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from transfusion.errors import SettingError, reason_of
from transfusion.runtime.scratch import clear

if TYPE_CHECKING:
    from transfusion.runtime.ray_engine import RayEngine

Task = TypeVar("Task")
Result = TypeVar("Result")
Engine: TypeAlias = "Threads | RayEngine"
ENGINES = ("local", "ray")


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
    if not isinstance(engine, str):
        yield engine
        return
    require_engine(engine, address)
    if engine == "local":
        with Threads.opened(jobs) as threads:
            yield threads
    else:
        from transfusion.runtime.ray_engine import RayEngine

        with Threads.opened(1) as threads, RayEngine.joined_at(address, jobs, threads) as cluster:
            yield cluster


# ── threads ──────────────────────────────────────────────────────────────────────────────────


class Threads:
    """A fixed number of threads. Tasks that a task starts run on its own thread, and on idle ones."""

    shares_memory = True
    """Whether all workers are threads of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        """How many tasks run in parallel."""
        self._lock, self._busy = threading.Lock(), threading.local()
        self._pool = ThreadPoolExecutor(count, initializer=self._prepare) if count > 1 else None

    @classmethod
    @contextmanager
    def opened(cls, count: int | None = None) -> Iterator[Threads]:
        """Open threads for the ``with`` block: by default as many as torch would use."""
        before = torch.get_num_threads()
        threads = cls(count or before)
        torch.set_num_threads(1)
        try:
            yield threads
        finally:
            torch.set_num_threads(before)
            clear()
            if threads._pool is not None:
                threads._pool.shutdown(cancel_futures=True)

    @property
    def workers(self) -> Threads:
        """The threads of this process."""
        return self

    def map(
        self,
        function: Callable[[Task], Result],
        tasks: Iterable[Task],
        *,
        on_result: Callable[[Task, Result], None] | None = None,
    ) -> list[Result]:
        """Return ``function(task)`` for every task, in their order.

        For workers in other processes, the function must be picklable: `functools.partial` of a function of a
        module. It is sent to each worker once, and the tasks one by one. ``on_result`` is called with every
        task and result as soon as it is ready.
        """

        def done(task: Task) -> Result:
            result = function(task)
            if on_result is not None:
                with self._lock:
                    on_result(task, result)
            return result

        tasks = list(tasks)
        if self._pool is None or len(tasks) < 2:
            return [done(task) for task in tasks]
        if self._within:
            return self._with_idle_threads(self._pool, done, tasks)
        return list(self._pool.map(done, tasks))

    def stream(self, tasks: Iterable[Callable[[], Result]]) -> Iterator[Result]:
        """Yield the results of tasks in their order, with only a few tasks ahead of the consumer."""
        if self._pool is None or self._within:
            yield from (task() for task in tasks)
            return
        ahead: deque[Future[Result]] = deque()
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
        self, pool: ThreadPoolExecutor, do: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> list[Result]:
        """Run tasks on this thread, and on threads of the pool that are idle meanwhile."""
        left, results = deque(enumerate(tasks)), dict[int, Result]()

        def work() -> None:
            while left:
                try:
                    place, task = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                results[place] = do(task)

        helping = [pool.submit(work) for _ in range(min(self.count, len(tasks)) - 1)]
        try:
            work()
        finally:
            left.clear()
            begun = [future for future in helping if not future.cancel()]
            wait(begun)
        for future in begun:
            future.result()
        return [results[place] for place in range(len(tasks))]

    @property
    def _within(self) -> bool:
        """Whether the current thread is one of the pool."""
        return getattr(self._busy, "within", False)

    def _prepare(self) -> None:
        self._busy.within = True
        torch.set_num_threads(1)


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


# ── devices of this machine, and the types to compute in ──────────────────────────────────────


def require_device(device: str, dtype: torch.dtype = torch.float32) -> str:
    """Return the device; refuse one that cannot compute here, or not in this type."""
    try:
        torch.empty(1, dtype=dtype, device=device).sum().item()
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        raise SettingError(
            f"device {device!r} cannot be used here ({reason_of(error)})",
            hint="leave out `device` to compute on cpu",
        ) from error
    return device


def widest(device: torch.device) -> torch.dtype:
    """Return the widest type that a device computes in: some have no float64."""
    try:
        return torch.empty(0, dtype=torch.float64, device=device).dtype
    except TypeError:
        return torch.float32


def as_precision(dtype: torch.dtype | str) -> torch.dtype:
    """Return the type to compute in; refuse types in which sums lose digits."""
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float32, torch.float64):
        raise SettingError(f"dtype = {dtype}: too coarse to compute in", hint="choose float32 or float64")
    return chosen


def release_memory() -> None:
    """Give back the memory of what is gone; the C library keeps what lies between blocks in use."""
    gc.collect()
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    torch.cuda.empty_cache()  # does nothing where there is none


def device_memory(device: torch.device) -> int:
    """Return all memory of a device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
