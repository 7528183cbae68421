"""Progress of a run: notes for the user, and bars. The library is silent; the command line prints them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


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
