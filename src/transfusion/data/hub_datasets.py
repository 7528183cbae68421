"""Datasets from the hub: one request decides whether the hub has the dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from transfusion.errors import DataError
from transfusion.runtime.optional_libraries import require_library

SECONDS = 10
"""Time limit for that request."""
_LOGGERS = ("huggingface_hub", "datasets", "httpx", "fsspec")


def fetch_dataset(label: str, repo: str, config: str | None, revision: str | None) -> Any:
    """Load a dataset of the hub with ``datasets``; if the hub does not answer, from its cache."""
    datasets = require_library("datasets", "data")
    with _quiet():
        reason = _unreachable(label, repo, revision)
        try:
            with _offline(datasets, reason is not None):
                return datasets.load_dataset(repo, config, revision=revision)
        except Exception as error:  # the library raises many types
            _refuse(label, reason or error)


def _unreachable(label: str, repo: str, revision: str | None) -> Exception | None:
    """Return why the hub does not answer, or None. Refuse a dataset that the hub does not have."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        huggingface_hub.dataset_info(repo, revision=revision, timeout=SECONDS)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        _refuse(label, error)
    except Exception as error:  # the network library raises many types
        return error
    return None


def _refuse(label: str, error: Exception) -> NoReturn:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise DataError(
        f"{label}: no such file or folder here, and the hub could not provide it ({reason})",
        hint="check the spelling, the network and your access, or give local examples",
    ) from error


@contextmanager
def _offline(datasets: Any, wanted: bool) -> Iterator[None]:
    """Within the block, no further request is sent if ``wanted``."""
    from huggingface_hub import constants

    settings: tuple[Any, Any] = (datasets.config, constants)
    before = [one.HF_HUB_OFFLINE for one in settings]
    try:
        for one in settings:
            one.HF_HUB_OFFLINE = wanted or one.HF_HUB_OFFLINE
        yield
    finally:
        for one, value in zip(settings, before, strict=True):
            one.HF_HUB_OFFLINE = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block, the libraries log errors only."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
