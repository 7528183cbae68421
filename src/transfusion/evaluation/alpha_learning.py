"""Learn one coefficient α for every layer from a few examples.

The model is B + Σ α_l·δ_l. The derivative of the loss by α_l is the sum of ⟨∂L/∂θ, δ⟩ over the tensors of
layer l, so ordinary backward passes are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import block_of
from transfusion.errors import MismatchError, SettingError
from transfusion.evaluation.alpha_line import AlphaLine
from transfusion.evaluation.evaluator import Evaluator
from transfusion.transport.alpha import Alpha

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

    def metadata(self) -> dict[str, Any]:
        """Return the settings for a file or another program."""
        return {"epochs": self.epochs, "rate": self.rate, "start": self.start}


def groups_of(line: AlphaLine) -> dict[str, list[str]]:
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
    line: AlphaLine, evaluator: Evaluator, alpha: Alpha, groups: Mapping[str, list[str]]
) -> tuple[float, Tensor]:
    """Return the mean loss at an α, and its derivatives by the coefficients of the groups."""
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
    line: AlphaLine,
    evaluator: Evaluator,
    schedule: LearningSchedule,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
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
        on_epoch(epoch, loss)
        optimizer.step()
        values.clamp_(min=0)
    return LearnedAlpha(tried[losses.index(min(losses))], tuple(losses))
