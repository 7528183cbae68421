"""One coefficient α for every layer, learned from a few examples (the paper's few-shot table).

The model is B + Σ α_l·δ_l. The derivative of the loss by α_l is the sum of ⟨∂L/∂θ, δ⟩ over the tensors of
layer l, so ordinary backward passes are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import exists
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from torch import Tensor

from transfusion.architecture.naming import block_of
from transfusion.data.dataset import Dataset
from transfusion.data.examples import Examples
from transfusion.errors import DataError, MismatchError, SettingError, listing
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.line import Line, line_inputs, open_lines
from transfusion.evaluation.scores import Score, gain
from transfusion.evaluation.settings import EPOCHS, RATE, START, FewShotSettings
from transfusion.evaluation.task import EvaluationData
from transfusion.files.publishing import publish_file, write_json
from transfusion.report import views
from transfusion.report.figures import draw_fewshot
from transfusion.report.result_files import Result, ResultFiles, as_svg, require_places
from transfusion.runtime.engines import widest
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.settings import verb
from transfusion.transport.alpha import Alpha

OUTSIDE = "default"
"""The key of tensors outside of all blocks."""
_DIGITS = 6
"""Decimal places of a coefficient."""


@dataclass(frozen=True)
class FewShotCurve:
    """One line, with α = 1 and with the learned coefficients."""

    label: str
    method: str | None
    """The method of π; None for τ as it is."""
    coefficients: dict[str, float]
    """The learned coefficients by pattern, as in a file of α."""
    losses: tuple[float, ...]
    """The loss on the shots, before the first step and after each."""
    plain: Score
    """The score on the test with α = 1."""
    learned: Score
    """The score on the test with the learned coefficients."""
    gain: dict[str, float]
    """The gains of both over B."""

    @property
    def alpha(self) -> Alpha:
        return Alpha.of(self.coefficients)


@dataclass(frozen=True, repr=False)
class FewShot(Result):
    """Coefficients learned on π(τ) and on τ, and their scores."""

    finetuned: str
    base: str
    onto: str
    shots: int
    seed: int
    epochs: int
    rate: float
    start: float
    training: dict[str, Any]
    """The training data: source, examples, and how the test was kept apart."""
    task: dict[str, Any]
    """The test: data, examples, question, metric."""
    zero: Score
    """The score of B, with the fine-tune's task head, unmoved, if B has none of that kind."""
    curves: tuple[FewShotCurve, ...]

    def __rich__(self) -> RenderableType:
        return views.fewshot(self.written)

    def figure(self) -> bytes:
        """Return the figure as SVG."""
        return as_svg(draw_fewshot, self)

    @property
    def moved(self) -> FewShotCurve:
        """The curve of π(τ)."""
        return next(curve for curve in self.curves if curve.method is not None)

    @property
    def naive(self) -> FewShotCurve | None:
        """The curve of τ, if it was asked for."""
        return next((curve for curve in self.curves if curve.method is None), None)

    @property
    def alpha(self) -> Alpha:
        """The coefficients of π(τ), for `transport`."""
        return self.moved.alpha


