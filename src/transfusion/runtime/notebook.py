"""Progress in a notebook: bars below the cell while it runs, which leave nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib import import_module
from time import monotonic
from typing import Any

from transfusion.runtime.progress import Advance, Progress
from transfusion.runtime.terminal import one_line


@dataclass
class _Bar:
    text: str
    total: int | None
    done: int = 0

    def html(self) -> str:
        known = f' value="{self.done}" max="{self.total}"' if self.total else ""
        return f"<progress{known}></progress> {escape(str(self))}"

    def __str__(self) -> str:
        return one_line(f"{self.done}/{self.total} {self.text}" if self.total else self.text)


class NotebookProgress(Progress):
    """Notes and warnings as printed lines, and bars that are drawn anew where they are."""

    AFTER, EVERY = 0.3, 0.2
    """The seconds of a run before its bars appear, and between two drawings."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._bars: list[_Bar] = []
        self._place: Any = None
        self._drawn = 0.0

    def note(self, text: str) -> None:
        """Print a note, once."""
        self._tell(text, sys.stdout)

    def warn(self, text: str) -> None:
        """Print a warning, once, where a notebook shows errors."""
        self._tell(f"warning: {text}", sys.stderr)

    def _tell(self, text: str, stream: Any) -> None:
        if text not in self._told:
            self._told.add(text)
            print(one_line(text), file=stream)

    @contextmanager
    def bar(self, total: int | None = None, text: str = "") -> Iterator[Advance]:
        """Draw a bar below that of the phase around it; with the last one, all disappear."""
        bar = _Bar(text, total)
        if not self._bars:
            self._drawn = monotonic() + self.AFTER - self.EVERY
        self._bars.append(bar)
        self._draw()

        def advance(text: str, done: int | None = None, total: int | None = None) -> None:
            bar.text, bar.done = text, bar.done + 1 if done is None else done
            bar.total = bar.total if total is None else total
            self._draw()

        try:
            yield advance
        finally:
            self._bars.remove(bar)
            if not self._bars and self._place is not None:
                self._show("", "")
                self._place = None

    def _draw(self) -> None:
        if monotonic() - self._drawn >= self.EVERY:
            bars = list(self._bars)
            self._show("<br>".join(bar.html() for bar in bars), "; ".join(map(str, bars)))
            self._drawn = monotonic()

    def _show(self, html: str, text: str) -> None:
        shown = {"text/html": html, "text/plain": text}
        if self._place is None:
            display: Any = import_module("IPython.display").display
            self._place = display(shown, raw=True, display_id=True)
        else:
            self._place.update(shown, raw=True)
