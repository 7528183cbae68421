"""How much of a fine-tune of A arrives on a base B that was trained apart from it: python -m transfer

    python -m transfer --train             train what is missing in the cache, on one core
    python -m transfer --table             move every fine-tune by every method, and print the tables
    python -m transfer --table --pairs text --methods naive guarded --seeds 3
    python -m transfer --table --alphas    look for the best strength of every method, too

Without either it does both. A table for every pair gives accuracies on the task and, after a stroke, on the
support, and below the share of the gap between B and the ceiling (B fine-tuned itself) that arrives; with
several seeds, each with its standard deviation. One more table gives the mean share over tasks and seeds.
With --alphas, another one gives it where every fine-tune arrives with the strength α that is best for the
task among those that cost B at most 2 points of its support.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import transfusion
from experiments.pairs.pair import Pair
from experiments.pairs.tasks import APART, PAIRS
from experiments.pairs.training import say
from transfusion.matching.methods import preset
from transfusion.transportation.adapters.adapter_output import AdapterOutput
from transfusion.transportation.refinement.refinement_settings import RefinementSettings


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


def moved(
    case: Case, method: str, alpha: float | str | None = 1.0, *, real: bool = False, **choices: Any
) -> Any:
    """Transport by a method of the package; one alignment serves all tasks of a pair. ``real``: from what
    both bases compute on unlabelled inputs of theirs, instead of synthetic ones.
    """
    shown = _inputs(case.pair.name) if real else None
    via = _aligned(case.folders["a"], case.folders["b"], method, shown, **choices)
    folders = case.folders
    transport: Any = transfusion.transport(
        folders["tuned"], base=folders["a"], onto=folders["b"], via=via, alpha=alpha, anyway=True
    )
    return transport.module().eval()


def refined(
    case: Case, method: str = "functional", *, alpha: float = 1.0, own: int = 0, **choices: Any
) -> Any:
    """Transport, and refine towards the fine-tune; with ``own``, on so many unlabelled inputs of its task."""
    shown = _task_inputs(case, own) if own else None
    via = _aligned(case.folders["a"], case.folders["b"], method, None)
    folders = case.folders
    with tempfile.TemporaryDirectory() as folder:
        result = transfusion.transport(
            folders["tuned"],
            base=folders["a"],
            onto=folders["b"],
            via=via,
            alpha=alpha,
            refine=True,
            calibrate=shown,
            output=Path(folder) / "refined",
            **choices,
        )
        if isinstance(result, AdapterOutput):
            return _with_adapter(case, Path(folder) / "refined")
        return case.pair.load(Path(folder) / "refined")


def _with_adapter(case: Case, folder: Path) -> Any:
    """B with an adapter folded in."""
    loaded = peft.PeftModel.from_pretrained(case.pair.untouched(case.b, case.tuned), str(folder))
    return loaded.merge_and_unload().eval()


def _task_inputs(case: Case, count: int) -> Path:
    """A file of unlabelled inputs of the task, from the data of A's fine-tune."""
    place = Path(tempfile.mkdtemp()) / f"{case.pair.name}-{case.task.name}.safetensors"
    inputs = case.pair.task_inputs(case.task, count)
    save_file({name: one.contiguous() for name, one in inputs.items()}, place)
    return place


@cache
def _aligned(a: Path, b: Path, method: str, shown: Path | None, **choices: Any) -> Any:
    chosen = preset(method).changed(calibrate=shown and str(shown), **choices)
    return transfusion.align(a, b, method=chosen)


@cache
def _inputs(pair: str) -> Path:
    """A file of inputs that both bases have seen the like of: half of them from each one's own data."""
    halves = [PAIRS[pair].inputs(which, 160) for which in "ab"]
    place = Path(tempfile.mkdtemp()) / f"{pair}.safetensors"
    save_file({name: torch.cat([half[name] for half in halves]).contiguous() for name in halves[0]}, place)
    return place


STEPS = (30, 100)
"""Shorter refinements, with π and without it: what does π add?"""

METHODS: dict[str, Callable[..., Any]] = {
    "B": lambda case: case.pair.untouched(case.b, case.tuned),
    "naive": partial(moved, method="naive"),
    "transfusion": partial(moved, method="transfusion"),
    "tied": partial(moved, method="tied"),
    "brute-force": partial(moved, method="brute-force"),
    "no-attention": partial(moved, method="no-attention"),
    "git-rebasin": partial(moved, method="git-rebasin"),
    "ot": partial(moved, method="ot"),
    "guarded": partial(moved, method="guarded"),
    "procrustes, real": partial(
        moved, method="functional", real=True, heads="flat", mlp="rotated", scaled=False, weights=0.0
    ),
    "functional": partial(moved, method="functional"),
    "functional, gradients": partial(moved, method="functional", gradients=1.0),
    "functional, default α": partial(moved, method="functional", alpha=None),
    "functional, α auto": partial(moved, method="functional", alpha="auto"),
    "functional, real": partial(moved, method="functional", real=True),
    "auto": partial(moved, method="auto"),
    "refined": refined,
    "refined, 100 own": partial(refined, own=100),
    "refined, 400 own": partial(refined, own=400),
    "refined, rank 16": partial(refined, refine_rank=16),
    **{f"refined, {steps} steps": partial(refined, refine_steps=steps) for steps in STEPS},
    **{
        f"from B, {steps} steps": partial(refined, alpha=0.0, refine_steps=steps)
        for steps in (*STEPS, RefinementSettings().steps)
    },
    "ceiling": lambda case: case.ceiling,
}
"""From a case to a model on B's side: a line here is a column of the tables.

All but B and the ceiling take the strength ``alpha`` of what arrives as well.
"""

