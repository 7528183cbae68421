"""One loop for everything that is trained here: AdamW, a warm-up, then half a cosine down to nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor, nn

from experiments.pairs.training import Told

Loss = Callable[[torch.Generator], Tensor]


@dataclass(frozen=True)
class Schedule:
    """How long, how fast, and how many examples at a time."""

    steps: int
    rate: float
    batch: int = 128
    warm: float = 0.1
    """The part of the steps in which the rate rises."""
    decay: float = 0.1

    def share(self, step: int) -> float:
        """Of the rate, after so many steps."""
        warm = max(1, round(self.warm * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + cos(pi * (step - warm) / max(1, self.steps - warm)))


def follow(
    parameters: Iterable[nn.Parameter], loss: Loss, schedule: Schedule, *, seed: int, name: str
) -> float:
    """Follow a loss that draws its own examples; the mean of its last tenth is given back."""
    generator = torch.Generator().manual_seed(seed)
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=schedule.rate, weight_decay=schedule.decay, fused=True)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.share)
    told, recent = Told(name, schedule.steps), list[float]()
    for step in range(1, schedule.steps + 1):
        value = loss(generator)
        optimizer.zero_grad()
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        rates.step()
        recent.append(float(value.detach()))
        recent = recent[-max(1, schedule.steps // 10) :]
        told.step(step, recent[-1])
    return sum(recent) / len(recent)
