"""Progress of a run: notes for the user, and bars.

The command line prints them. A function that is called without ``progress`` shows them in a terminal and in a
notebook, and is silent elsewhere.

Every verb takes a ``progress``. `followed` makes it known to whatever the verb calls, so that a phase deep
inside shows a bar without an argument for it on the way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import current_thread, main_thread
from time import monotonic
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


class Pace:
    """How many tokens a phase gets through in a second."""

    def __init__(self) -> None:
        self._began, self._tokens = monotonic(), 0

    def after(self, tokens: int) -> str:
        """Return the pace after some more tokens."""
        self._tokens += tokens
        return f"{self._tokens / max(monotonic() - self._began, 1e-9):,.0f} tokens/s"


SILENT = Progress()
"""Notes and bars are dropped."""
BARS = "bars in a terminal or a notebook, nothing elsewhere"
"""What follows a run that is given nothing else, in words."""

_FOLLOWING: ContextVar[Progress | None] = ContextVar("progress", default=None)
"""What follows the running verb; None where none runs."""


def of_caller() -> Progress | None:
    """Return what shows a verb to a person who called it: in a notebook or a terminal; None elsewhere."""
    if _FOLLOWING.get() is not None:
        return None
    if os.environ.get("RANK", "0") != "0" or current_thread() is not main_thread():  # of several, one speaks
        return None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        from transfusion.runtime.notebook import NotebookProgress

        return NotebookProgress()
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from transfusion.runtime.terminal import TerminalProgress

    return TerminalProgress()


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
        if "progress" not in kwargs and (shown := of_caller()) is not None:
            kwargs["progress"] = shown
        progress = kwargs.get("progress")
        with following(progress if isinstance(progress, Progress) else None):
            return verb(*args, **kwargs)

    return run


def warn(text: str) -> None:
    """Take a warning about the result of the running verb."""
    (_FOLLOWING.get() or SILENT).warn(text)


@contextmanager
def phase(text: str, total: int | None = None) -> Iterator[Advance]:
    """Follow a part of the running verb that may take longer than a second."""
    with (_FOLLOWING.get() or SILENT).bar(total, text) as advance:
        yield advance
