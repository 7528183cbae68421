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
from torch.utils._pytree import tree_map_only

from transfusion.runtime.processes import is_part
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.runtime.sharding import placed_like, whole_of

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
RATE_SHARE = 1 / 7
"""The learning rate that is expected to be best, as a share of the root mean square of the fine-tune's own
change."""
SLOWEST, FASTEST = 1e-6, 1e-3
"""Its bounds."""
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
Gradients = Callable[[int], float]
"""Adds the gradients of one step's loss to the parameters, and returns the loss."""


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


def rate_for(change: float) -> float:
    """Return the expected rate for whole models, from how far a fine-tune moved weights."""
    return min(FASTEST, max(SLOWEST, RATE_SHARE * change))


def find_rate(
    parameters: Parameters,
    gradients: Gradients,
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
                _descend(parameters, optimizer, gradients, TRIALS + step)
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
    gradients: Gradients,
    divergence: Callable[[], float],
    best_value: float,
    *,
    rate: float,
    steps: int,
    file: Path | None = None,
    saves: bool = True,
    about: Callable[[], str] = str,
    progress: Progress = SILENT,
) -> int:
    """Descend, leave the parameters where the divergence was least, and return that step.

    ``best_value`` is the divergence before the first step. Training ends after a
    fifth of the steps if nothing has improved, and sooner than planned if nothing improves any more. It
    resumes from the state in ``file``, which only a process that ``saves`` writes. ``about`` says more of the
    training, for the bar.
    """
    optimizer = torch.optim.Adam(parameters.values(), lr=rate)
    step = best_step = since = 0
    schedule = Schedule(rate, max(1, round(WARM_UP * steps)), steps)
    values, best = [best_value], copied(parameters)
    if file is not None and file.exists():
        state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        step, best_step, since, values = state["progress"]
        schedule = Schedule(*state["schedule"])
        _load(optimizer, state["optimizer"])
        put(best, state["best"])
        put(parameters, state["now"])
        progress.note(f"note: refinement goes on from step {step}")
    with progress.bar(steps, "refining") as advance:
        while step < schedule.last and (best_step or step < STUCK * steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            value = _descend(parameters, optimizer, gradients, step)
            step += 1
            advance(f"refining, loss {value:.3f}, {about()}", step, schedule.last)
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
            if file is not None and (saves or any(map(is_part, best.values()))):
                state = {"now": {name: one.detach() for name, one in parameters.items()}}
                state |= {"best": best, "optimizer": optimizer.state_dict()}
                state |= {"progress": (step, best_step, since, values), "schedule": tuple(schedule)}
                _save(state, file, saves)
    put(parameters, best)
    return best_step


def copied(parameters: Parameters) -> dict[str, Tensor]:
    """Return copies of the values of parameters."""
    return {name: one.detach().clone() for name, one in parameters.items()}


def put(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Put values into parameters, or into copies of them."""
    for name, tensor in into.items():
        tensor.data.copy_(placed_like(values[name].data, tensor))


def _save(state: Mapping[str, Any], file: Path, saves: bool) -> None:
    """Write the state of a training with whole tensors, if this process ``saves``; the others help."""
    whole = tree_map_only(Tensor, whole_of if saves else _asked_for, state)
    if saves:
        staged = file.with_suffix(".new")
        torch.save(whole, staged)
        os.replace(staged, file)


def _asked_for(tensor: Tensor) -> None:
    """Take part in gathering a tensor that another process keeps."""
    whole_of(tensor)


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore an optimizer from whole tensors."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for place, several in state["state"].items():
        for name, value in several.items():
            if value.shape == parameters[place].shape:
                several[name] = placed_like(value, parameters[place].detach())
    optimizer.load_state_dict(state)


def _descend(
    parameters: Parameters, optimizer: torch.optim.Optimizer, gradients: Gradients, step: int
) -> float:
    optimizer.zero_grad()
    value = gradients(step)
    nn.utils.clip_grad_norm_(parameters.values(), CLIP)
    optimizer.step()
    return value
