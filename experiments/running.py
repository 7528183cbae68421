"""The recipes' work: fine-tune A, align, transport and measure; what comes out is plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from experiments.making import Maker
from experiments.pairs.data import say
from experiments.questions import Read
from experiments.recipes import ZERO
from experiments.settings import Scale, Task
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.fewshot import draw_shots, learn
from transfusion.evaluation.line import Line, Lines
from transfusion.evaluation.task import EvaluationData

EXPERT = "A, fine-tuned"
NAIVE = "naive"
T = TypeVar("T", bound=Task)
Found = dict[str, dict[str, float]]
"""By row: percent on ``task`` and ``support``, and points gained over B on both."""


@dataclass(frozen=True)
class Moved:
    """B as a live model, with a line for every method along which the fine-tune is added to it."""

    lines: Lines
    by_method: dict[str, Line]
    batch: int | None

    @classmethod
    def of(cls, maker: Maker, tuned: Path, methods: Sequence[str]) -> Moved:
        """Transport by every method, on the device."""
        lines = Lines.of(tuned, maker.base("a"), maker.base("b"), device=maker.device)
        along = {
            method: lines.along(None if method == NAIVE else maker.aligned(method)) for method in methods
        }
        return cls(lines, along, maker.batch)

    def evaluator(self, data: EvaluationData) -> Evaluator:
        """For B as it is at the moment of measuring."""
        return data.evaluator(self.lines.input_model, self.lines.live, batch=self.batch)

    def evaluators(self, task: EvaluationData, support: EvaluationData | None) -> dict[str, Evaluator]:
        """For the task and, where there is one, for the support."""
        asked = {"task": task} if support is None else {"task": task, "support": support}
        return {what: self.evaluator(data) for what, data in asked.items()}


def percent(evaluators: dict[str, Evaluator]) -> dict[str, float]:
    """What the live model reaches at this moment."""
    return {what: 100 * evaluator.measure().value for what, evaluator in evaluators.items()}


def gained(here: dict[str, float], zero: dict[str, float]) -> dict[str, float]:
    """Points over B."""
    return {f"{what} gain": here[what] - zero[what] for what in here}


def expert(
    maker: Maker, tuned: Path, task: EvaluationData, support: EvaluationData | None
) -> dict[str, float]:
    """What A's own fine-tune reaches."""
    model, live = maker.live(tuned)
    asked = {"task": task} if support is None else {"task": task, "support": support}
    return percent({what: data.evaluator(model, live, batch=maker.batch) for what, data in asked.items()})


def makers(scale: Scale, seeds: int, device: str) -> Iterator[Maker]:
    """One for every seed."""
    for seed in range(seeds):
        yield Maker(scale, seed, device)


def announced(maker: Maker, tasks: Sequence[T], papers: Sequence[str]) -> Iterator[T]:
    """The tasks that are asked for, in that order."""
    known = {task.paper: task for task in tasks}
    for paper in papers:
        say(f"{paper} ({known[paper].name}), seed {maker.seed}")
        yield known[paper]


def images(
    scale: Scale, tasks: Sequence[str], methods: Sequence[str], seeds: int, device: str
) -> dict[str, list[Found]]:
    """Task vectors moved with α = 1, by every method, for every seed: Tables 1 and 3."""
    found: dict[str, list[Found]] = {}
    for maker in makers(scale, seeds, device):
        for task in announced(maker, scale.images, tasks):
            rows = _whole(maker, maker.image_tuned(task), task.test(), scale.support(), methods)
            found.setdefault(task.paper, []).append(rows)
    return found


def texts(
    scale: Scale, tasks: Sequence[str], methods: Sequence[str], seeds: int, device: str
) -> dict[str, list[Found]]:
    """Text encoders moved with α = 1, under the head that A's fine-tune has: Table 2."""
    found: dict[str, list[Found]] = {}
    for maker in makers(scale, seeds, device):
        for task in announced(maker, scale.texts, tasks):
            tuned = maker.text_tuned(task)
            data = Read(task.test(), linear=maker.head(task))
            found.setdefault(task.paper, []).append(_whole(maker, tuned, data, None, methods))
    return found


def _whole(
    maker: Maker, tuned: Path, task: EvaluationData, support: EvaluationData | None, methods: Sequence[str]
) -> Found:
    rows: Found = {EXPERT: expert(maker, tuned, task, support)}
    moved = Moved.of(maker, tuned, methods)
    evaluators = moved.evaluators(task, support)
    rows[ZERO] = percent(evaluators)
    for method, line in moved.by_method.items():
        with line.at(1.0):
            here = percent(evaluators)
        rows[method] = here | gained(here, rows[ZERO])
    return rows


def few_shots(
    scale: Scale, tasks: Sequence[str], methods: Sequence[str], seeds: int, device: str
) -> dict[str, list[Found]]:
    """One α for every layer, learned from a few examples of every class: Table 4."""
    found: dict[str, list[Found]] = {}
    for maker in makers(scale, seeds, device):
        for task in announced(maker, scale.images, tasks):
            moved = Moved.of(maker, maker.image_tuned(task), methods)
            whole, test = moved.evaluator(task.train()), {"task": moved.evaluator(task.test())}
            shots = whole.chosen(draw_shots(whole, scale.shots, maker.seed))
            rows: Found = {ZERO: percent(test)}
            for method, line in moved.by_method.items():
                alpha, losses = learn(line, shots, epochs=scale.epochs)
                with line.at(1.0):
                    plain = percent(test)
                with line.at(alpha):
                    here = percent(test)
                rows[method] = {
                    **here,
                    **gained(here, rows[ZERO]),
                    "plain gain": gained(plain, rows[ZERO])["task gain"],
                    "loss at 1": losses[0],
                    "loss learned": min(losses),
                }
            found.setdefault(task.paper, []).append(rows)
    return found


def strengths(
    scale: Scale, tasks: Sequence[str], methods: Sequence[str], seeds: int, device: str
) -> dict[str, list[dict[str, Any]]]:
    """Gains for many α, without π and with it: the figure of α."""
    found: dict[str, list[dict[str, Any]]] = {}
    for maker in makers(scale, seeds, device):
        for task in announced(maker, scale.images, tasks):
            moved = Moved.of(maker, maker.image_tuned(task), methods)
            few = (replace(data, limit=scale.glance) for data in (task.test(), scale.support()))
            evaluators = moved.evaluators(*few)
            zero = percent(evaluators)
            curves: dict[str, list[dict[str, float]]] = {}
            for method, line in moved.by_method.items():
                for alpha in scale.alphas:
                    with line.at(alpha):
                        point = {"alpha": alpha, **gained(percent(evaluators), zero)}
                    curves.setdefault(method, []).append(point)
            found.setdefault(task.paper, []).append({ZERO: zero, "curves": curves})
    return found