@verb(FewShotSettings)
def fewshot(settings: FewShotSettings) -> FewShot:
    """Learn one α for every layer from a few examples of every class, for ``transport(alpha=...)``.

    The coefficients of B + α·π(τ) and, with ``naive``, of B + α·τ are learned, and both models are measured
    with α = 1 and with the learned coefficients.

    >>> found = transfusion.fewshot(
    ...     "models/tuned", base="models/a", onto="models/b", via="pi.safetensors",
    ...     data="data.safetensors", shots=1, epochs=2,
    ... )
    >>> found.task["examples"], list(found.alpha.patterns)  # of 20, one for each of 7 classes was drawn
    (13, ['encoder.layer.0.*', 'encoder.layer.1.*', 'encoder.layer.2.*'])
    >>> moved = transfusion.transport(
    ...     "models/tuned", base="models/a", onto="models/b", via="pi.safetensors", alpha=found.alpha
    ... )
    """
    record, force = RunRecord("fewshot"), settings.force
    schedule: dict[str, Any] = {"epochs": settings.epochs, "rate": settings.rate, "start": settings.start}
    _require_sensible(settings)
    asked, asked_test = settings.task, settings.tested
    read = (*line_inputs(settings), *asked.files, *asked_test.files)
    files = ResultFiles.checked(settings.results, force=force, inputs=read, draw=draw_fewshot)
    outputs = [path for path in (settings.output, settings.naive_output) if path is not None]
    require_places([*map(Path, outputs), *files.paths], read, force=force)
    curves: list[FewShotCurve] = []
    with settings.resources.in_process():
        lines = open_lines(settings)
        passes = (settings.epochs + 1) * (1 + settings.naive)
        with settings.progress.bar(passes, "building the models") as advance:
            whole = lines.evaluator(asked, settings.batch)
            drawn = draw_shots(whole, settings.shots, settings.seed)
            training, same = whole.chosen(drawn), same_examples(asked, asked_test)
            testing = lines.evaluator(
                replace(asked_test, limit=asked.limit) if same else asked_test, settings.batch
            )
            testing = testing.chosen(remaining_examples(testing, drawn)) if same else testing
            zero = testing.measure()
            for label, line in lines.each():

                def tell(text: str, label: str = label) -> None:
                    advance(f"{label} · {text}")

                alpha, losses = learn(line, training, **schedule, advance=tell)
                scores: dict[str, Score] = {}
                for name, one in (("plain", Alpha()), ("learned", alpha)):
                    with line.at(one):
                        scores[name] = testing.measure()
                gains = {name: gain(score, zero) for name, score in scores.items()}
                coefficients = {OUTSIDE: alpha.default, **alpha.patterns}
                curves.append(
                    FewShotCurve(label, line.method, coefficients, tuple(losses), **scores, gain=gains)
                )
    found = FewShot(
        *lines.labels,
        settings.shots,
        settings.seed,
        **schedule,
        training={
            "data": training.batch_source.label,
            "examples": len(training),
            "of": len(whole),
            "test": "the examples that were not drawn" if same else "other examples",
        },
        task=testing.metadata(),
        zero=zero,
        curves=tuple(curves),
        notes=tuple(dict.fromkeys((*training.notes, *testing.notes))),
    )
    for note in found.notes:
        settings.progress.warn(note)
    for path, curve in ((settings.output, found.moved), (settings.naive_output, found.naive)):
        if path is not None and curve is not None:
            publish_file(Path(path), partial(write_json, value=curve.coefficients), force=force)
    return files.finish(found, record)


def _require_sensible(settings: FewShotSettings) -> None:
    """Refuse settings with which nothing would be learned or written."""
    if settings.epochs < 1:
        raise SettingError(f"epochs = {settings.epochs}: nothing would be learned", hint="give 1 or more")
    if not 0 < settings.rate < float("inf"):
        raise SettingError(f"rate = {settings.rate}: it must be above 0", hint="0.05 is usual")
    Alpha(settings.start)
    if settings.naive_output is not None and not settings.naive:
        raise SettingError(
            "`naive_output` needs the coefficients that `naive=False` leaves out",
            hint="leave out one of them",
        )


# ── learning ─────────────────────────────────────────────────────────────────────────────────


def groups_of(line: Line) -> dict[str, list[str]]:
    """Return the parameters of every layer that changes, by the layer's pattern in a file of α."""
    groups: dict[str, list[str]] = {}
    for name in line.moved():
        layer = block_of(line.names[name])
        groups.setdefault(f"{layer}.*" if layer else OUTSIDE, []).append(name)
    if not groups:
        raise MismatchError(
            "the fine-tune changes nothing of B, so no coefficient can be learned",
            hint="was the base given twice?",
        )
    return groups


