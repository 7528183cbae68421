"""How fast matching is: this package against a textbook implementation, in one run.

    python benchmarks/matching.py                  the table: ViT-S, ViT-B and ViT-L, two pairs each
    python benchmarks/matching.py --sizes s        only the smallest

Every contender runs in a process of its own, so that its peak memory is its own. Models are drawn at
random: `independent` pairs have nothing in common, in `correlated` ones B is ½A + ½ noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Size(NamedTuple):
    """A vision tower."""

    name: str
    width: int
    heads: int
    mlp: int
    layers: int
    textbook_sweeps: int
    """Where the textbook is stopped: it would take an hour on the largest."""


SIZES = {
    "s": Size("ViT-S/16", 384, 6, 1536, 12, 100),
    "b": Size("ViT-B/16", 768, 12, 3072, 12, 100),
    "l": Size("ViT-L/16", 1024, 16, 4096, 24, 2),
}
PAIRS = ("independent", "correlated")
CONTENDERS = ("textbook", "transfusion", "guarded")


@dataclass(frozen=True)
class Result:
    """One contender on one pair."""

    size: str
    pair: str
    who: str
    seconds: float
    objective: float
    identity: float
    sweeps: int
    finished: bool
    peak_mb: float
    """Of the whole process, beyond what it takes to import torch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="s,b,l", help="which of s, b, l")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        folder, size, pair, who = options.one
        print(json.dumps(asdict(run_one(Path(folder), size, pair, who, options.threads))))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = [
            result
            for size in options.sizes.split(",")
            for result in run_size(Path(folder), size, options.threads)
        ]
    if options.output:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        options.output.write_text(
            json.dumps({"machine": machine, "results": [asdict(result) for result in results]}, indent=2)
        )


def run_size(folder: Path, size: str, threads: int) -> list[Result]:
    """All contenders on both pairs of one size, with a table as they come in."""
    make_pairs(folder, size)
    lower = floor(SIZES[size], threads)
    print(
        f"\n{SIZES[size].name}: two models take {models_mb(SIZES[size]):.0f} MB; the floor is"
        f" {lower['total']:.2f} s on {threads} threads ({lower['gigaflop']:.0f} GFLOP of gains at"
        f" {lower['speed']:.0f} GFLOP/s: {lower['gains']:.2f} s; assignments: {lower['assignments']:.2f} s)"
    )
    columns = "seconds  ratio  × floor   objective    identity  sweeps  peak MB"
    print(f"  {'pair':12} {'contender':12} {columns}")
    results: list[Result] = []
    for pair in PAIRS:
        first: Result | None = None
        for who in CONTENDERS:
            result = in_a_process(folder, size, pair, who, threads)
            first = first or result
            results.append(result)
            note = (
                ""
                if result.finished
                else f"  stopped after {result.sweeps} sweeps: its ratio is a lower bound"
            )
            print(
                f"  {pair:12} {who:12} {result.seconds:7.2f} {first.seconds / result.seconds:6.1f}"
                f" {result.seconds / lower['total']:8.1f} {result.objective:11.1f} {result.identity:11.1f}"
                f" {result.sweeps:7d} {result.peak_mb:8.0f}{note}",
                flush=True,
            )
        if first and not first.finished:
            at_its_pace(results[-len(CONTENDERS) :])
    return results


def at_its_pace(results: list[Result]) -> None:
    """What a stopped textbook would have taken: the package's preset does the same sweeps."""
    book, same, *_ = results
    whole = book.seconds / book.sweeps * same.sweeps
    ratios = ", ".join(f"{result.who} {whole / result.seconds:.1f}" for result in results[1:])
    print(
        f"      at its pace the textbook needs {whole:.0f} s for all {same.sweeps} sweeps; ratios: {ratios}"
    )


def in_a_process(folder: Path, size: str, pair: str, who: str, threads: int) -> Result:
    command = [sys.executable, __file__, "--threads", str(threads), "--one", str(folder), size, pair, who]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Result(**json.loads(done.stdout))


