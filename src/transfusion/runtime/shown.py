"""Results that show themselves: as the tables of the command line, and in a notebook with their figure.

A class says what to show in ``__rich__``, and may have a figure. Its ``repr`` is then the table as text, and
notebooks get it in colours.
"""

from __future__ import annotations

import sys
from base64 import b64encode
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDE, PAGE = 240, 110
"""The width of tables where no terminal has one, and in a notebook if they fit."""
LINES = 60
"""The largest number of lines that a `repr` has; in a notebook, one scrolls."""
_FORMAT = '<pre style="white-space:pre;overflow:auto;max-height:45em;line-height:normal">{code}</pre>'


class Shown:
    """A result that shows itself in a terminal, in Python and in a notebook.

    >>> from rich.table import Table
    >>> class Counted(Shown):
    ...     def __rich__(self):
    ...         table = Table("tensors", "moved", box=None)
    ...         table.add_row("40", "38")
    ...         return table
    >>> Counted()
     tensors  moved
     40       38
    """

    def __rich__(self) -> RenderableType:
        """Return what the command line prints."""
        raise NotImplementedError

    def figure(self) -> bytes | None:
        """Return a figure as SVG, for notebooks; None if there is none."""
        return None

    def __repr__(self) -> str:
        lines = [line.rstrip() for line in self._printed().strip("\n").splitlines()]
        more = [f"… and {len(lines) - LINES} more lines: rich.print shows all"] if len(lines) > LINES else []
        return "\n".join([*lines[:LINES], *more])

    def _repr_html_(self) -> str:
        parts = [self._printed(html=True)]
        if (figure := self.figure()) is not None:
            source = f"data:image/svg+xml;base64,{b64encode(figure).decode()}"
            parts.append(f'<img alt="{escape(type(self).__name__)}" src="{source}" style="max-width:100%"/>')
        return "\n".join(parts)

    def _printed(self, *, html: bool = False) -> str:
        """Return what the command line prints: as text, or as HTML in colours."""
        from rich.measure import Measurement

        from transfusion.runtime.terminal import SafeConsole

        own = not html and sys.stdout is not None and sys.stdout.isatty()
        settings: dict[str, Any] = {"width": None if own else WIDE, "highlight": False}
        console = SafeConsole(file=StringIO(), record=html, force_jupyter=False, **settings)
        if html:
            needed = Measurement.get(console, console.options, self).minimum
            console.print(self, width=max(PAGE, needed))
            return console.export_html(inline_styles=True, code_format=_FORMAT)
        console.print(self, soft_wrap=True)
        return str(console.file.getvalue())  # type: ignore[attr-defined]
