"""What a recipe needs, at either scale: bases, tasks, how A learns them, what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import cos, pi
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from experiments.pairs.training import Told
from transfusion.data.dataset import Dataset
from transfusion.evaluation.task import EvaluationData

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


class Bases(Protocol):
    """Where A and B come from."""

    def folder(self, which: str, seed: int) -> Path:
        """The folder of ``a`` or ``b``, which is made if it is not there."""

    def about(self) -> str:
        """In words."""


@dataclass(frozen=True)
class Task:
    """Something that A learns."""

    paper: str
    """The paper's name for the task, which is the column of its table."""
    name: str
    about: str
    schedule: Schedule

    @property
    def key(self) -> dict[str, Any]:
        """Everything that decides what is learned; the words do, too: they say which examples these are."""
        return {"task": self.name, "about": self.about, "schedule": vars(self.schedule)}


@dataclass(frozen=True)
class ImageTask(Task):
    """Images that A learns to tell apart by captions, and on which B is measured."""

    train: Callable[[], EvaluationData] = field(repr=False)
    test: Callable[[], EvaluationData] = field(repr=False)


@dataclass(frozen=True)
class TextTask(Task):
    """Texts that A learns to classify under a head of its own, which B gets as it is."""

    classes: int
    train: Callable[[], Dataset] = field(repr=False)
    test: Callable[[], Dataset] = field(repr=False)


@dataclass(frozen=True)
class Lmc:
    """For the barrier: two classifiers trained apart on CIFAR-10, and how much of it is measured."""

    about: str
    vit: dict[str, Any]
    epochs: int
    rate: float
    batch: int
    side: int
    """How large images are made, in pixels."""
    images: int
    """Test images that are measured."""
    points: int = 11


@dataclass(frozen=True)
class Scale:
    """All settings of one size."""

    name: str
    bases: Bases
    images: tuple[ImageTask, ...]
    support: Callable[[], EvaluationData] = field(repr=False)
    support_about: str
    texts: tuple[TextTask, ...]
    lmc: Lmc
    alphas: tuple[float, ...] = (0.01, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.25, 1.5, 1.75, 2.0)
    glance: int | None = None
    """Examples that are measured for every α; none for all."""
    shots: int = 10
    epochs: int = 40
    """Of learning α from the shots."""

    @property
    def tasks(self) -> dict[str, Task]:
        """All tasks, by the paper's names."""
        every: tuple[Task, ...] = (*self.images, *self.texts)
        return {task.paper: task for task in every}
