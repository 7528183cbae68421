"""Sweeps: B + α·π(τ) measured for many α, beside B + α·τ (the paper's figure of gains)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rich.console import RenderableType

from transfusion.errors import SettingError
from transfusion.evaluation.line import line_inputs, open_lines
from transfusion.evaluation.scores import LESS_IS_BETTER, Scores, gain, task_and_support
from transfusion.evaluation.settings import SweepSettings
from transfusion.report import views
from transfusion.report.figures import draw_sweep
from transfusion.report.result_files import Result, ResultFiles, as_svg, fields_of
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.settings import verb


@dataclass(frozen=True, kw_only=True)
class SweepPoint(Scores):
    """The scores at one α."""

    alpha: float
    gain: dict[str, float | None]
    """The gains over α = 0 on the ``task`` and the ``support``."""


@dataclass(frozen=True)
class SweepCurve:
    """The scores along one line."""

    label: str
    method: str | None
    """The method of π; None for τ as it is."""
    at_zero: Scores
    """The scores at α = 0 of this line. Lines begin at different models if π moves a task head."""
    points: tuple[SweepPoint, ...]

    @property
    def best(self) -> SweepPoint:
        """The best point on the task; among equals, the one with the least loss."""
        sign = -1 if self.points[0].task.metric in LESS_IS_BETTER else 1
        return max(self.points, key=lambda one: (sign * one.task.value, -one.task.loss))

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        return {**fields_of(self), "best": self.best.alpha}


@dataclass(frozen=True, repr=False)
class Sweep(Result):
    """Curves of several lines over the same values of α, and one reference."""

    finetuned: str
    base: str
    onto: str
    task: dict[str, Any]
    """The task: data, examples, question, metric."""
    support: dict[str, Any] | None
    at_zero: Scores
    """The reference of all gains: B, with the fine-tune's task head, unmoved, if B has none of that kind."""
    curves: tuple[SweepCurve, ...]

    def __rich__(self) -> RenderableType:
        return views.sweep(self.written)

    def figure(self) -> bytes:
        """Return the figure as SVG."""
        return as_svg(draw_sweep, self)


@verb(SweepSettings)
def sweep(settings: SweepSettings) -> Sweep:
    """Measure B + α·π(τ) for many α, in memory; with ``naive``, B + α·τ as well.

    >>> found = transfusion.sweep(
    ...     "models/tuned", base="models/a", onto="models/b", via="pi.safetensors",
    ...     data="data.safetensors", alphas=[0.5, 1],
    ... )
    >>> [curve.label for curve in found.curves], [point.alpha for point in found.curves[0].points]
    (['naive', 'auto'], [0.5, 1.0])
    >>> found.curves[1].best.gain["task"] == found.metadata()["curves"][1]["points"][0]["gain"]["task"]
    True
    """
    record, alphas = RunRecord("sweep"), asked_alphas(settings.alphas)
    asked = [one for one in (settings.task, settings.beside) if one is not None]
    read = (*line_inputs(settings), *(file for one in asked for file in one.files))
    files = ResultFiles.checked(settings.output, force=settings.force, inputs=read, draw=draw_sweep)
    if asked[-1].task_head not in (None, asked[0].task_head):
        raise SettingError(
            "`support`: it has a task head of its own, and one model is measured on both",
            hint="give the support without a task head, or sweep it on its own",
        )
    curves: list[SweepCurve] = []
    with settings.resources.in_process():
        lines = open_lines(settings)
        with settings.progress.bar(len(alphas) * len(lines.ways), "building the models") as advance:
            evaluators = [lines.evaluator(one, settings.batch) for one in asked]

            def measured() -> Scores:
                task, support = task_and_support(one.measure() for one in evaluators)
                return Scores(task=task, support=support)

            zero = measured()
            for label, line in lines.each():
                own, points = zero, []
                if line.carries:
                    with line.at(0.0):
                        own = measured()
                for alpha in alphas:
                    with line.at(alpha):
                        scores = measured()
                    gains = scores.over(zero, gain)
                    point = SweepPoint(task=scores.task, support=scores.support, alpha=alpha, gain=gains)
                    points.append(point)
                    advance(f"{label} · α = {alpha:.3g} · {gains['task']:+.3g}")
                curves.append(SweepCurve(label, line.method, own, tuple(points)))
    about = task_and_support(one.metadata() for one in evaluators)
    notes = tuple(dict.fromkeys(note for one in evaluators for note in one.notes))
    for note in notes:
        settings.progress.warn(note)
    found = Sweep(*lines.labels, *about, zero, tuple(curves), notes=notes)
    return files.finish(found, record)


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
