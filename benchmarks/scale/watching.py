"""Runs seen from outside: each in its own process, with the workers that it started, one of which may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scale.running import Task, as_argument, peak

EVERY = 0.2
"""Seconds between two looks at the workers."""


@dataclass
class Run:
    """What a run did."""

    task: Task
    seconds: dict[str, float] = field(default_factory=dict)
    """That passed, by phase."""
    busy: dict[str, float] = field(default_factory=dict)
    """That the process was at work, on all of its cores together; workers of Ray have their own."""
    digest: str = ""
    sweeps: int = 0
    trace: list[float] = field(default_factory=list)
    found: float | None = None
    threads: int = 0
    planned: int = 0
    """Bytes that were planned for a process."""
    peak: int = 0
    """The most bytes of the process itself."""
    workers: int = 0
    """The most bytes of all workers of Ray together."""
    worker: int = 0
    """The most of one."""
    killed: int | None = None
    load: float = 0.0
    """How many processes wanted a core in the minute before it ended."""

    @property
    def total(self) -> float:
        """All seconds of the search and its advice; not those in which files were opened and Ray started."""
        return sum(seconds for name, seconds in self.seconds.items() if name != "opening")

    @property
    def per_sweep(self) -> dict[str, float]:
        """The sweeps alone."""
        return {name: value for name, value in self.seconds.items() if name.startswith("sweep")}

    def as_dict(self) -> dict[str, Any]:
        """As plain data; models by their names, wherever they were kept."""
        info = {**asdict(self), "total": self.total}
        info["task"] |= {"a": Path(self.task.a).name, "b": Path(self.task.b).name}
        return info


def watched(task: Task, *, kill: bool = False) -> Run:
    """Run a task, and look at its workers meanwhile; one is killed in the middle of the second sweep."""
    run = Run(task)
    command = [sys.executable, "-m", "scale.running", as_argument(task)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        over = threading.Event()
        threading.Thread(target=_look, args=(run, child.pid, over), daemon=True).start()
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith("{"):  # Ray may say something, too
                    _note(run, json.loads(line), child.pid, kill=kill)
        finally:
            over.set()
    if child.returncode or not run.digest:
        raise SystemExit(f"a run failed: {' '.join(command)}")
    if kill and run.killed is None:
        raise SystemExit("no worker was killed: the second sweep was over before")
    run.load = os.getloadavg()[0]
    return run


def _note(run: Run, info: dict[str, Any], pid: int, *, kill: bool) -> None:
    name = info.pop("phase", None)
    if name is None:
        vars(run).update(info)
        return
    run.seconds[name], run.busy[name] = info["seconds"], info["busy"]
    if kill and name == "sweep 1":
        timer = threading.Timer(info["seconds"] / 3, _kill, args=(run, pid))
        timer.daemon = True
        timer.start()


def _look(run: Run, pid: int, over: threading.Event) -> None:
    while not over.wait(EVERY):
        peaks = [_peak(hand) for hand in hands(pid)]
        run.workers, run.worker = max(run.workers, sum(peaks)), max(run.worker, *peaks, 0)


def _kill(run: Run, pid: int) -> None:
    """The worker that has been at work for longest."""
    found = sorted(hands(pid), key=_spent)
    if found:
        os.kill(found[-1], signal.SIGKILL)
        run.killed = found[-1]


def hands(pid: int) -> list[int]:
    """The workers of Ray that a process has started."""
    parents: dict[int, int] = {}
    named: list[int] = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and (stat := _stat(place)) is not None:
            parents[int(place.name)] = int(stat[1])
            if _command(place).startswith("ray::RayWorker"):
                named.append(int(place.name))
    return [one for one in named if pid in _ancestors(one, parents)]


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while (pid := parents.get(pid, 0)) > 1:
        found.append(pid)
    return found


def _stat(place: Path) -> list[str] | None:
    """What the system says of a process, after its name."""
    try:
        return (place / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _command(place: Path) -> str:
    try:
        return (place / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _spent(pid: int) -> int:
    stat = _stat(Path(f"/proc/{pid}"))
    return int(stat[11]) + int(stat[12]) if stat else 0


def _peak(pid: int) -> int:
    try:
        return peak(pid)
    except OSError:
        return 0
