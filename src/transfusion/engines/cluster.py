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
from transfusion.engines import Engine, Item, Result, Subject
from transfusion.engines.hands import Hand, Outcome
from transfusion.engines.joining import joined_cluster
from transfusion.errors import ClusterError
from transfusion.workers import Workers

ATTEMPTS = 4
"""How many workers may die at one piece before it counts as what kills them."""
SOON, PATIENCE = 20.0, 100.0
"""Seconds to wait for a worker when there is none: until that is said, and then until it is given up."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Hired:
    """A worker as it is seen from here."""

    actor: Any
    host: str = ""
    near: set[str] = field(default_factory=set)
    """What it has had before, and may have kept."""


@dataclass(eq=False)
class _Errand:
    """Pieces of work on one subject, until all of them are done."""

    subject: Any
    tasks: Sequence[bytes]
    words: Sequence[str]
    """For every piece, what it is near to."""
    parts: Sequence[Any] = ()
    """What other workers have made for it."""
    keep: bool = False
    """Whether values stay where they are."""
    heard: Callable[[int], None] | None = None
    """Who is told of every piece that is done."""
    waiting: list[int] = field(default_factory=list)
    busy: dict[Any, tuple[_Hired, int, Any]] = field(default_factory=dict)
    """What will be said of a piece: who has it, which one it is, and where its value will be."""
    values: dict[int, Any] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.tasks)))


class Cluster(Engine):
    """Workers of a Ray cluster."""

    shares_memory = False

    def __init__(self, ray: Any, count: int, workers: Workers) -> None:
        self.ray, self.count, self.workers = ray, count, workers
        self._actor = ray.remote(num_cpus=1, max_restarts=0)(Hand)
        self._sent: dict[int, tuple[Any, int, Any]] = {}
        """Subjects: each itself, its number, and where it can be fetched."""
        self._idle: list[_Hired] = []
        self._expected: dict[Any, _Hired] = {}
        """Workers that have been asked for, by their first word."""
        for _ in range(count):
            self._hire()

    @classmethod
    @contextmanager
    def joined_at(cls, address: str | None, count: int | None, workers: Workers) -> Iterator[Cluster]:
        """A cluster that is running at an address, or one that is started on this machine."""
        with joined_cluster(address, count) as (ray, cores):
            cluster = cls(ray, count or cores, workers)
            try:
                yield cluster
            finally:
                for hand in [*cluster._idle, *cluster._expected.values()]:
                    ray.kill(hand.actor)

    def each(
        self,
        subject: Subject,
        do: Callable[[Subject, Item], Result],
        items: Sequence[Item],
        *,
        near: Callable[[Item], str] | None = None,
        heard: Callable[[Item, Result], None] | None = None,
    ) -> list[Result]:
        errand = self._errand(subject, do, items, near)
        if heard is not None:
            errand.heard = lambda place: heard(items[place], errand.values[place])
        return self._run(errand)

    def joined(
        self,
        subject: Subject,
        do: Callable[[Subject, Item], Any],
        items: Sequence[Item],
        join: Callable[[Subject, list[Any]], Result],
        *,
        near: Callable[[Item], str] | None = None,
    ) -> Result:
        for _ in range(ATTEMPTS):
            parts = self._errand(subject, do, items, near)
            parts.keep = True
            whole = self._errand(subject, join, [None], None)
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

    def _errand(
        self, subject: Any, do: Any, items: Sequence[Any], near: Callable[[Any], str] | None
    ) -> _Errand:
        words = [near(item) if near else "" for item in items]
        return _Errand(subject, [pickle.dumps((do, item)) for item in items], words)

    def _run(self, errand: _Errand) -> list[Any]:
        try:
            while len(errand.values) < len(errand.tasks):
                for hand in self._idle[: len(errand.waiting)]:
                    self._give(hand, errand)
                waited_for = [*errand.busy, *self._expected]
                for told in self._next(waited_for, anybody=bool(errand.busy)):
                    if told in self._expected:
                        self._welcome(told)
                    else:
                        self._finish(told, errand)
        finally:
            for hand, _, _ in errand.busy.values():  # after an error, they are at work still
                self.ray.kill(hand.actor)
                self._hire()
        return [errand.values[place] for place in range(len(errand.tasks))]

    def _next(self, waited_for: list[Any], *, anybody: bool) -> list[Any]:
        """What has been said next; if nobody is at work, it is waited for only so long."""
        if anybody:
            return self._heard(waited_for, None)
        if not (done := self._heard(waited_for, SOON)):
            _log.warning("waiting for a worker: the cluster has no free core")
            done = self._heard(waited_for, PATIENCE)
        if not done:
            raise ClusterError(
                f"no worker came within {SOON + PATIENCE:.0f} seconds",
                hint="the cluster has no free core: see `ray status`, or ask for fewer --jobs",
            )
        return done

    def _heard(self, waited_for: list[Any], timeout: float | None) -> list[Any]:
        try:
            done: list[Any] = self.ray.wait(waited_for, timeout=timeout)[0]
        except SystemError as error:  # a signal came while Ray's own code was waiting
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        return done

    def _give(self, hand: _Hired, errand: _Errand) -> None:
        place = self._chosen(hand, errand)
        number, packed = self._send(errand.subject)
        method = hand.actor.do.options(num_returns=2)
        told, value = method.remote(number, packed, errand.tasks[place], *errand.parts)
        self._idle.remove(hand)
        errand.waiting.remove(place)
        errand.busy[told] = (hand, place, value)
        hand.near.add(errand.words[place])

    def _chosen(self, hand: _Hired, errand: _Errand) -> int:
        """The piece for a worker: one that is near to it, or to nobody; or the last of somebody else's."""
        hands = [*self._idle, *(busy for busy, _, _ in errand.busy.values())]
        taken = set().union(*(other.near for other in hands)) - hand.near
        near = [place for place in errand.waiting if errand.words[place] in hand.near - {""}]
        free = [place for place in errand.waiting if errand.words[place] not in taken]
        return next(iter([*near, *free]), errand.waiting[-1])

    def _finish(self, told: Any, errand: _Errand) -> None:
        hand, place, value = errand.busy.pop(told)
        try:
            outcome: Outcome = self.ray.get(told)
            outcome.require_success(hand.host)
            if (clock := getattr(errand.subject, "clock", None)) is not None:
                clock.add(outcome.seconds)
            errand.values[place] = value if errand.keep else self.ray.get(value)
        except (self.ray.exceptions.ActorDiedError, self.ray.exceptions.ActorUnavailableError) as error:
            self._hire()
            self._again(hand, place, errand, error)
            return
        except self.ray.exceptions.ObjectLostError as error:  # together with the machine that had it
            self._idle.append(hand)
            if errand.parts:
                raise
            self._again(hand, place, errand, error)
            return
        except BaseException:
            self._idle.append(hand)
            raise
        self._idle.append(hand)
        if errand.heard is not None:
            errand.heard(place)

    def _again(self, hand: _Hired, place: int, errand: _Errand, error: Exception) -> None:
        """Give a piece to somebody else, unless it has killed too many."""
        errand.deaths[place] += 1
        if errand.deaths[place] >= ATTEMPTS:
            raise ClusterError(
                f"{ATTEMPTS} workers died at one piece of work, the last on {hand.host}",
                hint="too little memory is the usual reason: ask for fewer --jobs, or less --memory",
            ) from error
        errand.waiting.insert(0, place)

    def _send(self, subject: Any) -> tuple[int, Any]:
        known = self._sent.get(id(subject))
        if known is None:
            packed = self.ray.put(pickle.dumps(subject))
            known = self._sent[id(subject)] = (subject, len(self._sent), packed)
        return known[1:]

    # ── workers ──────────────────────────────────────────────────────────────────────────────

    def _hire(self) -> None:
        hand = _Hired(self._actor.remote())
        self._expected[hand.actor.greet.remote()] = hand

    def _welcome(self, told: Any) -> None:
        hand = self._expected.pop(told)
        try:
            hand.host, version = self.ray.get(told)
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise ClusterError(
                f"a worker could not be started ({reason})",
                hint=f"every machine of the cluster needs transfusion {__version__} and what it needs",
            ) from error
        if version != __version__:
            raise ClusterError(
                f"{hand.host} has transfusion {version}, and here it is {__version__}",
                hint="install the same release on every machine",
            )
        self._idle.append(hand)
