"""How much of a fine-tune of A arrives on a base B that was trained apart from it: python -m transfer

    python -m transfer --train             train what is missing in the cache, on one core
    python -m transfer --table             move every fine-tune by every method, and print the tables
    python -m transfer --table --pairs text --methods naive guarded --seeds 3

Without either it does both. The tables give accuracies on the task and, after a stroke, on the support,
and below the share of the gap between B and the ceiling (B fine-tuned itself) that arrives; with several
seeds, each with its standard deviation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import transfusion
from transfer.tasks import PAIRS, Pair
from transfer.training import say


@dataclass(frozen=True)
class Case:
    """One fine-tune to be moved: the models in memory, and the pair and task that they belong to."""

    pair: Pair[Any]
    task: Any
    seed: int

    @cached_property
    def a(self) -> Any:
        return self.pair.load(self.folders["a"])

    @cached_property
    def b(self) -> Any:
        return self.pair.load(self.folders["b"])

    @cached_property
    def tuned(self) -> Any:
        return self.pair.load(self.folders["tuned"])

    @cached_property
    def ceiling(self) -> Any:
        return self.pair.load(self.folders["ceiling"])

    @cached_property
    def folders(self) -> dict[str, Path]:
        """Where the models are; those that are missing are trained."""
        return {
            "a": self.pair.base("a", self.seed),
            "b": self.pair.base("b", self.seed),
            "tuned": self.pair.tuned("a", self.task, self.seed),
            "ceiling": self.pair.tuned("b", self.task, self.seed),
        }


def moved(case: Case, method: str) -> Any:
    """Transport by a method of the package; one alignment serves all tasks of a pair."""
    via = _aligned(case.folders["a"], case.folders["b"], method)
    transport: Any = transfusion.transport(case.tuned, base=case.a, onto=case.b, via=via)
    return transport.module().eval()


@cache
def _aligned(a: Path, b: Path, method: str) -> Any:
    return transfusion.align(a, b, method=method)


METHODS: dict[str, Callable[[Case], Any]] = {
    "B": lambda case: case.pair.untouched(case.b, case.tuned),
    "naive": partial(moved, method="naive"),
    "transfusion": partial(moved, method="transfusion"),
    "tied": partial(moved, method="tied"),
    "git-rebasin": partial(moved, method="git-rebasin"),
    "ot": partial(moved, method="ot"),
    "guarded": partial(moved, method="guarded"),
    "ceiling": lambda case: case.ceiling,
}
"""From a case to a model on B's side: a line here is a column of the tables."""

Measured = dict[str, dict[str, float]]
"""By method: ``task`` and ``support`` in percent, and ``share`` of the gap."""


def measured(case: Case, methods: list[str]) -> Measured:
    found: Measured = {}
    for name in dict.fromkeys(["B", "ceiling", *methods]):
        model = METHODS[name](case)
        found[name] = {
            "task": case.pair.accuracy(model, case.task),
            "support": case.pair.support(model, case.b, case.task),
        }
    gap = found["ceiling"]["task"] - found["B"]["task"]
    for scores in found.values():
        scores["share"] = 100 * (scores["task"] - found["B"]["task"]) / gap if gap else float("nan")
    return found


def cases(pairs: list[str], seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        for name in pairs:
            for task in PAIRS[name].tasks:
                yield Case(PAIRS[name], task, seed)


def train(pairs: list[str], seeds: int) -> None:
    """Everything of the first seed comes before anything of the second."""
    since = time.monotonic()
    for case in cases(pairs, seeds):
        folders = case.folders
        say(f"{case.pair.name} {case.task.name}, seed {case.seed}: {', '.join(map(str, folders.values()))}")
    say(f"all is trained, after {time.monotonic() - since:.0f} s")


def tables(pairs: list[str], methods: list[str], seeds: int) -> dict[str, dict[str, list[Measured]]]:
    results: dict[str, dict[str, list[Measured]]] = {}
    for case in cases(pairs, seeds):
        since = time.monotonic()
        found = measured(case, methods)
        results.setdefault(case.pair.name, {}).setdefault(case.task.name, []).append(found)
        say(f"{case.pair.name} {case.task.name}, seed {case.seed}: {time.monotonic() - since:.0f} s")
    return results


def draw(pair: Pair[Any], rows: dict[str, list[Measured]], methods: list[str]) -> Table:
    seeds = len(next(iter(rows.values())))
    table = Table(title=f"{pair.name}: {pair.about} ({seeds} seed{'s' * (seeds > 1)})")
    table.add_column("task / support\nshare of the gap")
    for name in methods:
        table.add_column(name, justify="right")
    for task, by_seed in rows.items():
        cells = []
        for name in methods:
            task_, support, share = (
                spread([found[name][what] for found in by_seed]) for what in ("task", "support", "share")
            )
            cells.append(f"{task_} / {support}\n{share} %")
        table.add_row(task, *cells, end_section=True)
    return table


def spread(values: list[float]) -> str:
    """The mean, and with more than one value how far they scatter."""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    asked = parser.parse_args()

    torch.set_num_threads(asked.threads)
    transformers.utils.logging.disable_progress_bar()
    if asked.train or not asked.table:
        train(asked.pairs, asked.seeds)
    if asked.table or not asked.train:
        results = tables(asked.pairs, asked.methods, asked.seeds)
        console = Console(width=200)
        for name, rows in results.items():
            console.print(draw(PAIRS[name], rows, asked.methods))
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
