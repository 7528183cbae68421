"""Running cases in a worker, which is killed and replaced when one hangs or ends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from fuzzing.worker import work

LIMIT = 10.0
"""A command line that takes longer hangs: seconds."""
PATIENCE = 300.0
"""How long a worker may take to begin, or to make a case."""


@dataclass
class Outcome:
    """What became of a case."""

    format: str
    number: int
    title: str
    lines: list[str] = field(default_factory=list)
    """The command lines."""
    codes: list[int | None] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    said: str = ""
    """What the faulty command lines printed."""

    def __str__(self) -> str:
        again = f"PYTHONPATH=tests python -m fuzzing {self.format} {self.number}"
        info = [f"{self.format} {self.number}: {self.title}", *(f"  ✗ {fault}" for fault in self.faults)]
        return "\n".join([*info, *(f"  {line}" for line in self.said.splitlines()), f"  again: {again}"])


class Hangs(Exception):  # noqa: N818
    """A worker that says nothing."""


class Ended(Exception):  # noqa: N818
    """A worker that is no more."""


class Runner:
    """Runs cases, one after another, in a folder of its own."""

    def __init__(self, root: Path, limit: float = LIMIT) -> None:
        self.root, self.limit = root.resolve(), limit
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._worker: int | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._end()

    def run(self, format: str, number: int) -> Outcome:
        from fuzzing.formats import case

        outcome = Outcome(format, number, case(format, number).title)
        try:
            self._begin()
            self._send((format, number))
            outcome.lines, notes = self._answer("made", PATIENCE)
            outcome.title = ": ".join([outcome.title, *notes])
            for line in outcome.lines:
                outcome.said += f"$ {line}\n"
                code, out, err, trace, faults = self._answer("ran", self.limit)
                outcome.codes.append(code)
                outcome.faults += faults
                outcome.said += f"{out[-500:]}{err[-2000:]}{trace[-3000:]}exit {code}\n"
        except Hangs:
            outcome.faults.append(f"hangs: more than {self.limit:g} s")
        except Ended as ended:
            outcome.faults.append(f"the process ended: {ended}")
        return outcome

    def _begin(self) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=work, args=(theirs, self.root), daemon=True)
            self._process.start()
            theirs.close()
        if self._worker is None:
            self._worker = self._answer("ready", PATIENCE)

    def _send(self, message: tuple[str, int]) -> None:
        assert self._pipe is not None
        self._pipe.send(message)

    def _answer(self, wanted: str, seconds: float) -> Any:
        """What the worker says next; one that says nothing for so long is killed."""
        assert self._pipe is not None
        if not self._pipe.poll(seconds) and self._hangs(seconds):
            assert self._worker is not None
            os.kill(self._worker, signal.SIGKILL)
            self._pipe.recv()
            self._worker = None
            raise Hangs
        what, info = self._pipe.recv()
        if what == "ended":
            self._worker = None
            raise Ended(info)
        assert what == wanted, (what, info)
        return info

    def _hangs(self, seconds: float) -> bool:
        """Whether the worker is at a loss, and not only waiting for a busy machine."""
        assert self._pipe is not None
        assert self._worker is not None
        for _ in range(20):
            before = _busy(self._worker)
            if self._pipe.poll(seconds / 2):
                return False
            spent = _busy(self._worker) - before
            if spent < 0.02 or spent > 0.4 * seconds:
                return True
        return True

    def _end(self) -> None:
        if self._worker is not None:
            os.kill(self._worker, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = self._worker = None


def _busy(process: int) -> float:
    """How many seconds a process has computed; where the system does not tell, as many as have passed."""
    try:
        info = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(info[11]) + int(info[12])) / os.sysconf("SC_CLK_TCK")
