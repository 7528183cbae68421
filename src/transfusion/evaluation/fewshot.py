"""One coefficient α for every layer, learned from a few examples (the paper's few-shot table).

The model is B + Σ α_l·δ_l. The derivative of the loss by α_l is the sum of ⟨∂L/∂θ, δ⟩ over the tensors of
layer l, so ordinary backward passes are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from os.path import exists
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import block_of
from transfusion.data.dataset import Dataset
from transfusion.data.examples import Examples
from transfusion.errors import DataError, MismatchError, SettingError, listing
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.line import (
    Line,
    Lines,
    line_inputs,
    open_lines,
)
from transfusion.evaluation.scores import Score, gain
from transfusion.evaluation.settings import FewShotSettings
from transfusion.evaluation.task import EvaluationData
from transfusion.files.publishing import publish_file, write_json
from transfusion.report.figures import draw_fewshot
from transfusion.report.result_files import ResultFiles, require_places
from transfusion.runtime.progress import Advance
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.settings import verb
from transfusion.transport.alpha import Alpha

SHOTS = 10
START, EPOCHS, RATE = 1.0, 40, 0.05
"""The initial coefficients, the passes over all examples, and the learning rate of Adam."""
OUTSIDE = "default"
"""The key of tensors outside of all blocks."""
_DIGITS = 6
"""Decimal places of a coefficient."""


@dataclass(frozen=True)
class LearnedAlpha:
    """Learned coefficients, and the losses on the way."""

    alpha: Alpha
    losses: tuple[float, ...]
    """The loss on the shots, before the first step and after each."""

    @property
    def coefficients(self) -> dict[str, float]:
        """The coefficients by pattern, as in a file of α."""
        return {OUTSIDE: self.alpha.default, **self.alpha.patterns}


@dataclass(frozen=True)
class LearningSchedule:
    """Settings of the optimisation."""

    epochs: int = EPOCHS
    rate: float = RATE
    start: float = START

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise SettingError(f"epochs = {self.epochs}: nothing would be learned", hint="give 1 or more")
        if not 0 < self.rate < float("inf"):
            raise SettingError(f"rate = {self.rate}: it must be above 0", hint="0.05 is usual")
        Alpha(self.start)


@dataclass(frozen=True)
class FewShotCurve:
    """One line, with α = 1 and with the learned coefficients."""

    label: str
    method: str | None
    """The method of π; None for τ as it is."""
    learned: LearnedAlpha
    before: Score
    """The score on the test with α = 1."""
    after: Score
    """The score on the test with the learned coefficients."""
    gains: tuple[float, float]
    """The gains of both over B."""

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        return {
            "label": self.label,
            "method": self.method,
            "coefficients": self.learned.coefficients,
            "losses": list(self.learned.losses),
            "plain": self.before.metadata(),
            "learned": self.after.metadata(),
            "gain": {"plain": self.gains[0], "learned": self.gains[1]},
        }


@dataclass(frozen=True)
class FewShot:
    """Coefficients learned on π(τ) and on τ, and their scores."""

    finetuned: str
    base: str
    onto: str
    shots: int
    seed: int
    schedule: LearningSchedule
    training: dict[str, Any]
    """The training data: source, examples, and how the test was kept apart."""
    task: dict[str, Any]
    """The test: data, examples, question, metric."""
    zero: Score
    """The score of B, with the fine-tune's task head, unmoved, if B has none of that kind."""
    curves: tuple[FewShotCurve, ...]
    notes: tuple[str, ...] = ()
    """Notes for the user on how it was measured."""
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The result as it is written to files, with the record of its run."""

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
        return self.moved.learned.alpha

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        return {
            "finetuned": self.finetuned,
            "base": self.base,
            "onto": self.onto,
            "shots": self.shots,
            "seed": self.seed,
            **asdict(self.schedule),
            "training": self.training,
            "task": self.task,
            "zero": self.zero.metadata(),
            "curves": [curve.metadata() for curve in self.curves],
        }


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
    record = RunRecord("fewshot")
    schedule = LearningSchedule(settings.epochs, settings.rate, settings.start)
    output, naive_output, force = settings.output, settings.naive_output, settings.force
    if naive_output is not None and not settings.naive:
        raise SettingError(
            "`naive_output` needs the coefficients that `naive=False` leaves out",
            hint="leave out one of them",
        )
    asked, asked_test = settings.task, settings.tested
    read = (*line_inputs(settings), *asked.files, *asked_test.files)
    files = ResultFiles.checked(settings.results, force=force, inputs=read, draw=draw_fewshot)
    learned = [Path(path) for path in (output, naive_output) if path is not None]
    require_places([*learned, *files.paths], read, force=force)
    with settings.resources.in_process():
        lines = open_lines(settings)
        passes = (settings.epochs + 1) * (1 + settings.naive)
        with settings.progress.bar(passes, "building the models") as advance:
            result = _fewshot(lines, schedule, asked, asked_test, settings, advance)
    for note in result.notes:
        settings.progress.warn(note)
    for path, curve in ((output, result.moved), (naive_output, result.naive)):
        if path is not None and curve is not None:
            write = partial(write_json, value=curve.learned.coefficients)
            publish_file(Path(path), write, force=force)
    return files.finish(result, record)


def _fewshot(
    lines: Lines,
    schedule: LearningSchedule,
    asked: EvaluationData,
    asked_test: EvaluationData,
    settings: FewShotSettings,
    advance: Advance,
) -> FewShot:
    """Draw the examples, learn the coefficients of every line, and measure them."""
    shots, seed, batch = settings.shots, settings.seed, settings.batch
    whole = asked.evaluator(lines.input_model, lines.live, batch=batch)
    indices = draw_shots(whole, shots, seed)
    training = whole.chosen(indices)
    same = same_examples(asked, asked_test)
    asked_test = replace(asked_test, limit=asked.limit) if same else asked_test
    testing = asked_test.evaluator(lines.input_model, lines.live, batch=batch)
    testing = testing.chosen(remaining_examples(testing, indices)) if same else testing
    zero = testing.measure()
    curves: list[FewShotCurve] = []
    for label, line in lines.each():
        found = learn(line, training, schedule, lambda text, label=label: advance(f"{label} · {text}"))  # type: ignore[misc]
        scores: list[Score] = []
        for alpha in (Alpha(), found.alpha):
            with line.at(alpha):
                scores.append(testing.measure())
        gains = gain(scores[0], zero), gain(scores[1], zero)
        curves.append(FewShotCurve(label, line.method, found, scores[0], scores[1], gains))
    info = {
        "data": training.batch_source.label,
        "examples": len(training),
        "of": len(whole),
        "test": "the examples that were not drawn" if same else "other examples",
    }
    return FewShot(
        lines.label,
        lines.a.label,
        lines.b.label,
        shots,
        seed,
        schedule,
        info,
        testing.metadata(),
        zero,
        tuple(curves),
        tuple(dict.fromkeys((*training.notes, *testing.notes))),
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


def alpha_of(coefficients: Mapping[str, float]) -> Alpha:
    """Return α with one coefficient for each pattern."""
    rest = {pattern: value for pattern, value in coefficients.items() if pattern != OUTSIDE}
    return Alpha(coefficients.get(OUTSIDE, START), rest)


def derivatives(
    line: Line, evaluator: Evaluator, alpha: Alpha, groups: Mapping[str, list[str]]
) -> tuple[float, Tensor]:
    """Return the mean loss at an α, and its derivatives by the coefficients of the groups.

    ∂L/∂α_l = Σ ⟨∂L/∂θ, δ⟩ over the parameters θ of layer l, with δ = end − start.
    """
    names = [name for group in groups.values() for name in group]
    parameters = [line.live.module.get_parameter(name) for name in names]
    each = dict.fromkeys(names, 0.0)
    total, count = 0.0, 0
    with line.at(alpha), _only(line.live.module, parameters):
        for loss, answers in evaluator.sums():
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            total, count = total + float(loss.detach()), count + answers
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    change = line.end[name] - line.start[name]
                    each[name] += float((gradient * change).sum(dtype=torch.float64))
    sums = [sum(each[name] for name in group) / count for group in groups.values()]
    return total / count, torch.tensor(sums, dtype=torch.float64)


@contextmanager
def _only(module: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within the block, compute gradients of these parameters only."""
    wanted = {id(parameter) for parameter in parameters}
    before = {parameter: parameter.requires_grad for parameter in module.parameters()}
    try:
        for parameter in before:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, asked in before.items():
            parameter.requires_grad_(asked)


