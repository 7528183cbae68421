"""The engine on Ray: worker processes on one machine or many, which read the same files.

Tasks are those of Ray, one thread each. Ray starts a task again on another worker if its worker dies.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from transfusion import __version__, errors
from transfusion.errors import ClusterError, TransfusionError
from transfusion.runtime.engines import Result, Task, Threads
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.scratch import give_back_at_once

DEATHS = 3
"""How many workers may die at one task before the run ends with an error."""
PATIENCE = 120.0
"""Seconds to wait for the first worker."""
STORE = 2**29
"""Bytes of the object store of a cluster that is started here."""
ATTEMPTS = 3
"""How often a start is tried."""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns
}
_CALLS = count()
"""Numbers the functions that are sent, so that no worker takes one for another of the same content."""


class RayEngine:
    """Workers of a Ray cluster, as many as ``count``, and the threads of this process."""

    shares_memory = False

    def __init__(self, ray: Any, count: int, workers: Threads) -> None:
        self.ray, self.count, self.workers = ray, count, workers
        remote = ray.remote(num_cpus=1, max_retries=DEATHS)
        self._run, self._greet = remote(run_task), remote(greet)

    @classmethod
    @contextmanager
    def joined_at(cls, address: str | None, count: int | None, workers: Threads) -> Iterator[RayEngine]:
        """Open an engine on the cluster at an address, or on one that is started on this machine."""
        with joined_cluster(address, count) as (ray, cores):
            engine = cls(ray, count or cores, workers)
            engine.require_workers()
            yield engine

    def require_workers(self) -> None:
        """Refuse a cluster without a free core, or with another release of this package."""
        try:
            host, version = self.ray.get(self._greet.remote(), timeout=PATIENCE)
        except self.ray.exceptions.GetTimeoutError as error:
            raise ClusterError(
                f"no worker started within {PATIENCE:.0f} seconds",
                hint="the cluster has no free core: see `ray status`, or give fewer `jobs`",
            ) from error
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise ClusterError(
                f"a worker could not be started ({reason})",
                hint=f"every machine of the cluster needs transfusion {__version__} and its dependencies",
            ) from error
        if version != __version__:
            raise ClusterError(
                f"{host} has transfusion {version}, and here it is {__version__}",
                hint="install the same release on every machine",
            )

    def map(
        self,
        function: Callable[[Task], Result],
        tasks: Iterable[Task],
        *,
        on_result: Callable[[Task, Result], None] | None = None,
    ) -> list[Result]:
        """Return ``function(task)`` for every task, as `Threads.map` does."""
        tasks, packed = list(tasks), self.ray.put(pickle.dumps((next(_CALLS), function)))
        waiting, running, results = list(enumerate(tasks))[::-1], dict[Any, int](), dict[int, Any]()
        try:
            while waiting or running:
                while waiting and len(running) < self.count:
                    place, task = waiting.pop()
                    running[self._run.remote(packed, pickle.dumps(task))] = place
                future = self._next(list(running))
                place = running.pop(future)
                results[place] = self._result(future)
                if on_result is not None:
                    on_result(tasks[place], results[place])
        finally:
            for future in running:  # after an error
                self.ray.cancel(future, force=True)
        return [results[place] for place in range(len(tasks))]

    def _next(self, futures: list[Any]) -> Any:
        """Return a future that is ready."""
        try:
            return self.ray.wait(futures)[0][0]
        except SystemError as error:  # a signal came while Ray's own code was waiting
            raise (error.__cause__ or error) from None

    def _result(self, future: Any) -> Any:
        try:
            failure, value = self.ray.get(future)
        except self.ray.exceptions.WorkerCrashedError as error:
            raise ClusterError(
                f"{DEATHS + 1} workers died at one task",
                hint="the usual reason is too little memory: give fewer `jobs`, or less `memory`",
            ) from error
        if failure is not None:
            kind, message, hint = failure
            raise getattr(errors, kind)(message, hint=hint)
        return value


# ── on a worker ──────────────────────────────────────────────────────────────────────────────


def greet() -> tuple[str, str]:
    """Return the host name and the installed release."""
    return socket.gethostname(), __version__


def run_task(packed: bytes, task: bytes) -> tuple[tuple[str, str, str | None] | None, Any]:
    """Run one task; return an error for the user (class, message and hint), and the result."""
    try:
        return None, _unpacked(packed)(pickle.loads(task))
    except TransfusionError as error:
        return (type(error).__name__, f"on {socket.gethostname()}: {error.message}", error.hint), None


@lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> Callable[[Any], Any]:
    """Return the function that this worker was sent, after a look at the files that it reads."""
    torch.set_num_threads(1)
    give_back_at_once()
    function: Callable[[Any], Any] = pickle.loads(packed)[1]
    for given in function.args if isinstance(function, partial) else ():
        if hasattr(given, "require_unchanged"):  # refuse files that this machine does not see
            given.require_unchanged()
    return function


# ── joining a cluster ────────────────────────────────────────────────────────────────────────


def require_ray() -> Any:
    """Import Ray, with settings that it reads on import."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    return require_library("ray")


def start(ray: Any, **settings: Any) -> None:
    """Start a cluster on this machine. A busy machine may exceed Ray's time limit: then try again."""
    for left in reversed(range(ATTEMPTS)):
        try:
            ray.init(include_dashboard=False, **settings)
        except Exception as error:  # nothing more specific is raised then
            ray.shutdown()
            if not left:
                raise ClusterError(
                    f"Ray could not be started on this machine ({str(error).splitlines()[0]})",
                    hint="try again when the machine is less busy; see /tmp/ray/session_latest/logs",
                ) from error
        else:
            return


@contextmanager
def joined_cluster(address: str | None, cores: int | None) -> Iterator[tuple[Any, int]]:
    """Connect to Ray for the ``with`` block; yield Ray and the number of cores.

    A connection that exists already is used, and stays open.
    """
    known = sys.modules.get("ray")
    if known is not None and known.is_initialized():
        yield known, _cores(known)
        return
    if address is not None:
        _require_listener(address)
        given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
        if given or (Path.home() / ".ray" / "auth_token").is_file():  # the cluster may ask for it
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    ray = require_ray()
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if address is None:
        start(ray, num_cpus=cores, object_store_memory=STORE, **quiet)
    else:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _unreachable(address, str(error).splitlines()[0]) from error
    for number, handler in handlers.items():  # Ray has replaced them
        if callable(handler):
            signal.signal(number, handler)
    try:
        yield ray, _cores(ray)
    finally:
        ray.shutdown()


def _cores(ray: Any) -> int:
    cores = int(ray.cluster_resources().get("CPU", 0))
    if not cores:
        raise ClusterError("the cluster has no cores", hint="start a node with cores: ray start --num-cpus …")
    return cores


def _require_listener(address: str) -> None:
    """Refuse an address at which nothing listens. Ray itself would try for a minute first."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local"):
        return
    if not host or not port.isdigit():
        raise _unreachable(address, "a host and a port were expected, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, reason: str) -> ClusterError:
    return ClusterError(
        f"no Ray cluster can be reached at {address} ({reason})",
        hint="`ray start --head` starts one and prints its address; if it has a token (`ray get-auth-token`),"
        " this machine needs it too",
    )
