"""The loop: Adam descends on a loss and keeps the state whose answers to held-out inputs are best.

A short trial guards the learning rate. It rises, and falls along a cosine, sooner if nothing improves
any more. The state is kept in a file at every check, and the steps after that are the same bit for bit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transfusion.runtime.progress import SILENT, Progress, phase

WARM_UP = 0.1
"""The share of the steps in which the learning rate rises."""
CLIP = 1.0
"""The largest norm of a gradient."""
CHECKS = 20
"""How often the answers to held-out inputs are checked."""
STUCK = 0.2
"""The share of the steps after which a training ends if nothing has improved; half of it is the warm-up."""
LATER = 0.05
"""By how much farther away a later state may be than the best one, and is taken nevertheless."""
RECENT = 8
"""Half of the remaining steps are left out if so many checks in a row were not the best so far."""
TRIED, STRIDE = 4, 4.0
"""How many learning rates are tried at most, and the factor between them."""
THROWN_OFF, NOTHING = 2.0, 1e-4
"""A rate is too high if the answers are farther away than before by this factor, and by this much."""
UNMOVED = 0.01
"""It is too low if they come nearer or go away by less than this share."""
TRIAL_SHARE, LEAST_TRIAL, MOST_TRIAL = 1 / 20, 8, 16
"""The steps of such a trial, as a share of all steps, and their bounds."""
TRIALS = 500_000
"""The number of the first step of a trial: no other step draws its inputs."""

Parameters = Mapping[str, nn.Parameter]


class Schedule(NamedTuple):
    """The learning rate of every step: it rises from nothing, and falls to nothing."""

    highest: float
    top: int
    """The step from which on it falls."""
    last: int

    def rate(self, step: int) -> float:
        """Return the rate of a step."""
        if step < self.top:
            return self.highest * (step + 1) / (self.top + 1)
        return self.highest * (1 + math.cos(math.pi * (step - self.top) / max(1, self.last - self.top))) / 2

    def shortened(self, step: int) -> Schedule:
        """Return a schedule that falls from the rate of this step on, twice as fast."""
        return Schedule(self.rate(step), step, step + max(1, (self.last - step) // 2))


def find_rate(
    parameters: Parameters,
    loss: Callable[[int], Tensor],
    divergence: Callable[[], float],
    before: float,
    expected: float,
    steps: int,
) -> tuple[float, float]:
    """Return a learning rate that neither throws the answers off within a few steps nor leaves them as they
    are, and the seconds of a step. Parameters stay; ``before`` is their divergence.

    The rate whose answers come nearest in so few steps would be too low for a whole training.
    """
    count = round(min(MOST_TRIAL, max(LEAST_TRIAL, TRIAL_SHARE * steps)))
    start, rate, lowered, taken = copied(parameters), expected, False, 0
    began = time.monotonic()
    with phase("trying the learning rate") as advance:
        for _ in range(TRIED):
            optimizer = torch.optim.Adam(parameters.values())
            schedule = Schedule(rate, count // 4, count)
            for step in range(count):
                optimizer.param_groups[0]["lr"] = schedule.rate(step)
                _descend(parameters, optimizer, loss(TRIALS + step))
                advance("steps to try the learning rate")
            after, taken = divergence(), taken + count
            put(parameters, start)
            if not after <= THROWN_OFF * before + NOTHING:
                rate, lowered = rate / STRIDE, True
            elif abs(after - before) < UNMOVED * before and not lowered:
                rate *= STRIDE
            else:
                break
    return rate, (time.monotonic() - began) / taken


def train(
    parameters: Parameters,
    loss: Callable[[int], Tensor],
    divergence: Callable[[], float],
    best_value: float,
    *,
    rate: float,
    steps: int,
    file: Path | None = None,
    progress: Progress = SILENT,
) -> int:
    """Descend on ``loss(step)``, leave the parameters where the divergence was least; return that step.

    ``best_value`` is the divergence before the first step. Training ends after a
    fifth of the steps if nothing has improved, and sooner than planned if nothing improves any more. It
    resumes from the state in ``file``.
    """
    optimizer = torch.optim.Adam(parameters.values(), lr=rate)
    step = best_step = since = 0
    schedule = Schedule(rate, max(1, round(WARM_UP * steps)), steps)
    values, best = [best_value], copied(parameters)
    if file is not None and file.exists():
        state: dict[str, Any] = torch.load(file, weights_only=True)
        step, best_step, since, values = state["progress"]
        schedule = Schedule(*state["schedule"])
        best = state["best"]
        optimizer.load_state_dict(state["optimizer"])
        put(parameters, state["now"])
        progress.note(f"note: refinement goes on from step {step}")
    with progress.bar(steps, "refining") as advance:
        while step < schedule.last and (best_step or step < STUCK * steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            value = loss(step)
            _descend(parameters, optimizer, value)
            step += 1
            advance(f"refining, loss {float(value.detach()):.3f}", step, schedule.last)
            if step % max(1, steps // CHECKS) and step < schedule.last:
                continue
            # at a lower rate, a state is better than one that was lucky at a high rate
            if (found := divergence()) < min(values) * (1 + LATER if best_step else 1):
                best_step = step
                put(best, parameters)
            values.append(found)
            stays = len(values) - since > RECENT and min(values[-RECENT:]) > min(values)
            if stays and step < schedule.last:
                schedule, since = schedule.shortened(step), len(values)
            if file is not None:
                now = {name: one.detach() for name, one in parameters.items()}
                state = {"now": now, "best": best, "optimizer": optimizer.state_dict()}
                state |= {"progress": (step, best_step, since, values), "schedule": tuple(schedule)}
                staged = file.with_suffix(".new")
                torch.save(state, staged)
                os.replace(staged, file)
    put(parameters, best)
    return best_step


def copied(parameters: Parameters) -> dict[str, Tensor]:
    """Return copies of the values of parameters."""
    return {name: one.detach().clone() for name, one in parameters.items()}


def put(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Put values into parameters, or into copies of them."""
    for name, tensor in into.items():
        tensor.data.copy_(values[name].data)


def _descend(parameters: Parameters, optimizer: torch.optim.Optimizer, value: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(value)
    nn.utils.clip_grad_norm_(parameters.values(), CLIP)
    optimizer.step()