def learn(
    line: Line,
    evaluator: Evaluator,
    schedule: LearningSchedule,
    advance: Callable[[str], None] = lambda text: None,
) -> LearnedAlpha:
    """Minimise the loss with Adam, all examples at every step; keep the coefficients with the least loss."""
    groups = groups_of(line)
    values = torch.full((len(groups),), schedule.start, dtype=torch.float64)
    optimizer = torch.optim.Adam([values], lr=schedule.rate)
    losses: list[float] = []
    tried: list[Alpha] = []
    for epoch in range(schedule.epochs + 1):
        rounded = [round(value, _DIGITS) for value in values.tolist()]
        tried.append(alpha_of(dict(zip(groups, rounded, strict=True))))
        loss, values.grad = derivatives(line, evaluator, tried[-1], groups)
        losses.append(loss)
        advance(f"epoch {epoch} · loss {loss:.4g}")
        optimizer.step()
        values.clamp_(min=0)
    return LearnedAlpha(tried[losses.index(min(losses))], tuple(losses))


# ── drawing the shots ────────────────────────────────────────────────────────────────────────


def draw_shots(evaluator: Evaluator, shots: int, seed: int) -> list[int]:
    """Return the indices of ``shots`` examples of every class; without classes, of ``shots`` texts."""
    if shots < 1:
        raise SettingError(f"shots = {shots}: nothing to learn from", hint="give 1 or more")
    if seed < 0:
        raise SettingError(f"seed = {seed}: a seed cannot be negative", hint="give 0 or more")
    generator = torch.Generator().manual_seed(seed)
    labels = evaluator.labels
    if labels is None:
        return _of_texts(evaluator, shots, generator)
    classes = evaluator.scorer.classes or int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=classes)
    _require_enough(evaluator.batch_source.label, counts, shots)
    return sorted(index for one in range(classes) for index in _draw(labels == one, shots, generator))


