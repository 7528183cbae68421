"""A cluster through Ray: worker processes on one machine or on many, which read the same files.

Every worker is an actor with one thread. It is sent a subject once, and then pieces of work; what it keeps
of them stays with it. Whoever asks holds pieces and results, which are maps and numbers. A worker that dies
costs the piece that it was at: another takes that up, and a new worker is hired.
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
"""How many workers may die at one piece before it counts as what kills them."""
SOON, PATIENCE = 20.0, 100.0
"""Seconds to wait for a worker when there is none: until that is said, and then until it is given up."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _RemoteWorker:
    """A worker as it is seen from here."""

    actor: Any
    host: str = ""
    affinity: set[str] = field(default_factory=set)
    """What it has had before, and may have kept."""


@dataclass(eq=False)
class _TaskBatch:
    """Pieces of work on one subject, until all of them are done."""

    subject: Any
    tasks: Sequence[bytes]
    words: Sequence[str]
    """For every piece, what it is near to."""
    parts: Sequence[Any] = ()
    """What other workers have made for it."""
    keep: bool = False
    """Whether values stay where they are."""
    on_result: Callable[[int], None] | None = None
    """Who is told of every piece that is done."""
    waiting: list[int] = field(default_factory=list)
    busy: dict[Any, tuple[_RemoteWorker, int, Any]] = field(default_factory=dict)
    """What will be said of a piece: who has it, which one it is, and where its value will be."""
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
        """Subjects: each itself, its number, and where it can be fetched."""
        self._idle: list[_RemoteWorker] = []
        self._expected: dict[Any, _RemoteWorker] = {}
        """Workers that have been asked for, by their first word."""
        for _ in range(count):
            self._start_worker()

    @classmethod
    @contextmanager
    def joined_at(cls, address: str | None, count: int | None, workers: Threads) -> Iterator[RayEngine]:
        """A cluster that is running at an address, or one that is started on this machine."""
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
            "parts of a gain were lost again and again on their way between workers",
            hint="machines of the cluster are failing; look at `ray status`",
        )

    # ── pieces of work ───────────────────────────────────────────────────────────────────────

    def _batch(
        self, subject: Any, do: Any, items: Sequence[Any], affinity: Callable[[Any], str] | None
    ) -> _TaskBatch:
        words = [affinity(item) if affinity else "" for item in items]
        return _TaskBatch(subject, [pickle.dumps((do, item)) for item in items], words)

    def _run(self, batch: _TaskBatch) -> list[Any]:
        try:
            while len(batch.values) < len(batch.tasks):
                for worker in self._idle[: len(batch.waiting)]:
                    self._give(worker, batch)
                waited_for = [*batch.busy, *self._expected]
                for info in self._next(waited_for, anybody=bool(batch.busy)):
                    if info in self._expected:
                        self._welcome(info)
                    else:
                        self._finish(info, batch)
        finally:
            for worker, _, _ in batch.busy.values():  # after an error, they are at work still
                self.ray.kill(worker.actor)
                self._start_worker()
        return [batch.values[place] for place in range(len(batch.tasks))]

    def _next(self, waited_for: list[Any], *, anybody: bool) -> list[Any]:
        """What has been said next; if nobody is at work, it is waited for only so long."""
        if anybody:
            return self._on_result(waited_for, None)
        if not (done := self._on_result(waited_for, SOON)):
            _log.warning("waiting for a worker: the cluster has no free core")
            done = self._on_result(waited_for, PATIENCE)
        if not done:
            raise ClusterError(
                f"no worker came within {SOON + PATIENCE:.0f} seconds",
                hint="the cluster has no free core: see `ray status`, or ask for fewer --jobs",
            )
        return done

    def _on_result(self, waited_for: list[Any], timeout: float | None) -> list[Any]:
        try:
            done: list[Any] = self.ray.wait(waited_for, timeout=timeout)[0]
        except SystemError as error:  # a signal came while Ray's own code was waiting
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        return done

    def _give(self, worker: _RemoteWorker, batch: _TaskBatch) -> None:
        place = self._chosen(worker, batch)
        number, packed = self._send(batch.subject)
        method = worker.actor.do.options(num_returns=2)
        info, value = method.remote(number, packed, batch.tasks[place], *batch.parts)
        self._idle.remove(worker)
        batch.waiting.remove(place)
        batch.busy[info] = (worker, place, value)
        worker.affinity.add(batch.words[place])

    def _chosen(self, worker: _RemoteWorker, batch: _TaskBatch) -> int:
        """The piece for a worker: one that is near to it, or to nobody; or the last of somebody else's."""
        hands = [*self._idle, *(busy for busy, _, _ in batch.busy.values())]
        taken = set().union(*(other.affinity for other in hands)) - worker.affinity
        affinity = [place for place in batch.waiting if batch.words[place] in worker.affinity - {""}]
        free = [place for place in batch.waiting if batch.words[place] not in taken]
        return next(iter([*affinity, *free]), batch.waiting[-1])

    def _finish(self, info: Any, batch: _TaskBatch) -> None:
        worker, place, value = batch.busy.pop(info)
        try:
            outcome: WorkerResult = self.ray.get(info)
            outcome.require_success(worker.host)
            if (clock := getattr(batch.subject, "clock", None)) is not None:
                clock.add(outcome.seconds)
            batch.values[place] = value if batch.keep else self.ray.get(value)
        except (self.ray.exceptions.ActorDiedError, self.ray.exceptions.ActorUnavailableError) as error:
            self._start_worker()
            self._again(worker, place, batch, error)
            return
        except self.ray.exceptions.ObjectLostError as error:  # together with the machine that had it
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
        """Give a piece to somebody else, unless it has killed too many."""
        batch.deaths[place] += 1
        if batch.deaths[place] >= ATTEMPTS:
            raise ClusterError(
                f"{ATTEMPTS} workers died at one piece of work, the last on {worker.host}",
                hint="too little memory is the usual reason: ask for fewer --jobs, or less --memory",
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

    def _welcome(self, info: Any) -> None:
        worker = self._expected.pop(info)
        try:
            worker.host, version = self.ray.get(info)
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise ClusterError(
                f"a worker could not be started ({reason})",
                hint=f"every machine of the cluster needs transfusion {__version__} and what it needs",
            ) from error
        if version != __version__:
            raise ClusterError(
                f"{worker.host} has transfusion {version}, and here it is {__version__}",
                hint="install the same release on every machine",
            )
        self._idle.append(worker)
