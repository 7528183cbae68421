"""Join a Ray cluster, or start one on this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from transfusion.errors import ClusterError
from transfusion.runtime.optional_libraries import require_library

STORE = 2**29
"""Bytes of the object store of a cluster that is started here."""
ATTEMPTS = 3
"""How often a start is tried."""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns
}


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
        _use_token()
    ray = require_ray()
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    handlers = _handlers()
    if address is None:
        start(ray, num_cpus=cores, object_store_memory=STORE, **quiet)
    else:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _unreachable(address, str(error).splitlines()[0]) from error
    for number, handler in handlers.items():  # Ray has replaced them
        signal.signal(number, handler)
    try:
        yield ray, _cores(ray)
    finally:
        ray.shutdown()


def _handlers() -> dict[signal.Signals, Any]:
    """Return this program's own handlers of signals to stop."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {number: handler for number, handler in found.items() if callable(handler)}


def _use_token() -> None:
    """Turn on token authentication, if this user has a token: the cluster may require it."""
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if "RAY_AUTH_MODE" in os.environ or not (given or (Path.home() / ".ray" / "auth_token").is_file()):
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    if "ray" in sys.modules:  # Ray has read its settings already
        with suppress(ImportError, AttributeError):
            import_module("ray._raylet").Config.initialize("")


def _cores(ray: Any) -> int:
    cores = int(ray.cluster_resources().get("CPU", 0))
    if not cores:
        raise ClusterError("the cluster has no cores", hint="start a node with cores: ray start --num-cpus …")
    return cores


def _require_listener(address: str) -> None:
    """Refuse an address at which nothing listens. Ray itself would try for a minute first."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        if address in ("auto", "local"):
            return
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
