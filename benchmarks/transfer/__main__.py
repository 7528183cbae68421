"""How much of a fine-tune of A arrives on a base B that was trained apart from it: python -m transfer

    python -m transfer --train             train what is missing in the cache, on one core
    python -m transfer --table             move every fine-tune by every method, and print the tables
    python -m transfer --table --pairs text --methods naive guarded --seeds 3
    python -m transfer --table --pairs cifar --tasks pencil clothes
    python -m transfer --table --alphas    look for the best strength of every method, too
    python -m transfer --table --seconds   fine-tune B once more, and time it

Without either it does both. A table for every pair gives accuracies on the task and, after a stroke, on the
support, and below the share of the gap between B and the ceiling (B fine-tuned itself) that arrives; with
several seeds, each with its standard deviation. One more table gives the mean share over tasks and seeds,
and that of corruptions and of other tasks apart where there are both.
With --alphas, another one gives it where every fine-tune arrives with the strength α that is best for the
task among those that cost B at most 2 points of its support. With --seconds, the last table says how long
each method took, beside fine-tuning B.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from safetensors.torch import save_file

import transfusion
from experiments.pairs.data import say
from experiments.pairs.pair import Pair
from experiments.pairs.tasks import APART, PAIRS
from transfer.drawing import (
    AUTOMATIC,
    ENDS,
    LOSS,
    Measured,
    Results,
    draw,
    draw_means,
    draw_seconds,
)
from transfusion.matching.methods import preset


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
        folders["tuned"], base=folders["a"], onto=folders["b"], via=via, alpha=alpha, force_unrelated=True
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
        if result.adapter_files is not None:
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


@dataclass
class Alignments:
    """The π between bases, each found once."""

    found: dict[Any, tuple[Any, float]] = field(default_factory=dict)
    """Every π, and the seconds that it took."""
    saved: float = 0.0
    """The seconds of those that had been found before."""

    def __call__(self, a: Path, b: Path, method: str, shown: Path | None, **choices: Any) -> Any:
        key = (a, b, method, shown, *sorted(choices.items()))
        if key in self.found:
            self.saved += self.found[key][1]
        else:
            chosen = preset(method).changed(calibrate=shown and str(shown), **choices)
            since = time.process_time()
            self.found[key] = transfusion.align(a, b, method=chosen), time.process_time() - since
        return self.found[key][0]


_aligned = Alignments()


@cache
def _inputs(pair: str) -> Path:
    """A file of inputs that both bases have seen the like of: half of them from each one's own data."""
    halves = [PAIRS[pair].inputs(which, 160) for which in "ab"]
    place = Path(tempfile.mkdtemp()) / f"{pair}.safetensors"
    save_file({name: torch.cat([half[name] for half in halves]).contiguous() for name in halves[0]}, place)
    return place


STEPS = (30, 100, 300)
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
    "functional, default α": partial(moved, method="functional", alpha=None),
    "functional, α auto": partial(moved, method="functional", alpha="auto"),
    "functional, real": partial(moved, method="functional", real=True),
    "auto": partial(moved, method="auto"),
    "refined": refined,
    "auto, refined": partial(refined, method="auto"),
    "refined, 100 own": partial(refined, own=100),
    "refined, 400 own": partial(refined, own=400),
    "refined, rank 16": partial(refined, refine_rank=16),
    **{f"refined, {steps} steps": partial(refined, refine_steps=steps) for steps in STEPS},
    **{f"from B, {steps} steps": partial(refined, alpha=0.0, refine_steps=steps) for steps in (*STEPS, 600)},
    "ceiling": lambda case: case.ceiling,
}
"""From a case to a model on B's side: a line here is a column of the tables."""

ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


