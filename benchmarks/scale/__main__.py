"""How time and memory grow with the size of models, and what workers of a cluster change: python -m scale

    python -m scale                               0.1, 0.3 and 1.1 billion parameters
    python -m scale --sizes tiny,0.1B             others
    python -m scale --keep FOLDER                 keep the models there, and use them again
    python -m scale --output FILE.json            keep the results, too
    python -m scale --write-docs FILE.json        put the tables of such a file into the pages

Every run has a process of its own. Pairs are unrelated, so that there is something to do in every sweep; one
run of each size is of a planted pair, and says how many units were found. Every run on Ray, and every one in
little memory, must give the same π as the plain one, and one worker is killed in the middle of a sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from scale import tables
from scale.comparing import between, floor, predicted
from scale.models import SIZES, pair
from scale.running import Task
from scale.watching import Run, watched
from transfusion.runtime.machine import Machine

LIMITS = {
    "tiny": 400_000_000,
    **dict.fromkeys(("20M", "60M", "0.1B", "0.3B"), 1_000_000_000),
    **dict.fromkeys(("1.1B", "1.4B"), 3_000_000_000),
}
"""Bytes that a run gets by with."""
LARGE = "1.1B"
"""The size of which two sweeps are done, unless another number is asked for, and no planted pair."""
THREADS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="0.1B,0.3B,1.1B", help="of models, on threads")
    parser.add_argument("--ray-sizes", help="on Ray; as --sizes, or nothing")
    parser.add_argument("--kill-sizes", help="with a worker killed; the smallest of --ray-sizes")
    parser.add_argument("--sweeps", type=int, help="at most so many; 4, and 2 of the largest")
    parser.add_argument("--keep", type=Path, help="a folder for the models")
    parser.add_argument("--output", type=Path, help="also write the results, .json")
    parser.add_argument("--write-docs", type=Path, metavar="FILE.json", help="only this")
    asked = parser.parse_args()
    if asked.write_docs:
        tables.write_docs(json.loads(asked.write_docs.read_text()))
        return
    sizes = asked.sizes.split(",")
    on_ray = sizes if asked.ray_sizes is None else [one for one in asked.ray_sizes.split(",") if one]
    killed = on_ray[:1] if asked.kill_sizes is None else [one for one in asked.kill_sizes.split(",") if one]
    info: dict[str, Any] = {"machine": about(), "command": " ".join(["python -m scale", *sys.argv[1:]])}
    info |= {"local": [], "ray": []}
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for size in dict.fromkeys([*sizes, *on_ray]):
            sweeps = asked.sweeps or (2 if size == LARGE else 4)
            if size in sizes:
                info["local"] += on_threads(folder, size, sweeps)
            if size in on_ray:
                info["ray"] += on_workers(folder, size, sweeps, info["local"], kill=size in killed)
            if asked.output:
                asked.output.write_text(json.dumps(info, indent=1) + "\n")
    print(tables.everything(info), tables.compared(info), sep="\n")


def about() -> dict[str, Any]:
    """Where this runs."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def on_threads(folder: Path, name: str, sweeps: int) -> list[dict[str, Any]]:
    """Without a limit, within one, and where there is something to be found."""
    before = Machine.measure(folder)
    runs = []
    planted = [] if name == LARGE else [("planted", True, None)]
    for what, related, memory in (
        ("unrelated", False, None),
        ("unrelated, limited", False, LIMITS[name]),
        *planted,
    ):
        a, b = pair(folder, SIZES[name], related=related)
        task = Task(str(a), str(b), jobs=THREADS, memory=memory, sweeps=sweeps, related=related)
        runs.append((what, watched(task)))
        say(f"{name} {what}", runs[-1][1])
    require_same(runs[0][1], runs[1][1], f"{name} in little memory")
    machine = between(before, Machine.measure(folder))
    lowest = floor(a, b, SIZES[name], machine, THREADS).as_dict()
    return [
        {
            "size": name,
            "what": what,
            "parameters": SIZES[name].parameters,
            "run": run.as_dict(),
            "floor": lowest,
            "predicted": predicted(run, machine),
            "constants": machine.as_dict(),
        }
        for what, run in runs
    ]


def on_workers(
    folder: Path, name: str, sweeps: int, known: list[dict[str, Any]], *, kill: bool
) -> list[dict[str, Any]]:
    """With one worker of Ray, with two, and with two of which one dies."""
    a, b = pair(folder, SIZES[name], related=False)
    advice = name != LARGE
    plain = Task(str(a), str(b), jobs=THREADS, sweeps=sweeps, advice=advice)
    found = [one["run"]["digest"] for one in known if one["size"] == name and one["what"] == "unrelated"]
    there = [one["run"]["task"]["sweeps"] for one in known if one["size"] == name]
    digest = found[0] if found and there[0] == sweeps else watched(plain).digest
    results: list[dict[str, Any]] = []
    for jobs, dies in ((1, False), (2, False), (2, True))[: 3 if kill else 2]:
        task = Task(str(a), str(b), engine="ray", jobs=jobs, sweeps=sweeps, advice=advice)
        run = watched(task, kill=dies)
        what = "with a worker killed" if dies else ""
        say(f"{name} on {jobs} of Ray {what}".strip(), run)
        if run.digest != digest:
            raise SystemExit(f"{name} on {jobs} of Ray {what}: another π")
        lost = run.total - results[-1]["run"]["total"] if dies else None
        results.append({"size": name, "what": what, "run": run.as_dict(), "same": True, "lost": lost})
    return results


def require_same(one: Run, other: Run, what: str) -> None:
    if one.digest != other.digest:
        raise SystemExit(f"{what}: another π")


def say(what: str, run: Run) -> None:
    sweeps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in run.per_sweep.items())
    print(f"{what}: {run.total:.1f} s in all, {sweeps}; {run.peak / 1e9:.2f} GB", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
