"""The worker: a process that makes cases and runs their command lines, one at a time.

The copy that runs them may be killed at any moment: a case that hangs or ends the process is reported by those who
wait. Libraries take seconds to import; they are imported once, before the copies are made.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fuzzing.cases import Command, Place
    from fuzzing.checking import Ran

MEMORY = 3 * 2**30
"""So many bytes more than an idle worker has may be asked of the system."""


def work(connection: Connection, root: Path) -> None:
    """Prepare everything once; then let a copy of this process run cases, and another when that one ends."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
    os.environ.update(OMP_NUM_THREADS="1", COLUMNS="240", HF_HOME=str(root / "hub"), TERM="dumb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    desk = Desk(root)
    while True:
        copy = os.fork()
        if copy == 0:
            _serve(desk, connection)
        _, status = os.waitpid(copy, 0)
        connection.send(("ended", os.waitstatus_to_exitcode(status)))


def _serve(desk: Desk, connection: Connection) -> NoReturn:
    """Take the names of cases from a pipe, and tell what becomes of them, for as long as this process lives."""
    try:
        desk.guard()
        connection.send(("ready", os.getpid()))
        while True:
            desk.case(*connection.recv(), connection.send)
    finally:  # whatever is wrong with us, it is not for our parent's code to go on from here
        traceback.print_exc()
        os._exit(70)


class Desk:
    """Where cases are made and run."""

    def __init__(self, root: Path) -> None:
        import platform

        import torch
        import transformers.models.bert.modeling_bert
        import transformers.models.vit.modeling_vit  # noqa: F401
        import typer.main

        import transfusion.cli.app  # noqa: F401
        from fuzzing.seeds import World

        torch.set_num_threads(1)
        typer.main.get_command = cache(typer.main.get_command)  # it is made anew for every command line
        platform.processor()  # which starts a program, once
        self.world = World(root)
        if not self.world.outside.exists():
            self.world.plant()
        for seed in ("a", "b", "tuned", "pi"):
            self.world.seed(seed)

    def guard(self) -> None:
        """From now on, look at what this process does, and let it have so much memory."""
        from fuzzing.checking import Sentry, Watch

        self.watch, self.sentry = Watch(self.world.outside), Sentry(self.world.outside)
        _bounded(MEMORY)

    def case(self, format: str, number: int, send: Callable[[Any], None]) -> None:
        """Make a case and run it; tells how many command lines there are, and then of each what was wrong."""
        from fuzzing.cases import Place
        from fuzzing.checking import faults, state
        from fuzzing.formats import case

        place = Place(self.world.root / "case", self.world, random.Random(f"{format}-{number}"))
        shutil.rmtree(place.root, ignore_errors=True)
        place.inputs.mkdir(parents=True)
        os.chdir(place.inputs)
        commands = case(format, number).build(place)
        send(("made", ([" ".join(command.arguments) for command in commands], place.notes)))
        for command in commands:
            shutil.rmtree(place.outputs, ignore_errors=True)
            place.outputs.mkdir()
            before = state(place)
            self.sentry.seen()
            with self.watch:
                ran = run(command)
            info, opened = list(self.watch.info), self.sentry.seen()
            found = faults(ran, place, before, info, opened)
            where = ran.trace or (_traced(command, place) if "unexpected:" in ran.err else "")
            send(("ran", (ran.code, ran.out, ran.err, where, found)))


def run(command: Command) -> Ran:
    """Run a command line in this process."""
    from fuzzing.checking import Ran
    from transfusion.cli import main

    out, err = StringIO(), StringIO()
    code, error, trace = None, "", ""
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main(list(command.arguments))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException as raised:  # whatever a library raises: it is what we look for
        error, trace = f"{type(raised).__name__}: {raised}"[:300], "".join(traceback.format_exception(raised))
    return Ran(command, code, out.getvalue(), err.getvalue(), error, trace)


def _traced(command: Command, place: Place) -> str:
    """Where an unexpected error comes from: the same once more, for whoever has to mend it."""
    shutil.rmtree(place.outputs)
    place.outputs.mkdir()
    os.environ["TRANSFUSION_DEBUG"] = "1"
    try:
        return run(command).trace
    finally:
        del os.environ["TRANSFUSION_DEBUG"]


def _bounded(more: int) -> None:
    """Let the process have so much more memory: one that takes all there is would take others with it."""
    status = Path("/proc/self/statm")
    if status.exists():
        limit = int(status.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
