"""The engine on Ray: worker processes on one machine or many, which read the same files.

Every worker is an actor with one thread. It receives each subject once, then tasks, and keeps its own cache.
This process holds only tasks and results, which are maps and numbers. The task of a worker that dies goes
to another worker, and a new worker is started.
"""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transfusion import __version__
from transfusion.errors import ClusterError
from transfusion.runtime.engines import Engine, Item, Result, Subject
from transfusion.runtime.ray_cluster import joined_cluster
from transfusion.runtime.ray_worker import RayWorker, WorkerResult
from transfusion.runtime.threads import Threads

ATTEMPTS = 4
"""How many workers may die at one task before the run ends with an error."""
SOON, PATIENCE = 20.0, 100.0
"""Seconds to wait when there is no worker: until a warning, and then until the error."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _RemoteWorker:
    """A worker, seen from this process."""

    actor: Any
    host: str = ""
    affinity: set[str] = field(default_factory=set)
    """Affinities of the tasks that it had, whose data it may have kept."""


@dataclass(eq=False)
class _TaskBatch:
    """Tasks on one subject, until all of them are done."""

    subject: Any
    tasks: Sequence[bytes]
    affinities: Sequence[str]
    """The affinity of every task."""
    parts: Sequence[Any] = ()
    """Results of other workers that the task needs."""
    keep: bool = False
    """Whether values stay in the object store."""
    on_result: Callable[[int], None] | None = None
    """Called with the place of every task that is done."""
    waiting: list[int] = field(default_factory=list)
    busy: dict[Any, tuple[_RemoteWorker, int, Any]] = field(default_factory=dict)
    """By the future of its outcome: the worker of a task, its place, and the future of its value."""
    values: dict[int, Any] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.tasks)))


class RayEngine(Engine):
    """Workers of a Ray cluster."""

    shares_memory = False

    def __init__(self, ray: Any, count: int, workers: Threads) -> None:
        self.ray, self.count, self.workers = ray, count, workers
        self._actor = ray.remote(num_cpus=1, max_restarts=0)(RayWorker)
        self._sent: dict[int, tuple[Any, int, Any]] = {}
        """Subjects, with their number and their reference in the object store."""
        self._idle: list[_RemoteWorker] = []
        self._expected: dict[Any, _RemoteWorker] = {}
        """Workers that are starting, by the future of their greeting."""
        for _ in range(count):
            self._start_worker()

    @classmethod
    @contextmanager
    def joined_at(cls, address: str | None, count: int | None, workers: Threads) -> Iterator[RayEngine]:
        """Open an engine on the cluster at an address, or on one that is started on this machine."""
        with joined_cluster(address, count) as (ray, cores):
            cluster = cls(ray, count or cores, workers)
            try:
                yield cluster
            finally:
                for worker in [*cluster._idle, *cluster._expected.values()]:
                    ray.kill(worker.actor)

    def each(
        self,
        subject: Subject,
        do: Callable[[Subject, Item], Result],
        items: Sequence[Item],
        *,
        affinity: Callable[[Item], str] | None = None,
        on_result: Callable[[Item, Result], None] | None = None,
    ) -> list[Result]:
        batch = self._batch(subject, do, items, affinity)
        if on_result is not None:
            batch.on_result = lambda place: on_result(items[place], batch.values[place])
        return self._run(batch)

    def map_reduce(
        self,
        subject: Subject,
        do: Callable[[Subject, Item], Any],
        items: Sequence[Item],
        join: Callable[[Subject, list[Any]], Result],
        *,
        affinity: Callable[[Item], str] | None = None,
    ) -> Result:
        for _ in range(ATTEMPTS):
            parts = self._batch(subject, do, items, affinity)
            parts.keep = True
            whole = self._batch(subject, join, [None], None)
            whole.parts = self._run(parts)
            try:
                result: Result = self._run(whole)[0]
            except self.ray.exceptions.ObjectLostError:
                continue
            return result
        raise ClusterError(
            f"results of workers were lost {ATTEMPTS} times on their way to another worker",
            hint="machines of the cluster are failing: see `ray status`",
        )

    # ── tasks ───────────────────────────────────────────────────────────────────────

    def _batch(
        self, subject: Any, do: Any, items: Sequence[Any], affinity: Callable[[Any], str] | None
    ) -> _TaskBatch:
        affinities = [affinity(item) if affinity else "" for item in items]
        return _TaskBatch(subject, [pickle.dumps((do, item)) for item in items], affinities)

    def _run(self, batch: _TaskBatch) -> list[Any]:
        try:
            while len(batch.values) < len(batch.tasks):
                for worker in self._idle[: len(batch.waiting)]:
                    self._give(worker, batch)
                futures = [*batch.busy, *self._expected]
                for future in self._next(futures, busy=bool(batch.busy)):
                    if future in self._expected:
                        self._welcome(future)
                    else:
                        self._finish(future, batch)
        finally:
            for worker, _, _ in batch.busy.values():  # after an error, they are still at work
                self.ray.kill(worker.actor)
                self._start_worker()
        return [batch.values[place] for place in range(len(batch.tasks))]

    def _next(self, futures: list[Any], *, busy: bool) -> list[Any]:
        """Return the futures that are ready next. If no worker is busy, wait only for a limited time."""
        if busy:
            return self._wait(futures, None)
        if not (done := self._wait(futures, SOON)):
            _log.warning("waiting for a worker: the cluster has no free core")
            done = self._wait(futures, PATIENCE)
        if not done:
            raise ClusterError(
                f"no worker started within {SOON + PATIENCE:.0f} seconds",
                hint="the cluster has no free core: see `ray status`, or give fewer `jobs`",
            )
        return done

    def _wait(self, futures: list[Any], timeout: float | None) -> list[Any]:
        try:
            done: list[Any] = self.ray.wait(futures, timeout=timeout)[0]
        except SystemError as error:  # a signal came while Ray's own code was waiting
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        return done

    def _give(self, worker: _RemoteWorker, batch: _TaskBatch) -> None:
        place = self._chosen(worker, batch)
        number, packed = self._send(batch.subject)
        method = worker.actor.do.options(num_returns=2)
        outcome, value = method.remote(number, packed, batch.tasks[place], *batch.parts)
        self._idle.remove(worker)
        batch.waiting.remove(place)
        batch.busy[outcome] = (worker, place, value)
        worker.affinity.add(batch.affinities[place])

    def _chosen(self, worker: _RemoteWorker, batch: _TaskBatch) -> int:
        """Choose a task for a worker: of its own affinities, else of no other worker's, else the last."""
        workers = [*self._idle, *(busy for busy, _, _ in batch.busy.values())]
        taken = set().union(*(other.affinity for other in workers)) - worker.affinity
        own = [place for place in batch.waiting if batch.affinities[place] in worker.affinity - {""}]
        free = [place for place in batch.waiting if batch.affinities[place] not in taken]
        return next(iter([*own, *free]), batch.waiting[-1])

    def _finish(self, future: Any, batch: _TaskBatch) -> None:
        worker, place, value = batch.busy.pop(future)
        try:
            outcome: WorkerResult = self.ray.get(future)
            outcome.require_success(worker.host)
            if (clock := getattr(batch.subject, "clock", None)) is not None:
                clock.add(outcome.seconds)
            batch.values[place] = value if batch.keep else self.ray.get(value)
        except (self.ray.exceptions.ActorDiedError, self.ray.exceptions.ActorUnavailableError) as error:
            self._start_worker()
            self._again(worker, place, batch, error)
            return
        except self.ray.exceptions.ObjectLostError as error:  # lost with the machine that held it
            self._idle.append(worker)
            if batch.parts:
                raise
            self._again(worker, place, batch, error)
            return
        except BaseException:
            self._idle.append(worker)
            raise
        self._idle.append(worker)
        if batch.on_result is not None:
            batch.on_result(place)

    def _again(self, worker: _RemoteWorker, place: int, batch: _TaskBatch, error: Exception) -> None:
        """Give a task to another worker, unless too many died at it."""
        batch.deaths[place] += 1
        if batch.deaths[place] >= ATTEMPTS:
            raise ClusterError(
                f"{ATTEMPTS} workers died at one task, the last on {worker.host}",
                hint="the usual reason is too little memory: give fewer `jobs`, or less `memory`",
            ) from error
        batch.waiting.insert(0, place)

    def _send(self, subject: Any) -> tuple[int, Any]:
        known = self._sent.get(id(subject))
        if known is None:
            packed = self.ray.put(pickle.dumps(subject))
            known = self._sent[id(subject)] = (subject, len(self._sent), packed)
        return known[1:]

    # ── workers ──────────────────────────────────────────────────────────────────────────────

    def _start_worker(self) -> None:
        worker = _RemoteWorker(self._actor.remote())
        self._expected[worker.actor.greet.remote()] = worker

    def _welcome(self, future: Any) -> None:
        worker = self._expected.pop(future)
        try:
            worker.host, version = self.ray.get(future)
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise ClusterError(
                f"a worker could not be started ({reason})",
                hint=f"every machine of the cluster needs transfusion {__version__} and its dependencies",
            ) from error
        if version != __version__:
            raise ClusterError(
                f"{worker.host} has transfusion {version}, and here it is {__version__}",
                hint="install the same release on every machine",
            )
        self._idle.append(worker)
