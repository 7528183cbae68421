"""The training loop of the demos."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from transfusion.runtime.progress import phase

Loss = Callable[[torch.Generator], Tensor]
"""Draws a batch with the generator and returns its loss."""


class TrainingSchedule(NamedTuple):
    """The number of steps, the highest learning rate and the batch size."""

    steps: int
    rate: float
    batch: int = 64


def fit(parameters: Iterable[nn.Parameter], loss: Loss, schedule: TrainingSchedule, *, seed: int) -> None:
    """Minimise a loss by AdamW with one cycle of the learning rate; frozen parameters stay."""
    generator = torch.Generator().manual_seed(seed)
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=schedule.rate, weight_decay=0.05)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.rate, schedule.steps, pct_start=0.15)
    with phase("training", schedule.steps) as advance:
        for _ in range(schedule.steps):
            optimizer.zero_grad()
            torch.autograd.backward(loss(generator))
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            rates.step()
            advance("training")


def draw(count: int, schedule: TrainingSchedule, generator: torch.Generator) -> Tensor:
    """Draw the indices of a batch from ``count`` examples."""
    return torch.randint(count, (schedule.batch,), generator=generator)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread within the block.

    For models this small that is faster, and a seed gives the same numbers on any number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
