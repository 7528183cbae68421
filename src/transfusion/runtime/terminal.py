"""The terminal: texts that cannot steer it, and notes and bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.text import Text

from transfusion.runtime.progress import Advance, Progress


def one_line(text: str) -> str:
    """Return a text as one line without control sequences, which names in files may hold."""
    return " ".join(printable(line) for line in text.splitlines())


def printable(text: str) -> str:
    """Return a text in which every unprintable letter except line breaks is escaped."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


class SafeConsole(Console):
    """A console that escapes the control characters of all texts: strings from files may steer a terminal."""

    def render(self, *given: Any, **options: Any) -> Iterator[Segment]:
        """Render as usual, with printable texts alone."""
        for segment in super().render(*given, **options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


err = SafeConsole(stderr=True, highlight=False, soft_wrap=True)


class TerminalProgress(Progress):
    """Notes, details and bars on stderr: none of them, the usual, or all. Warnings are always printed."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet, self.verbose = quiet, verbose
        self._printed: set[str] = set()
        self._bars: Bars | None = None

    def worded(self, text: str) -> str:
        """Return a message in the words of whoever started the run; here, as it is."""
        return text

    def note(self, text: str) -> None:
        """Print a note, once: a run may open its models several times."""
        if not self.quiet:
            self._print_once(text, "dim")

    def warn(self, text: str) -> None:
        """Print a warning about the result, once."""
        self._print_once(f"warning: {text}", "yellow")

    def _print_once(self, text: str, style: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            err.print(one_line(self.worded(text)), style=style, markup=False)

    def detail(self, text: str) -> None:
        """Print a note, if details were asked for."""
        if self.verbose:
            self.note(text)

    @contextmanager
    def bar(self, total: int | None = None, text: str = "") -> Iterator[Advance]:
        """Draw a bar, below that of the phase around it; without a terminal, print a line now and then."""
        if self.quiet:
            with super().bar(total, text) as advance:
                yield advance
        elif not sys.stderr.isatty():
            yield _Lines(total)
        else:
            with self._opened() as bars:
                task = bars.add_task("", total=total, what=text)

                def advance_task(text: str, done: int | None = None, total: int | None = None) -> None:
                    if done is None:
                        bars.update(task, advance=1, what=text)
                    else:
                        bars.update(task, completed=done, total=total, what=text)

                try:
                    yield advance_task
                finally:  # a caller may go on after an error
                    if len(bars.tasks) > 1:
                        bars.remove_task(task)

    @contextmanager
    def _opened(self) -> Iterator[Bars]:
        """Return the display that is open, or open one for the length of the block."""
        if self._bars is not None:
            yield self._bars
            return
        columns = (SpinnerColumn(), BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn(), _Words())
        with Bars(*columns, console=err, transient=True) as self._bars:
            try:
                yield self._bars
            finally:
                self._bars = None


class _Lines:
    """A phase without a terminal, as in a log: a line every half minute."""

    EVERY = 30.0

    def __init__(self, total: int | None) -> None:
        self.total, self.done, self.begun = total, 0, monotonic()
        self.printed = self.begun

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Count, and print a line if the last one is old."""
        self.done = self.done + 1 if done is None else done
        self.total = self.total if total is None else total
        now = monotonic()
        if now - self.printed >= self.EVERY:
            self.printed = now
            counted = f"{self.done}/{self.total}" if self.total else str(self.done)
            err.print(one_line(f"{counted} {text}, {now - self.begun:.0f} s"), style="dim", markup=False)


class _Words(ProgressColumn):
    """What is being done, after the number of pieces done, if their total is known. It fits on one line."""

    def render(self, task: Task) -> Text:
        count = "" if task.total is None else f"{task.completed:g}/{task.total:g} "
        return Text(f"{count}{task.fields['what']}", no_wrap=True, overflow="ellipsis")