def _draw(of: Tensor, count: int, generator: torch.Generator) -> list[int]:
    indices = of.nonzero().flatten()
    chosen: list[int] = indices[torch.randperm(len(indices), generator=generator)[:count]].tolist()
    return chosen


def _of_texts(evaluator: Evaluator, shots: int, generator: torch.Generator) -> list[int]:
    if len(evaluator) < shots:
        raise DataError(
            f"{evaluator.batch_source.label}: {shots} shots were asked for, and there are"
            f" {len(evaluator)} examples",
            hint=f"ask for {len(evaluator)} or fewer, or give more examples",
        )
    return sorted(_draw(torch.ones(len(evaluator), dtype=torch.bool), shots, generator))


def _require_enough(label: str, counts: Tensor, shots: int) -> None:
    fewer = [f"{number} ({int(count)})" for number, count in enumerate(counts) if count < shots]
    if fewer:
        raise DataError(
            f"{label}: {shots} shots of every class were asked for, and there are fewer of"
            f" {'class' if len(fewer) == 1 else 'classes'} {listing(fewer)}",
            hint=f"ask for {int(counts.min())} or fewer, or give more examples"
            if int(counts.min())
            else "give examples of every class of the model",
        )


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
    return one.split == other.split and _source(one) == _source(other)


def _source(data: EvaluationData) -> object:
    if isinstance(data.reference, Dataset | Examples):
        return id(data.reference)
    path = Path(data.reference)
    return path.resolve() if exists(path) else str(data.reference)
