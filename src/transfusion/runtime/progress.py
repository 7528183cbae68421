"""Progress of a run: notes for the user, and bars. The library is silent; the command line prints them.

Every verb takes a ``progress``. `followed` makes it known to whatever the verb calls, so that a phase deep
inside shows a bar without an argument for it on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Advance(Protocol):
    """Move a bar on: by one, or to ``done`` of ``total``."""

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Show ``text`` beside the bar."""


class Progress:
    """An observer of a run that does nothing. Derive from it to show notes and bars.

    >>> class Printed(Progress):
    ...     def note(self, text: str) -> None:
    ...         print(text)
    >>> Printed().note("the two bases have different settings")
    the two bases have different settings
    """

    def note(self, text: str) -> None:
        """Take a note that the user should see."""

    def warn(self, text: str) -> None:
        """Take a warning about the result, which no observer should hide; here, a note like others."""
        self.note(f"warning: {text}")

    def detail(self, text: str) -> None:
        """Take a note for users who asked for details."""

    @contextmanager
    def bar(self, total: int | None = None, text: str = "") -> Iterator[Advance]:
        """Follow ``total`` pieces of work for the length of a block."""
        yield _ignore


def _ignore(text: str, done: int | None = None, total: int | None = None) -> None:
    """Ignore an advance."""


SILENT = Progress()
"""The default of every function: notes and bars are dropped."""

_FOLLOWING: ContextVar[Progress] = ContextVar("progress", default=SILENT)


@contextmanager
def following(progress: Progress | None) -> Iterator[None]:
    """Show the phases within the block on ``progress``, or on that of the verb around it."""
    before = _FOLLOWING.set(_FOLLOWING.get() if progress is None else progress)
    try:
        yield
    finally:
        _FOLLOWING.reset(before)


def followed(verb: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Show the phases of a verb on its argument ``progress``, or on that of the verb that calls it."""

    @wraps(verb)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        progress = kwargs.get("progress")
        with following(progress if isinstance(progress, Progress) else None):
            return verb(*args, **kwargs)

    return run


def warn(text: str) -> None:
    """Take a warning about the result of the running verb."""
    _FOLLOWING.get().warn(text)


@contextmanager
def phase(text: str, total: int | None = None) -> Iterator[Advance]:
    """Follow a part of the running verb that may take longer than a second."""
    with _FOLLOWING.get().bar(total, text) as advance:
        yield advance
