"""Output of the command line: results on stdout; notes, progress and errors on stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Any

from rich.text import Text

from transfusion.errors import TransfusionError, UselessResultError
from transfusion.runtime.shown import WIDE
from transfusion.runtime.terminal import SafeConsole, TerminalProgress, err, one_line, printable

out = SafeConsole(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)

VERB: ContextVar[str | None] = ContextVar("VERB", default=None)
"""The verb that is running."""


class Messages(TerminalProgress):
    """Notes, details and bars of the command line: they name options, and not parameters."""

    def worded(self, text: str) -> str:
        """Return a message with its parameters as options."""
        return in_options(text)


# ── results ──────────────────────────────────────────────────────────────────────────────────


def print_json(value: Any) -> None:
    """Print a result for another program; control characters are escaped as JSON does it."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    print("".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text))


def show(result: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print a result, for people or for programs."""
    if as_json:
        print_json(result)
    else:
        out.print(printable(text), markup=False)


@contextmanager
def results_apart() -> Iterator[None]:
    """Send what libraries print within the block to stderr: stdout is for results."""
    with redirect_stdout(sys.stderr):
        yield


# ── errors ───────────────────────────────────────────────────────────────────────────────────


def print_error(error: TransfusionError) -> None:
    """Print an error, its hint and the command to type next, one line each."""
    err.print(Text.assemble(("error:", "bold red"), " ", one_line(in_options(error.message))))
    if error.hint:
        err.print(Text.assemble(("hint:", "bold"), " ", one_line(in_options(error.hint))))
    if isinstance(error, UselessResultError) and error.command:
        err.print(Text.assemble(("type this next:", "bold"), " ", one_line(error.command)))


_PARAMETER = re.compile(r"`(?P<name>[a-z_]+)(=\"?(?P<value>[^`\"]*)\"?)?`")


def in_options(text: str) -> str:
    """Return a text of the library with its parameters as options: `residual="tied"` as --residual tied."""
    if "`" not in text:
        return text
    from typer.main import get_command

    from transfusion.cli.app import app

    verbs: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    own = verbs.get(VERB.get() or "")
    options = {one.name: one for verb in (*verbs.values(), own) if verb for one in verb.params}

    def option(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if name not in options:
            return found[0]
        flag = max(options[name].opts, key=len)
        if value == "False":
            return str(max(options[name].secondary_opts, default=flag, key=len))
        if not flag.startswith("-"):
            return str(options[name].metavar or flag.upper())
        return str(flag) if value in (None, "True") else f"{flag} {value}"

    return _PARAMETER.sub(option, text)