def run_one(folder: Path, size: str, pair: str, who: str, threads: int) -> Result:
    """One contender, in this process: from opened files to maps."""
    a, b = folder / f"{size}-a", folder / f"{size}-{pair}"
    run = run_textbook if who == "textbook" else run_ours
    return run(a, b, size, pair, who, threads)


def run_textbook(a: Path, b: Path, size: str, pair: str, who: str, threads: int) -> Result:
    from textbook import Textbook

    torch.set_num_threads(1)
    before, began = peak_mb(), time.perf_counter()
    book = Textbook.open(a, b, SIZES[size].heads)
    sweeps = book.run(SIZES[size].textbook_sweeps)
    seconds = time.perf_counter() - began
    finished = book.trace[-1] == book.trace[-2]
    return Result(
        size, pair, who, seconds, book.trace[-1], book.trace[0], sweeps, finished, peak_mb() - before
    )


def run_ours(a: Path, b: Path, size: str, pair: str, who: str, threads: int) -> Result:
    from transfusion.matching.methods import preset
    from transfusion.matching.search import Search
    from transfusion.matching.weights import WeightPair
    from transfusion.model.model import Model
    from transfusion.runtime.engines import open_engine

    method = preset(who)
    models = [Model.open(folder).under(method.policy) for folder in (a, b)]
    before, began = peak_mb(), time.perf_counter()
    weights = WeightPair(*models)
    with open_engine(jobs=threads) as engine:
        trial = Search(weights, method, seed=0, engine=engine).run()
    seconds = time.perf_counter() - began
    return Result(
        size,
        pair,
        who,
        seconds,
        trial.trace[-1],
        trial.trace[0],
        trial.sweeps,
        True,
        peak_mb() - before,
    )


# ── models, the floor, memory ────────────────────────────────────────────────────────────────


def make_pairs(folder: Path, size: str) -> None:
    """A, an independent B, and a B that is half A."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    shape = SIZES[size]
    config = transformers.ViTConfig(
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
    )
    torch.manual_seed(0)
    a, b = (transformers.ViTModel(config, add_pooling_layer=False) for _ in range(2))
    a.save_pretrained(folder / f"{size}-a")
    b.save_pretrained(folder / f"{size}-independent")
    with torch.no_grad():
        for ours, theirs in zip(b.parameters(), a.parameters(), strict=True):
            ours.mul_(0.5).add_(theirs, alpha=0.5)
    b.save_pretrained(folder / f"{size}-correlated")


def models_mb(size: Size) -> float:
    per_layer = 4 * size.width**2 + 2 * size.width * size.mlp
    return 2 * 4 * size.layers * per_layer / 2**20


def floor(size: Size, threads: int) -> dict[str, Any]:
    """One pass of gains at the speed of this machine's matrix products, and one of assignments."""
    from transfusion.matching.assignment import assign

    per_layer = 2 * size.width * size.mlp * (size.width + size.mlp) + 4 * size.width**3
    per_layer += 3 * size.width**2 * (size.width // size.heads)
    gigaflop = 2 * size.layers * per_layer / 1e9
    torch.set_num_threads(threads)
    left, right = torch.randn(size.mlp, size.width), torch.randn(size.mlp, size.width)
    product = best_of(3, lambda: left @ right.T)
    speed = 2 * size.mlp**2 * size.width / product / 1e9
    torch.set_num_threads(1)
    mlp = best_of(2, lambda: assign((left @ right.T)[None])) - best_of(2, lambda: left @ right.T)
    stream_gain = (torch.randn(size.width, size.width) @ torch.randn(size.width, size.width))[None]
    stream = best_of(2, lambda: assign(stream_gain))
    assignments = size.layers * (mlp + 2 * stream) / threads
    torch.set_num_threads(threads)
    return {
        "gigaflop": gigaflop,
        "speed": speed,
        "gains": gigaflop / speed,
        "assignments": assignments,
        "total": gigaflop / speed + assignments,
    }


def best_of(times: int, do: Any) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        do()
        taken.append(time.perf_counter() - began)
    return min(taken)


def peak_mb() -> float:
    """The most memory that this process has had; `getrusage` would count its parent's too."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
