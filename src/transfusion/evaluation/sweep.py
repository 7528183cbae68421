"""Sweeps: B + α·π(τ) measured for many α, beside B + α·τ (the paper's figure of gains)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from transfusion.errors import SettingError
from transfusion.evaluation.line import Lines, line_inputs, open_lines
from transfusion.evaluation.scores import LESS_IS_BETTER, Score, gain
from transfusion.evaluation.settings import SweepSettings
from transfusion.evaluation.task import EvaluationData
from transfusion.report.figures import draw_sweep
from transfusion.report.result_files import ResultFiles
from transfusion.runtime.progress import Advance
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.settings import verb

ALPHAS = (0.01, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.25, 1.5, 1.75, 2.0)
"""The default values: the paper's range, and 1, which adds all of τ."""


@dataclass(frozen=True)
class TaskAndSupport:
    """A score on the task and, if there is one, on the support set."""

    task: Score
    support: Score | None

    def metadata(self) -> dict[str, Any]:
        """Return both scores for a file or another program."""
        return {"task": self.task.metadata(), "support": self.support and self.support.metadata()}


@dataclass(frozen=True)
class SweepPoint:
    """The scores at one α."""

    alpha: float
    scores: TaskAndSupport
    task_gain: float
    """The gain over α = 0."""
    support_gain: float | None

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        gains = {"task": self.task_gain, "support": self.support_gain}
        return {"alpha": self.alpha, **self.scores.metadata(), "gain": gains}


@dataclass(frozen=True)
class SweepCurve:
    """The scores along one line."""

    label: str
    method: str | None
    """The method of π; None for τ as it is."""
    at_zero: TaskAndSupport
    """The scores at α = 0 of this line. Lines begin at different models if π moves a task head."""
    points: tuple[SweepPoint, ...]

    @property
    def best(self) -> SweepPoint:
        """The best point on the task; among equals, the one with the least loss."""
        sign = -1 if self.points[0].scores.task.metric in LESS_IS_BETTER else 1
        return max(self.points, key=lambda one: (sign * one.scores.task.value, -one.scores.task.loss))

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        return {
            "label": self.label,
            "method": self.method,
            "at_zero": self.at_zero.metadata(),
            "points": [point.metadata() for point in self.points],
            "best": self.best.alpha,
        }


@dataclass(frozen=True)
class Sweep:
    """Curves of several lines over the same values of α, and one reference."""

    finetuned: str
    base: str
    onto: str
    task: dict[str, Any]
    """The task: data, examples, question, metric."""
    support: dict[str, Any] | None
    at_zero: TaskAndSupport
    """The reference of all gains: B, with the fine-tune's task head, unmoved, if B has none of that kind."""
    curves: tuple[SweepCurve, ...]
    notes: tuple[str, ...] = ()
    """Notes for the user on how it was measured."""
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The result as it is written to files, with the record of its run."""

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        return {
            "finetuned": self.finetuned,
            "base": self.base,
            "onto": self.onto,
            "task": self.task,
            "support": self.support,
            "at_zero": self.at_zero.metadata(),
            "curves": [curve.metadata() for curve in self.curves],
        }


@verb(SweepSettings)
def sweep(settings: SweepSettings) -> Sweep:
    """Measure B + α·π(τ) for many α, in memory; with ``naive``, B + α·τ as well.

    >>> found = transfusion.sweep(
    ...     "models/tuned", base="models/a", onto="models/b", via="pi.safetensors",
    ...     data="data.safetensors", alphas=[0.5, 1],
    ... )
    >>> [curve.label for curve in found.curves], [point.alpha for point in found.curves[0].points]
    (['naive', 'guarded'], [0.5, 1.0])
    >>> found.curves[1].best.task_gain == found.metadata()["curves"][1]["points"][0]["gain"]["task"]
    True
    """
    record = RunRecord("sweep")
    chosen, asked, other = asked_alphas(settings.alphas), settings.task, settings.beside
    read = (*line_inputs(settings), *asked.files, *(other.files if other else ()))
    files = ResultFiles.checked(settings.output, force=settings.force, inputs=read, draw=draw_sweep)
    if other is not None and other.task_head not in (None, asked.task_head):
        raise SettingError(
            "`support`: it has a task head of its own, and one model is measured on both",
            hint="give the support without a task head, or sweep it on its own",
        )
    with settings.resources.in_process():
        lines = open_lines(settings)
        with settings.progress.bar(len(chosen) * len(lines.ways), "building the models") as advance:
            found = _sweep(lines, chosen, asked, other, settings.batch, advance)
    for note in found.notes:
        settings.progress.warn(note)
    return files.finish(found, record)


def _sweep(
    lines: Lines,
    alphas: Sequence[float],
    asked: EvaluationData,
    other: EvaluationData | None,
    batch: int | None,
    advance: Advance,
) -> Sweep:
    """Measure one curve per line."""
    task = asked.evaluator(lines.input_model, lines.live, batch=batch)
    support = None
    if other is not None:
        support = other.evaluator(lines.input_model, lines.live, batch=batch)

    def measured() -> TaskAndSupport:
        return TaskAndSupport(task.measure(), support.measure() if support is not None else None)

    zero = measured()
    curves: list[SweepCurve] = []
    for label, line in lines.each():
        own, points = zero, list[SweepPoint]()
        if line.carries:
            with line.at(0.0):
                own = measured()
        for alpha in alphas:
            with line.at(alpha):
                points.append(point_of(alpha, measured(), zero))
            advance(f"{label} · α = {alpha:.3g} · {points[-1].task_gain:+.3g}")
        curves.append(SweepCurve(label, line.method, own, tuple(points)))
    return Sweep(
        lines.label,
        lines.a.label,
        lines.b.label,
        task.metadata(),
        support.metadata() if support is not None else None,
        zero,
        tuple(curves),
        tuple(dict.fromkeys((*task.notes, *(support.notes if support is not None else ())))),
    )


def point_of(alpha: float, scores: TaskAndSupport, zero: TaskAndSupport) -> SweepPoint:
    """Return a point with its gains over a reference."""
    both = scores.support is not None and zero.support is not None
    support = gain(scores.support, zero.support) if both else None  # type: ignore[arg-type]
    return SweepPoint(alpha, scores, gain(scores.task, zero.task), support)


def asked_alphas(given: Iterable[float | str]) -> list[float]:
    """Return the values of α in ascending order, without repetition."""
    try:
        if isinstance(given, str):  # even one of digits alone
            raise TypeError
        values = sorted({float(alpha) for alpha in given})
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"alphas = {given!r}: several numbers were expected", hint="give some, such as [0.5, 1, 1.5]"
        ) from error
    if not values:
        raise SettingError("alphas: no values", hint="give some, such as 0.5, 1, 1.5")
    for value in values:
        if not isfinite(value) or value < 0:
            raise SettingError(
                f"alphas: {value:g} is not a number of at least 0", hint="1 adds all of τ, 0 nothing"
            )
    return values
