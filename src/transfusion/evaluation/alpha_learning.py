"""Learning α: one coefficient for every layer, from a few examples.

The model is B + Σ α_l·δ_l, so the slope of the loss along α_l is the sum of ⟨∂L/∂θ, δ⟩ over the tensors of
the layer: ordinary backward passes of the model as it is, and one number for each layer out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.errors import MismatchError, SettingError
from transfusion.evaluation.alpha_line import AlphaLine
from transfusion.evaluation.evaluator import Evaluator
from transfusion.transportation.alpha import Alpha, layer_of

START, EPOCHS, RATE = 1.0, 40, 0.05
"""Where the coefficients begin, how often all examples are looked at, and how far Adam goes at a time."""
OUTSIDE = "default"
"""In the place of a pattern: tensors outside all blocks."""
_DIGITS = 6
"""Of a coefficient, in a file."""


@dataclass(frozen=True)
class LearnedAlpha:
    """Coefficients, and the way to them."""

    alpha: Alpha
    losses: tuple[float, ...]
    """On the shots, before the first step and after each."""

    @property
    def coefficients(self) -> dict[str, float]:
        """By pattern, as a file of α has them."""
        return {OUTSIDE: self.alpha.default, **self.alpha.patterns}


@dataclass(frozen=True)
class LearningSchedule:
    """How to learn."""

    epochs: int = EPOCHS
    rate: float = RATE
    start: float = START

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise SettingError(f"epochs = {self.epochs}: nothing would be learned", hint="give 1 or more")
        if not 0 < self.rate < float("inf"):
            raise SettingError(f"rate = {self.rate}: it must be above 0", hint="0.05 is usual")
        Alpha(self.start)

    def metadata(self) -> dict[str, Any]:
        """For a file or another program."""
        return {"epochs": self.epochs, "rate": self.rate, "start": self.start}


def groups_of(line: AlphaLine) -> dict[str, list[str]]:
    """The parameters of every layer that changes, by the pattern that an α file has for it."""
    groups: dict[str, list[str]] = {}
    for name in line.moved():
        layer = layer_of(line.names[name])
        groups.setdefault(f"{layer}.*" if layer else OUTSIDE, []).append(name)
    if not groups:
        raise MismatchError(
            "the fine-tune changes nothing of B, so no coefficient can be learned",
            hint="was the base given twice?",
        )
    return groups


def alpha_of(coefficients: Mapping[str, float]) -> Alpha:
    """α from one coefficient for each pattern."""
    rest = {pattern: value for pattern, value in coefficients.items() if pattern != OUTSIDE}
    return Alpha(coefficients.get(OUTSIDE, START), rest)


def slopes(
    line: AlphaLine, evaluator: Evaluator, alpha: Alpha, groups: Mapping[str, list[str]]
) -> tuple[float, Tensor]:
    """The mean loss at some α, and how it changes with the coefficient of every group."""
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
    """Within the block, gradients flow to these parameters and to no others, which saves their work."""
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
    line: AlphaLine,
    evaluator: Evaluator,
    schedule: LearningSchedule,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
) -> LearnedAlpha:
    """Adam on the coefficients, with all examples at every step; those with the least loss are kept."""
    groups = groups_of(line)
    values = torch.full((len(groups),), schedule.start, dtype=torch.float64)
    optimizer = torch.optim.Adam([values], lr=schedule.rate)
    losses: list[float] = []
    tried: list[Alpha] = []
    for epoch in range(schedule.epochs + 1):
        rounded = [round(value, _DIGITS) for value in values.tolist()]
        tried.append(alpha_of(dict(zip(groups, rounded, strict=True))))
        loss, values.grad = slopes(line, evaluator, tried[-1], groups)
        losses.append(loss)
        on_epoch(epoch, loss)
        optimizer.step()
        values.clamp_(min=0)
    return LearnedAlpha(tried[losses.index(min(losses))], tuple(losses))