ENDS = ("B", "ceiling")
AUTOMATIC = ("functional, default α", "functional, α auto")
"""Have a strength of their own."""
ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
LOSS = 2.0
"""Points of B's support that a matched strength may cost."""

Measured = dict[str, dict[str, float]]
"""By method: ``task`` and ``support`` in percent, and ``share`` of the gap.

Where strengths were tried, the best one with its share: ``alpha`` and ``matched``.
"""
Results = dict[str, dict[str, list[Measured]]]
"""By pair and task, a measurement for every seed."""


def measured(case: Case, methods: list[str], alphas: tuple[float, ...] = ()) -> Measured:
    found = {name: scored(case, METHODS[name](case)) for name in dict.fromkeys([*ENDS, *methods])}
    b, ceiling = (found[name]["task"] for name in ENDS)

    def share(scores: dict[str, float]) -> float:
        return 100 * (scores["task"] - b) / (ceiling - b) if ceiling != b else float("nan")

    for name, scores in found.items():
        scores["share"] = share(scores)
        if alphas and name not in (*ENDS, *AUTOMATIC):
            tried = {alpha: scored(case, METHODS[name](case, alpha=alpha)) for alpha in alphas}
            enough = found["B"]["support"] - LOSS
            harmless = {alpha: some for alpha, some in tried.items() if some["support"] >= enough}
            harmless[0.0] = found["B"]
            scores["alpha"] = max(harmless, key=lambda alpha: harmless[alpha]["task"])
            scores["matched"] = share(harmless[scores["alpha"]])
    return found


def scored(case: Case, model: Any) -> dict[str, float]:
    return {
        "task": case.pair.accuracy(model, case.task),
        "support": case.pair.support(model, case.b, case.task),
    }


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


def tables(pairs: list[str], methods: list[str], seeds: int, alphas: tuple[float, ...] = ()) -> Results:
    results: Results = {}
    for case in cases(pairs, seeds):
        since = time.monotonic()
        found = measured(case, methods, alphas)
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


def draw_means(results: Results, methods: list[str], *, matched: bool = False) -> Table:
    """What arrives over all tasks: a row for every pair, and one for all of them."""
    how = f", α matched to a loss of support of at most {LOSS:g} points (mean α below)" if matched else ""
    table = Table(title=f"share of the gap, mean over tasks and seeds ± standard deviation over seeds{how}")
    table.add_column("pair")
    named = [name for name in methods if name not in ENDS and not (matched and name in AUTOMATIC)]
    for name in named:
        table.add_column(name, justify="right")
    groups = {pair: list(rows.values()) for pair, rows in results.items()}
    groups["all"] = [row for rows in groups.values() for row in rows]
    for pair, rows in groups.items():
        cells = []
        for name in named:
            cell = f"{spread(by_seed(rows, name, 'matched' if matched else 'share'))} %"
            if matched:
                cell += f"\nα {statistics.mean(by_seed(rows, name, 'alpha')):.2f}"
            cells.append(cell)
        table.add_row(pair, *cells)
    return table


def by_seed(rows: list[list[Measured]], method: str, what: str) -> list[float]:
    """For every seed the mean over the tasks, whose rows these are."""
    return [statistics.mean(found[method][what] for found in tasks) for tasks in zip(*rows, strict=True)]


def spread(values: list[float]) -> str:
    """The mean, and with more than one value how far they scatter."""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(APART))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--alphas", action="store_true", help="look for the best strength of every method")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    asked = parser.parse_args()

    torch.set_num_threads(asked.threads)
    transformers.utils.logging.disable_progress_bar()
    if asked.train or not asked.table:
        train(asked.pairs, asked.seeds)
    if asked.table or not asked.train:
        results = tables(asked.pairs, asked.methods, asked.seeds, ALPHAS if asked.alphas else ())
        console = Console(width=200)
        for name, rows in results.items():
            console.print(draw(PAIRS[name], rows, asked.methods))
        console.print(draw_means(results, asked.methods))
        if asked.alphas:
            console.print(draw_means(results, asked.methods, matched=True))
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
