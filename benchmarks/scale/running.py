"""One run in a process of its own: what it is told on the command line, what it did line by line as JSON.

Every phase has the names that a plan has for it, the seconds that passed, and those that this process was at
work on all of its cores together.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transfusion.alignment.maps import Map
from transfusion.files.tensor_content import tensor_digest
from transfusion.matching.advice import advise
from transfusion.matching.methods import preset
from transfusion.matching.search import Search
from transfusion.matching.search_memory import within_memory
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model, take_hashes
from transfusion.runtime.engines import open_engine
from transfusion.runtime.scratch import give_back_at_once


@dataclass(frozen=True)
class Task:
    """What is to be run."""

    a: str
    b: str
    engine: str = "local"
    jobs: int = 2
    memory: int | None = None
    sweeps: int = 4
    advice: bool = True
    related: bool = False
    """Whether there is a truth to compare with."""


@dataclass
class Watch:
    """Tells of every phase when it is done."""

    wall: float = field(default_factory=time.perf_counter)
    busy: float = field(default_factory=time.process_time)

    def done(self, name: str) -> None:
        wall, busy = time.perf_counter(), time.process_time()
        tell({"phase": name, "seconds": wall - self.wall, "busy": busy - self.busy})
        self.wall, self.busy = wall, busy


def tell(what: Mapping[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def run(task: Task) -> None:
    """Align as `transfusion.align` does, phase by phase."""
    watch = Watch()
    method = preset("guarded").changed(max_sweeps=task.sweeps)
    a, b = (Model.open(place).under(method.policy) for place in (task.a, task.b))
    weights = WeightPair(a, b)
    budget = within_memory(weights, method, task.memory, task.engine, task.jobs)
    if task.memory is not None:
        give_back_at_once()
    jobs = budget.threads if task.engine == "local" else task.jobs
    with open_engine(task.engine, jobs=jobs) as engine:
        watch.done("opening")
        take_hashes(a, b, engine=engine, checked=True)
        watch.done("hashing")
        search = Search(
            weights,
            method,
            seed=0,
            engine=engine,
            limit=budget.kept,
            room=budget.room,
            on_sweep=lambda trial: watch.done(f"sweep {trial.sweeps}"),
        )
        assert search.in_place
        watch.done("in place")
        assert search.identity
        watch.done("identity")
        trial = search.run()
        if task.advice:
            advise(search, trial)
            watch.done("advice")
    info = {"digest": digest(trial.maps), "sweeps": trial.sweeps, "trace": trial.trace, "peak": peak()}
    if task.related:
        info["found"] = found(task.a, trial.maps)
    tell({**info, "threads": budget.threads, "planned": budget.total})


def digest(maps: Mapping[str, Map]) -> str:
    """A hash of all maps."""
    total = hashlib.sha256()
    for id in sorted(maps):
        total.update(id.encode() + tensor_digest(maps[id].to_tensor()))
    return total.hexdigest()


def found(a: str, maps: Mapping[str, Map]) -> float:
    """The share of units that are where the truth has them."""
    from scale.models import planted

    truth = planted(Path(a))
    right = sum(int((maps[id].to_tensor() == truth[id].to_tensor()).sum()) for id in maps)
    return right / sum(truth[id].to_tensor().numel() for id in maps)


def peak(pid: int | str = "self") -> int:
    """The most bytes that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def as_argument(task: Task) -> str:
    """A task as this module's command line has it."""
    return json.dumps(asdict(task))


if __name__ == "__main__":
    run(Task(**json.loads(sys.argv[1])))