def derivatives(
    line: Line, evaluator: Evaluator, alpha: Alpha, groups: Mapping[str, list[str]]
) -> tuple[float, Tensor]:
    """Return the mean loss at an α, and its derivatives by the coefficients of the groups.

    ∂L/∂α_l = Σ ⟨∂L/∂θ, δ⟩ over the parameters θ of layer l, with δ = end − start.
    """
    names = [name for group in groups.values() for name in group]
    parameters = [line.live.module.get_parameter(name) for name in names]
    line.live.module.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    slopes = dict.fromkeys(names, 0.0)
    total, count = 0.0, 0
    with line.at(alpha):
        for loss, answers in evaluator.sums():
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            total, count = total + float(loss.detach()), count + answers
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    change = line.end[name] - line.start[name]
                    slopes[name] += float((gradient * change).sum(dtype=widest(change.device)))
    sums = [sum(slopes[name] for name in group) / count for group in groups.values()]
    return total / count, torch.tensor(sums, dtype=torch.float64)


def learn(
    line: Line,
    evaluator: Evaluator,
    *,
    epochs: int = EPOCHS,
    rate: float = RATE,
    start: float = START,
    advance: Callable[[str], object] = str,
) -> tuple[Alpha, list[float]]:
    """Minimise the loss with Adam, all examples at every step; keep the coefficients with the least loss.

    Return them, and the losses on the shots before the first step and after each.
    """
    groups = groups_of(line)
    values = torch.full((len(groups),), start, dtype=torch.float64)
    optimizer = torch.optim.Adam([values], lr=rate)
    losses: list[float] = []
    tried: list[Alpha] = []
    for epoch in range(epochs + 1):
        rounded = [round(value, _DIGITS) for value in values.tolist()]
        tried.append(Alpha.of(dict(zip(groups, rounded, strict=True))))
        loss, values.grad = derivatives(line, evaluator, tried[-1], groups)
        losses.append(loss)
        advance(f"epoch {epoch} · loss {loss:.4g}")
        optimizer.step()
        values.clamp_(min=0)
    return tried[losses.index(min(losses))], losses


# ── drawing the shots ────────────────────────────────────────────────────────────────────────


def draw_shots(evaluator: Evaluator, shots: int, seed: int) -> list[int]:
    """Return the indices of ``shots`` examples of every class; without classes, of ``shots`` texts."""
    if shots < 1:
        raise SettingError(f"shots = {shots}: nothing to learn from", hint="give 1 or more")
    source, labels = evaluator.batch_source.label, evaluator.labels
    if labels is None and len(evaluator) < shots:
        raise DataError(
            f"{source}: {shots} shots were asked for, and there are {len(evaluator)} examples",
            hint=f"ask for {len(evaluator)} or fewer, or give more examples",
        )
    if labels is None:
        labels, classes = torch.zeros(len(evaluator), dtype=torch.long), 1
    else:
        classes = evaluator.scorer.classes or 1
    counts = torch.bincount(labels, minlength=classes).tolist()
    if fewer := [f"{number} ({count})" for number, count in enumerate(counts) if count < shots]:
        raise DataError(
            f"{source}: {shots} shots of every class were asked for, and there are fewer of"
            f" {'class' if len(fewer) == 1 else 'classes'} {listing(fewer)}",
            hint=f"ask for {min(counts)} or fewer, or give more examples"
            if min(counts)
            else "give examples of every class of the model",
        )
    generator, drawn = torch.Generator().manual_seed(seed), list[int]()
    for one in range(classes):
        indices = (labels == one).nonzero().flatten()
        drawn += indices[torch.randperm(len(indices), generator=generator)[:shots]].tolist()
    return sorted(drawn)


def remaining_examples(evaluator: Evaluator, taken: Sequence[int]) -> list[int]:
    """Return the indices that were not drawn."""
    gone = set(taken)
    left = [index for index in range(len(evaluator)) if index not in gone]
    if not left:
        raise DataError(
            f"{evaluator.batch_source.label}: every example was drawn for training,"
            " and none is left to test on",
            hint="give examples of their own for the test, or ask for fewer shots",
        )
    return left


def same_examples(one: EvaluationData, other: EvaluationData) -> bool:
    """Whether two references name the same examples: one source, one split."""

    def source(data: EvaluationData) -> object:
        if isinstance(data.reference, Dataset | Examples):
            return id(data.reference)
        path = Path(data.reference)
        return path.resolve() if exists(path) else str(data.reference)

    return one.split == other.split and source(one) == source(other)
