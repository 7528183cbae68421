"""Training that a demo does while you wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

Loss = Callable[[torch.Generator], Tensor]
"""The loss of a batch that it draws itself."""


class TrainingSchedule(NamedTuple):
    """How many steps, how fast at most, and how many examples a step."""

    steps: int
    rate: float
    batch: int = 64


def fit(parameters: Iterable[nn.Parameter], loss: Loss, schedule: TrainingSchedule, *, seed: int) -> None:
    """Follow a loss; parameters that are frozen stay."""
    generator = torch.Generator().manual_seed(seed)
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=schedule.rate, weight_decay=0.05)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.rate, schedule.steps, pct_start=0.15)
    for _ in range(schedule.steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss(generator))
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        rates.step()


def draw(count: int, schedule: TrainingSchedule, generator: torch.Generator) -> Tensor:
    """The numbers of a batch's examples, of so many."""
    return torch.randint(count, (schedule.batch,), generator=generator)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block torch computes in one thread: faster for models this small, and a seed gives the same
    numbers however many cores there are.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
