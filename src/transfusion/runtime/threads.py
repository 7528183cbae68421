"""A pool of threads for independent tasks, with results that do not depend on the number of threads.

Every task computes on one thread. How a library divides one product among threads may change its last
digits, and with them a permutation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from transfusion.runtime.scratch import clear

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Threads:
    """A fixed number of threads. Tasks that are started by a task run on its own thread."""

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
        if self._pool is None or len(items) < 2 or getattr(self._busy, "within", False):
            return [do(item) for item in items]
        return list(self._pool.map(do, items))

    def stream(self, tasks: Iterable[Callable[[], _Result]]) -> Iterator[_Result]:
        """Yield the results of tasks in their order, with only a few tasks ahead of the consumer."""
        if self._pool is None or getattr(self._busy, "within", False):
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

    def _prepare(self) -> None:
        self._busy.within = True
        torch.set_num_threads(1)
