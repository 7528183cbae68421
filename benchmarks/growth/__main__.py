"""How the time and the memory of every verb grow with parameters: python -m growth

    python -m growth                                  all sizes and tasks
    python -m growth --sizes 20M,60M --tasks guarded,transport
    python -m growth --keep FOLDER                    keep the models there, and use them again
    python -m growth --json FILE.json                 keep the results; what is there already is not run again
    python -m growth --table FILE.json                only print the tables of such a file

Pairs of Llamas in bfloat16 are drawn at random. Every run is one of the command line, in a process of its
own. A tiny model is run first: what it takes is the start of the program, and is subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from growth import tables
from growth.llamas import SIZES
from growth.models import make, remove
from growth.tasks import ALIGN, START, TASKS, Task, measure

ORDER = list(SIZES)


def main(arguments: list[str] | None = None) -> None:
    asked = _parser().parse_args(arguments)
    if asked.table:
        print(tables.everything(json.loads(asked.table.read_text())))
        return
    tasks = [TASKS[name] for name in _known(asked.tasks, list(TASKS))]
    sizes = _known(asked.sizes, [name for name in ORDER if name != START])
    info = _begun(asked.json, _command(asked))
    with _workplace(asked.keep) as folder:
        for size in [START, *sizes]:
            run_size(folder, size, tasks, info, everything=asked.everything, file=asked.json)
            if asked.keep is None:
                remove(folder, SIZES[size])
    print(tables.everything(info))


def run_size(
    folder: Path, size: str, tasks: list[Task], info: dict[str, Any], *, everything: bool, file: Path | None
) -> None:
    """Run the tasks of one size that have not been run yet."""
    done = {(one["task"], one["size"]) for one in info["runs"] if "failed" not in one}
    fits = [task for task in tasks if everything or ORDER.index(size) <= ORDER.index(task.largest)]
    missing = [task for task in fits if (task.name, size) not in done]
    if not missing:
        return
    say(f"{size}: making models")
    made = make(folder, SIZES[size])
    for task in missing:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            found = measure(task, made, Path(place) / _output(task))
        info["runs"] = [one for one in info["runs"] if (one["task"], one["size"]) != (task.name, size)]
        info["runs"].append(found)
        _save(info, file)
        say(f"{size} {task.name}: {_short(found)}")


def about() -> dict[str, Any]:
    """Return where this runs."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def _output(task: Task) -> str:
    return "out.safetensors" if task.name in ALIGN else "out"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", help=f"some of {','.join(name for name in ORDER if name != START)}")
    parser.add_argument("--tasks", help=f"some of {','.join(TASKS)}")
    parser.add_argument("--everything", action="store_true", help="every task at every size")
    parser.add_argument("--keep", type=Path, help="a folder for the models")
    parser.add_argument("--json", type=Path, help="a file for the results; a run goes on where it stopped")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="only this")
    return parser


def _known(asked: str | None, names: list[str]) -> list[str]:
    """Return the names that were asked for, in their usual order."""
    chosen = asked.split(",") if asked else names
    if unknown := [one for one in chosen if one not in names]:
        raise SystemExit(f"{', '.join(unknown)}: unknown; known are {', '.join(names)}")
    return [one for one in names if one in chosen]


def _command(asked: argparse.Namespace) -> str:
    """Return the command without the places where it kept files."""
    some = [f" --{name} {getattr(asked, name)}" for name in ("sizes", "tasks") if getattr(asked, name)]
    return "".join(["python -m growth", *some, " --everything" * asked.everything])


def _begun(file: Path | None, command: str) -> dict[str, Any]:
    """Return the results that are there, or none."""
    if file is not None and file.exists():
        kept: dict[str, Any] = json.loads(file.read_text())
        return kept
    return {"machine": about(), "command": command, "runs": []}


def _save(info: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        half = file.with_suffix(".part")
        half.write_text(json.dumps(info, indent=1) + "\n")
        half.replace(file)


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _short(run: dict[str, Any]) -> str:
    if "failed" in run:
        return f"failed: {run['failed']}"
    return f"{run['seconds']:.1f} s, {run['processor']:.1f} s of all cores, {run['peak'] / 1e9:.2f} GB"


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