def measured(
    case: Case, methods: list[str], alphas: tuple[float, ...] = (), *, timed: bool = False
) -> Measured:
    found = {name: scored(case, METHODS[name](case)) for name in ENDS}
    b, ceiling = found["B"], found["ceiling"]

    def share(scores: dict[str, float]) -> float:
        gap = ceiling["task"] - b["task"]
        return 100 * (scores["task"] - b["task"]) / gap if gap else float("nan")

    for name in methods:
        if name in ENDS:
            continue
        seconds, model = clocked(partial(METHODS[name], case))
        found[name] = scored(case, model) | {"seconds": seconds}
        if alphas and name not in AUTOMATIC:
            tried = {alpha: scored(case, along(case, model, alpha)) for alpha in alphas}
            harmless = {
                alpha: some for alpha, some in tried.items() if some["support"] >= b["support"] - LOSS
            }
            harmless[0.0] = b
            best = max(harmless, key=lambda alpha: harmless[alpha]["task"])
            found[name] |= {"alpha": best, "matched": share(harmless[best])}
    for scores in found.values():
        scores["share"] = share(scores)
    if timed:
        ceiling["seconds"] = clocked(partial(tune_again, case))[0]
    return found


def clocked(make: Callable[[], Any]) -> tuple[float, Any]:
    """What is made, and the seconds of the processor for it; a π that had been found before counts."""
    _aligned.saved, since = 0.0, time.process_time()
    made = make()
    return time.process_time() - since + _aligned.saved, made


def tune_again(case: Case) -> Any:
    """Train the ceiling once more."""
    return case.pair.new_tuned(case.folders["b"], "b", case.task, case.seed)


def along(case: Case, model: Any, alpha: float) -> Any:
    """B with α times all that a method changed, on the straight line through B and the model."""
    changed, start = deepcopy(model), dict(METHODS["B"](case).named_parameters())
    for name, parameter in changed.named_parameters():
        parameter.data = torch.lerp(start[name].data, parameter.data, alpha)
    return changed


def scored(case: Case, model: Any) -> dict[str, float]:
    return {
        "task": case.pair.accuracy(model, case.task),
        "support": case.pair.support(model, case.b, case.task),
    }


def cases(pairs: list[str], seeds: int, tasks: list[str] | None = None) -> Iterator[Case]:
    """Of all tasks, or of those with these names."""
    for seed in range(seeds):
        for name in pairs:
            for task in PAIRS[name].tasks:
                if tasks is None or task.name in tasks:
                    yield Case(PAIRS[name], task, seed)


def train(cases: Iterable[Case]) -> None:
    """Everything of the first seed comes before anything of the second."""
    since = time.monotonic()
    for case in cases:
        folders = case.folders
        say(f"{case.pair.name} {case.task.name}, seed {case.seed}: {', '.join(map(str, folders.values()))}")
    say(f"all is trained, after {time.monotonic() - since:.0f} s")


def tables(
    cases: Iterable[Case],
    methods: list[str],
    alphas: tuple[float, ...] = (),
    *,
    timed: bool = False,
    written: Path | None = None,
) -> Results:
    """Measure every case; the numbers are ``written`` after each of them."""
    results: Results = {}
    for case in cases:
        since = time.monotonic()
        found = measured(case, methods, alphas, timed=timed)
        results.setdefault(case.pair.name, {}).setdefault(case.task.name, []).append(found)
        if written is not None:
            written.write_text(json.dumps(results, indent=2))
        say(f"{case.pair.name} {case.task.name}, seed {case.seed}: {time.monotonic() - since:.0f} s")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(APART))
    names = list(dict.fromkeys(task.name for pair in PAIRS.values() for task in pair.tasks))
    parser.add_argument("--tasks", nargs="+", choices=names, help="only those of the pairs' tasks")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--alphas", action="store_true", help="look for the best strength of every method")
    parser.add_argument("--seconds", action="store_true", help="fine-tune B once more, and time it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers there, after every task")
    asked = parser.parse_args()
    chosen = partial(cases, asked.pairs, asked.seeds, asked.tasks)
    if next(chosen(), None) is None:
        parser.error("none of these tasks belongs to these pairs")

    torch.set_num_threads(asked.threads)
    transformers.utils.logging.disable_progress_bar()
    if asked.train or not asked.table:
        train(chosen())
    if asked.table or not asked.train:
        alphas = ALPHAS if asked.alphas else ()
        results = tables(chosen(), asked.methods, alphas, timed=asked.seconds, written=asked.json)
        console = Console(width=200)
        for name, rows in results.items():
            console.print(draw(PAIRS[name], rows, asked.methods))
        console.print(draw_means(results, asked.methods))
        if asked.alphas:
            console.print(draw_means(results, asked.methods, matched=True))
        if asked.seconds:
            console.print(draw_seconds(results, asked.methods))


if __name__ == "__main__":
    main()
