"""How well `transfusion plan` predicts: aligning Llamas that have nothing in common, phase by phase.

    python benchmarks/scale/predicting.py                     0.1 and 0.3 billion parameters, 1 and 2 cores
    python benchmarks/scale/predicting.py --sizes 0.1b 1.1b   others; 1.1b takes minutes
    python benchmarks/scale/predicting.py --keep FOLDER       keep the models there, and use them again

The machine's constants are measured right before every run and once more right after it, and the plan rests
on the middle of both. On one core, only the seconds count that the process had it, so that others who use the
machine at the same time disturb less; on several there is no such clock, and the machine should be idle.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from transfusion.engines import hired
from transfusion.evidence.weights import Weights
from transfusion.matching.advice import advise
from transfusion.matching.search import Search
from transfusion.methods import preset
from transfusion.model import Model, take_hashes
from transfusion.planning import Machine, measure, plan, sketch
from transfusion.writer import Parcel, write_json, write_shard

CONFIGS = Path(__file__).parent / "configs"
SWEEPS = 4


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--sizes", nargs="+", default=["0.1b", "0.3b"])
    arguments.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    arguments.add_argument("--keep", type=Path)
    arguments.add_argument("--output", type=Path, help="also write the results as JSON")
    asked = arguments.parse_args()
    runs = []
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for size in asked.sizes:
            places = [make(folder / f"llama-{size}-{who}", CONFIGS / f"llama-{size}.json") for who in "ab"]
            runs += [compare(size, places, cores) for cores in asked.cores]
            print(table(runs[-len(asked.cores) :]), flush=True)
    if asked.output:
        write_json(asked.output, {"cores": os.cpu_count(), "runs": runs})


def make(folder: Path, config: Path) -> Path:
    """A model of random weights, by its configuration; one that is there already is used again."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    paper = sketch(config)
    parcels = {
        name: Parcel(info.shape, info.dtype, _drawn(f"{folder.name} {name}", info.shape))
        for name, info in paper.checkpoint.tensors.items()
    }
    write_shard(folder / "model.safetensors", parcels)
    (folder / "config.json").write_text(config.read_text())
    return folder


def _drawn(name: str, shape: tuple[int, ...]) -> Any:
    def draw() -> list[Any]:
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        return [lambda: (torch.randn(shape, generator=generator) / 50).to(torch.bfloat16)]

    return draw


def compare(size: str, places: list[Path], cores: int) -> dict[str, Any]:
    """Seconds of every phase as predicted and as measured."""
    before = measure(places[0].parent)
    measured = align(places, cores)
    machine = between(before, measure(places[0].parent))
    predicted = plan(*places, machine=machine, cores=cores, sweeps=SWEEPS, memory=64e9)
    seconds = {phase.name: phase.seconds for phase in predicted.phases if phase.counted}
    return {
        "size": size,
        "cores": cores,
        "parameters": predicted.parameters,
        "predicted": {**seconds, "all": predicted.seconds},
        "measured": {**measured, "all": sum(measured.values())},
        "machine": machine.as_dict(),
    }


def between(one: Machine, other: Machine) -> Machine:
    """The middle of two measurements."""
    names = [each.name for each in fields(Machine) if each.name not in ("cores", "assignments")]
    middle: dict[str, Any] = {name: math.sqrt(getattr(one, name) * getattr(other, name)) for name in names}
    times = {n: math.sqrt(one.assignments[n] * other.assignments[n]) for n in one.assignments}
    return replace(one, **middle, assignments=times)


def align(places: list[Path], cores: int) -> dict[str, float]:
    """The seconds of every phase of `align`, in the names that a plan has for them."""
    method = preset("guarded").changed(max_sweeps=SWEEPS)
    ends: dict[str, float] = {}
    clock = time.process_time if cores == 1 else time.perf_counter
    begun = clock()

    def done(name: str) -> None:
        ends[name] = clock()

    a, b = (Model.open(place).under(method.policy) for place in places)
    weights = Weights(a, b)
    with hired(jobs=cores) as engine:
        take_hashes(a, b, engine=engine, checked=True)
        done("hashing")
        search = Search(
            weights, method, seed=0, engine=engine, on_sweep=lambda trial: done(f"sweep {trial.sweeps}")
        )
        assert search.kinship
        done("kinship")
        assert search.identity
        done("identity")
        trial = search.run()
        advise(search, trial)
        done("advice")
    edges = [begun, *ends.values()]
    return {name: end - start for name, start, end in zip(ends, edges, edges[1:], strict=False)}


def table(runs: list[dict[str, Any]]) -> str:
    lines = ["| | cores | phase | predicted | measured | ratio |", "|---|---|---|---|---|---|"]
    for run in runs:
        for name, measured in run["measured"].items():
            predicted = run["predicted"][name]
            row = (run["size"], run["cores"], name, f"{predicted:.2f} s", f"{measured:.2f} s")
            lines.append(f"| {' | '.join(map(str, row))} | {predicted / measured:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
