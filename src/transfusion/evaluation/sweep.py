"""Sweeps: B + α·π(τ) measured for many α, beside B + α·τ (the paper's figure of gains)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from transfusion.errors import SettingError
from transfusion.evaluation.evaluate import named_base
from transfusion.evaluation.line import Lines, Via, aligning_for, given_alignments, open_lines
from transfusion.evaluation.scores import LESS_IS_BETTER, Score, gain
from transfusion.evaluation.task import DataReference, EvaluationData
from transfusion.model.bases import ConfigArgument
from transfusion.report.figures import draw_sweep
from transfusion.report.result_files import Paths, ResultFiles
from transfusion.runtime.devices import as_precision
from transfusion.runtime.progress import SILENT, Advance, Progress
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.run_record import RunRecord
from transfusion.transport.finetunes import Finetune
from transfusion.transport.task_vector import NewTokens
from transfusion.transport.transport_plan import Base

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


def sweep(
    finetuned: Finetune,
    *,
    base: Base | None = None,
    onto: Base,
    data: DataReference,
    support: DataReference | None = None,
    via: Via | Sequence[Via] | None = None,
    alphas: Iterable[float] = ALPHAS,
    naive: bool = True,
    batch: int | None = None,
    dtype: torch.dtype | str = torch.float32,
    trust_base: bool = False,
    new_tokens: NewTokens | str = NewTokens.REFUSE,
    vocabulary_share: float | None = None,
    calibrate: str | Path | None = None,
    seed: int = 0,
    config: ConfigArgument = None,
    output: Paths = None,
    force: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
    **aligning: Any,
) -> Sweep:
    """Measure B + α·π(τ) for many α, in memory; with ``naive``, B + α·τ as well.

    ``finetuned`` is the fine-tune of A: a model, or a PEFT adapter.
    ``base`` is A, the base that was fine-tuned; the default is the folder that an adapter's configuration
    names. ``onto`` is B, the new release.
    ``data`` is the task, and ``support`` what B could do before: a path, a hub id, examples in memory, or an
    `EvaluationData` that says more.
    ``via`` is π, its file, or several, with a curve each; without it, A and B are aligned first, with
    ``seed``, ``calibrate`` and ``aligning`` passed on to `align`.
    ``alphas`` are the values of α.
    ``batch`` is the number of examples at a time, ``dtype`` the type to compute in.
    ``trust_base``, ``new_tokens``, ``vocabulary_share`` and ``config`` are those of `transport`.
    ``output`` is a file to write to, or several: a figure (.png, .svg, .pdf) or .json; with ``force``,
    existing files are replaced.
    ``resources`` are threads and device; ``progress`` follows the run.

    >>> found = transfusion.sweep(
    ...     "models/tuned", base="models/a", onto="models/b", via="pi.safetensors",
    ...     data="data.safetensors", alphas=[0.5, 1],
    ... )
    >>> [curve.label for curve in found.curves], [point.alpha for point in found.curves[0].points]
    (['naive', 'guarded'], [0.5, 1.0])
    >>> found.curves[1].best.task_gain == found.metadata()["curves"][1]["points"][0]["gain"]["task"]
    True
    """
    record, dtype = RunRecord("sweep"), as_precision(dtype)
    chosen = asked_alphas(alphas)
    base = named_base(finetuned) if base is None else base
    asked, other = EvaluationData.of(data), EvaluationData.of(support) if support is not None else None
    paths = given_alignments(via)
    aligning = aligning_for(paths, calibrate, aligning)
    read = (finetuned, base, onto, *asked.files, *(other.files if other else ()), *paths)
    files = ResultFiles.checked(output, force=force, inputs=read, draw=draw_sweep)
    if other is not None and other.task_head not in (None, asked.task_head):
        raise SettingError(
            "`support`: it has a task head of its own, and one model is measured on both",
            hint="give the support without a task head, or sweep it on its own",
        )
    with resources.in_process():
        lines = open_lines(
            finetuned,
            base,
            onto,
            paths,
            data=asked,
            naive=naive,
            dtype=dtype,
            config=config,
            vocabulary_share=vocabulary_share,
            aligning={**aligning, "seed": seed},
            resources=resources,
            progress=progress,
            trust_base=trust_base,
            new_tokens=new_tokens,
        )
        with progress.bar(len(chosen) * len(lines.ways), "building the models") as advance:
            found = _sweep(lines, chosen, asked, other, batch, advance)
    for note in found.notes:
        progress.warn(note)
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
