"""One coefficient α for every layer, learned from a few examples (the paper's few-shot table)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.rectangular import AnyAlignment
from transfusion.errors import SettingError
from transfusion.evaluation.adapted_model import named_base
from transfusion.evaluation.alpha_learning import EPOCHS, RATE, START, LearnedAlpha, LearningSchedule, learn
from transfusion.evaluation.alpha_line import NAIVE, AlphaLine, AlphaLines
from transfusion.evaluation.alpha_sweep import aligning_for, alignments, given_alignments, labels_of
from transfusion.evaluation.evaluation_data import EvaluationData
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.model_comparison import DataReference
from transfusion.evaluation.scores import Score, gain
from transfusion.evaluation.shot_sampling import draw_shots, remaining_examples, same_examples
from transfusion.files.publishing import publish_file, write_json
from transfusion.model.bases import ConfigArgument, open_bases
from transfusion.report.charts.result_figures import draw_fewshot
from transfusion.report.result_files import Paths, ResultFiles, require_places
from transfusion.runtime.devices import as_precision
from transfusion.runtime.progress import SILENT, Advance, Progress
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.run_record import RunRecord
from transfusion.transport.alpha import Alpha
from transfusion.transport.finetunes import Finetune, open_finetune
from transfusion.transport.task_vector import NewTokens
from transfusion.transport.transport_plan import Base

SHOTS = 10


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
            **self.schedule.metadata(),
            "training": self.training,
            "task": self.task,
            "zero": self.zero.metadata(),
            "curves": [curve.metadata() for curve in self.curves],
        }


def fewshot(
    finetuned: Finetune,
    *,
    base: Base | None = None,
    onto: Base,
    data: DataReference,
    test: DataReference | None = None,
    via: AnyAlignment | str | Path | None = None,
    shots: int = SHOTS,
    epochs: int = EPOCHS,
    rate: float = RATE,
    start: float = START,
    naive: bool = True,
    seed: int = 0,
    batch: int | None = None,
    dtype: torch.dtype | str = torch.float32,
    trust_base: bool = False,
    new_tokens: NewTokens | str = NewTokens.REFUSE,
    vocabulary_share: float | None = None,
    calibrate: str | Path | None = None,
    config: ConfigArgument = None,
    output: str | Path | None = None,
    naive_output: str | Path | None = None,
    results: Paths = None,
    force: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
    **aligning: Any,
) -> FewShot:
    """Learn one α for every layer from a few examples of every class, for ``transport(alpha=...)``.

    The coefficients of B + α·π(τ) and, with ``naive``, of B + α·τ are learned, and both models are measured
    with α = 1 and with the learned coefficients.

    ``finetuned`` is the fine-tune of A: a model, or a PEFT adapter.
    ``base`` is A, the base that was fine-tuned; the default is the folder that an adapter's configuration
    names. ``onto`` is B, the new release.
    ``data`` are the examples to draw from; ``test`` are those to measure on, by default the ones that were
    not drawn. Each is a path, a hub id, examples in memory, or an `EvaluationData` that says more.
    ``via`` is π, or its file; without it, A and B are aligned first, with ``seed``, ``calibrate`` and
    ``aligning`` passed on to `align`.
    ``shots`` is the number of examples of every class, ``epochs`` the number of passes over them, ``rate``
    the step size of Adam, ``start`` the first value of every coefficient, ``seed`` that of the draw.
    ``batch`` is the number of examples at a time, ``dtype`` the type to compute in.
    ``trust_base``, ``new_tokens``, ``vocabulary_share`` and ``config`` are those of `transport`.
    ``output`` is the file of coefficients of π(τ), ``naive_output`` that of τ; ``results`` are files for all
    that was measured: a figure (.png, .svg, .pdf) or .json. With ``force``, existing files are replaced.
    ``resources`` are threads and device; ``progress`` follows the run.

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
    record, dtype = RunRecord("fewshot"), as_precision(dtype)
    schedule = LearningSchedule(epochs, rate, start)
    if naive_output is not None and not naive:
        raise SettingError(
            "`naive_output` needs the coefficients that `naive=False` leaves out",
            hint="leave out one of them",
        )
    base = named_base(finetuned) if base is None else base
    asked = EvaluationData.of(data)
    asked_test = asked if test is None else EvaluationData.of(test)
    paths = given_alignments(via)
    aligning = aligning_for(paths, calibrate, aligning)
    read = (finetuned, base, onto, *asked.files, *asked_test.files, *paths)
    files = ResultFiles.checked(results, force=force, inputs=read, draw=draw_fewshot)
    learned = [Path(path) for path in (output, naive_output) if path is not None]
    require_places([*learned, *files.paths], read, force=force)
    a, b = open_bases(base, onto, config, progress, vocabulary_share)
    tuned = open_finetune(finetuned, a, b, config, progress, trust_base=trust_base)
    with resources.in_process():
        lines = AlphaLines.of(
            tuned,
            a,
            b,
            data=asked,
            dtype=dtype,
            device=resources.device,
            trust_base=trust_base,
            new_tokens=new_tokens,
        )
        found = alignments(a, b, paths, {**aligning, "seed": seed}, resources, progress)
        ways: list[Alignment | None] = [*([None] if naive else []), *found]
        with progress.bar((epochs + 1) * (1 + naive), "building the models") as advance:
            result = _learn(lines, schedule, asked, asked_test, ways, shots, seed, batch, dtype, advance)
    for note in result.notes:
        progress.warn(note)
    for path, curve in ((output, result.moved), (naive_output, result.naive)):
        if path is not None and curve is not None:
            write = partial(write_json, value=curve.learned.coefficients)
            publish_file(Path(path), write, force=force)
    return files.finish(result, record)


def _learn(
    lines: AlphaLines,
    schedule: LearningSchedule,
    asked: EvaluationData,
    asked_test: EvaluationData,
    ways: Sequence[Alignment | None],
    shots: int,
    seed: int,
    batch: int | None,
    dtype: torch.dtype,
    advance: Advance,
) -> FewShot:
    """Draw the examples, learn the coefficients of every alignment, and measure them."""

    def on_epoch(label: str, epoch: int, loss: float) -> None:
        advance(f"{label} · epoch {epoch} · loss {loss:.4g}")

    whole = asked.evaluator(lines.input_model, lines.live, dtype=dtype, batch=batch)
    indices = draw_shots(whole, shots, seed)
    training = whole.chosen(indices)
    same = same_examples(asked, asked_test)
    asked_test = replace(asked_test, limit=asked.limit) if same else asked_test
    testing = asked_test.evaluator(lines.input_model, lines.live, dtype=dtype, batch=batch)
    testing = testing.chosen(remaining_examples(testing, indices)) if same else testing
    apart = "the examples that were not drawn" if same else "other examples"
    zero = testing.measure()
    curves = []
    for label, pi in zip(labels_of(ways, NAIVE), ways, strict=True):
        line = lines.along(pi)
        found = learn(line, training, schedule, partial(on_epoch, label))
        curves.append(_curve(label, line, found, testing, zero))
    info = {"data": training.batch_source.label, "examples": len(training), "of": len(whole), "test": apart}
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


def _curve(label: str, line: AlphaLine, found: LearnedAlpha, test: Evaluator, zero: Score) -> FewShotCurve:
    scores = []
    for alpha in (Alpha(), found.alpha):
        with line.at(alpha):
            scores.append(test.measure())
    before, after = scores
    return FewShotCurve(label, line.method, found, before, after, (gain(before, zero), gain(after, zero)))
