"""The command line: results on stdout, everything else on stderr, and documented exit codes."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from transfusion.errors import TransfusionError


class Interrupted(BaseException):
    """The user asked the program to stop; unfinished outputs are withdrawn on the way out."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    0 done, 1 a known error, 2 wrong usage, 3 a failed verification, 4 nothing worth writing, 130 or 143
    interrupted.
    """
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # closed, as by >&-; a file would be opened under its number
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    signals: list[int] = []
    # Threads of torch wait for each other asleep: on a busy machine, spinning is many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        raise Interrupted

    if not sys.warnoptions:  # what libraries announce to programmers is not for users
        warnings.simplefilter("ignore", FutureWarning)
    before = {name: signal.signal(name, interrupt) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        _run(arguments)
    except (Interrupted, Exception) as error:
        if signals:  # native code may have turned the interrupt into another exception
            _stop(error, signals[0])
        _fail(error)
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _run(arguments: list[str] | None) -> None:
    with without_collection():
        from transfusion.cli.app import app
    from transfusion.runtime.run_record import COMMAND

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names of files may not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    typed = COMMAND.set(shlex.join(["transfusion", *(sys.argv[1:] if arguments is None else arguments)]))
    try:
        app(arguments)
    finally:
        COMMAND.reset(typed)  # what Python runs afterwards in this process was not typed


@contextmanager
def without_collection() -> Iterator[None]:
    """Import without searching for garbage meanwhile.

    Importing torch makes half a million objects that stay, and the collector would look through them again
    and again: a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _stop(error: BaseException, signum: int) -> NoReturn:
    from transfusion.runtime.terminal import printable

    written, notes = getattr(error, "written", None), getattr(error, "__notes__", [])
    what = f"{written} is complete, and was not uploaded" if written else "no output was written"
    print(printable("; ".join(["interrupted", what, *notes])), file=sys.stderr)
    sys.exit(128 + signum)


def _fail(error: BaseException) -> NoReturn:
    from transfusion.cli.console import print_error

    if os.environ.get("TRANSFUSION_DEBUG"):
        raise error
    known = _known(error)
    print_error(known)
    sys.exit(known.exit_code)


def _known(error: BaseException) -> TransfusionError:
    """Return the error that the user sees."""
    match error:
        case TransfusionError():
            return error
        case OSError():
            what = f"{error.filename}: " if error.filename else ""
            return TransfusionError(
                f"{what}{error.strerror or error}", hint="check free disk space, permissions and paths"
            )
        case MemoryError():
            return TransfusionError("not enough memory", hint="give a limit with --memory, or fewer --jobs")
    return TransfusionError(
        f"unexpected: {type(error).__name__}: {error}",
        hint="set TRANSFUSION_DEBUG=1 for the traceback, and report it",
    )
