"""The command line: results on stdout, everything else on stderr, exit codes that mean something."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


class Interrupted(BaseException):
    """Somebody asked the program to stop; whatever it was writing is withdrawn on the way out."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.exit_code = 128 + signum


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    0 done, 1 a known error, 2 wrong usage, 3 a failed verification, 130 or 143 interrupted.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum)

    before = {name: signal.signal(name, interrupt) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        _run(arguments)
    except Interrupted as stop:
        notes = getattr(stop, "__notes__", [])
        print("; ".join(["interrupted", "no output was written", *notes]), file=sys.stderr)
        sys.exit(stop.exit_code)
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _run(arguments: list[str] | None) -> None:
    from transfusion.cli.app import app
    from transfusion.cli.console import print_error, typed
    from transfusion.errors import TransfusionError

    typed.set(sys.argv[1:] if arguments is None else arguments)
    debug = bool(os.environ.get("TRANSFUSION_DEBUG"))
    try:
        app(arguments)
    except TransfusionError as error:
        if debug:
            raise
        print_error(error)
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            raise
        what = f"unexpected: {type(error).__name__}: {error}"
        hint = "set TRANSFUSION_DEBUG=1 for the traceback, and report it"
        print_error(TransfusionError(what, hint=hint))
        sys.exit(1)
