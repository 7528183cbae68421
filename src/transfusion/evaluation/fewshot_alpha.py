"""Few shots: one coefficient α for every layer, learned from a few examples (the paper's table)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.evaluation.alpha_learning import EPOCHS, RATE, START, LearnedAlpha, LearningSchedule, learn
from transfusion.evaluation.alpha_line import NAIVE, AlphaLine, AlphaLines
from transfusion.evaluation.alpha_sweep import alignments, labels_of
from transfusion.evaluation.evaluation_data import EvaluationData
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.model_comparison import Given
from transfusion.evaluation.scores import Score, gain
from transfusion.evaluation.shot_sampling import draw_shots, remaining_examples, same_examples
from transfusion.transportation.alpha import Alpha
from transfusion.transportation.task_vector import NewTokens
from transfusion.transportation.transport_plan import Base, Finetune

SHOTS = 10


@dataclass(frozen=True)
class FewShotCurve:
    """One line, with α = 1 and with what was learned."""

    label: str
    method: str | None
    """How π was found; none for τ as it is."""
    learned: LearnedAlpha
    before: Score
    """On the test, with α = 1."""
    after: Score
    """On the test, with the learned coefficients."""
    gains: tuple[float, float]
    """Of both, over B."""

    def metadata(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
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
    """What a few examples of every class are worth, on π(τ) and on τ."""

    finetuned: str
    base: str
    onto: str
    shots: int
    seed: int
    schedule: LearningSchedule
    training: dict[str, Any]
    """What was learned from: data, examples, and how the test was kept apart."""
    task: dict[str, Any]
    """What was measured: data, examples, question, metric."""
    zero: Score
    """B, with the fine-tune's head as it is where B has none of the kind."""
    curves: tuple[FewShotCurve, ...]
    notes: tuple[str, ...] = ()
    """What the user should know about how it was measured."""

    @property
    def moved(self) -> FewShotCurve:
        """What was learned on π(τ)."""
        return next(curve for curve in self.curves if curve.method is not None)

    @property
    def naive(self) -> FewShotCurve | None:
        """What was learned on τ, if it was asked for."""
        return next((curve for curve in self.curves if curve.method is None), None)

    @property
    def alpha(self) -> Alpha:
        """The coefficients for π(τ), which `transport` takes."""
        return self.moved.learned.alpha

    def metadata(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
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
    base: Base,
    onto: Base,
    data: Given,
    test: Given | None = None,
    via: Alignment | str | Path | None = None,
    shots: int = SHOTS,
    epochs: int = EPOCHS,
    rate: float = RATE,
    start: float = START,
    naive: bool = True,
    seed: int = 0,
    batch: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    trust_base: bool = False,
    new_tokens: NewTokens | str = NewTokens.REFUSE,
    on_epoch: Callable[[str, int, float], None] = lambda label, epoch, loss: None,
    **aligning: Any,
) -> FewShot:
    """Learn one α for every layer from a few examples of every class, on B + α·π(τ) and on B + α·τ.

    The examples are drawn from ``data`` by the seed, and both are measured on ``test``, with α = 1 and with
    what was learned. Without ``test``, or if it is the same, the test is what was not drawn. The result is
    what `transport` takes:

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
    schedule = LearningSchedule(epochs, rate, start)
    asked = EvaluationData.of(data)
    asked_test = asked if test is None else EvaluationData.of(test)
    lines = AlphaLines.of(
        finetuned,
        base,
        onto,
        data=asked,
        dtype=dtype,
        device=device,
        trust_base=trust_base,
        new_tokens=new_tokens,
    )
    whole = asked.evaluator(lines.reader, lines.live, dtype=dtype, batch=batch)
    places = draw_shots(whole, shots, seed)
    training = whole.chosen(places)
    same = same_examples(asked, asked_test)
    asked_test = replace(asked_test, limit=asked.limit) if same else asked_test
    testing = asked_test.evaluator(lines.reader, lines.live, dtype=dtype, batch=batch)
    testing = testing.chosen(remaining_examples(testing, places)) if same else testing
    apart = "the examples that were not drawn" if same else "other examples"
    zero = testing.measure()
    ways: list[Alignment | None] = [None] if naive else []
    ways += alignments(lines, via, aligning)
    curves = []
    for label, pi in zip(labels_of(ways, NAIVE), ways, strict=True):
        line = lines.along(pi)
        found = learn(line, training, schedule, partial(on_epoch, label))
        curves.append(_fitted(label, line, found, testing, zero))
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


def _fitted(label: str, line: AlphaLine, found: LearnedAlpha, test: Evaluator, zero: Score) -> FewShotCurve:
    scores = []
    for alpha in (Alpha(), found.alpha):
        with line.at(alpha):
            scores.append(test.measure())
    before, after = scores
    return FewShotCurve(label, line.method, found, before, after, (gain(before, zero), gain(after, zero)))
