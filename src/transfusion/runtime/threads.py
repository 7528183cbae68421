"""A pool of threads for independent tasks, with results that do not depend on the number of threads.

Every task computes on one thread. How a library divides one product among threads may change its last
digits, and with them a permutation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch

from transfusion.runtime.scratch import clear

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
