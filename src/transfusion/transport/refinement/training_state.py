"""The state of a training: parameters, Adam's moments, and the best parameters so far.

A state can be saved and loaded again, and the steps after that are the same bit for bit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from transfusion.files.publishing import write_tensors

WARM_UP = 0.15
"""The share of the steps in which the learning rate rises."""
CLIP = 1.0
"""The largest norm of a gradient."""
PATIENCE = 6
"""The number of checks without an improvement after which a training is settled."""
_NOW, _BEST, _FIRST, _SECOND = "now/", "best/", "first/", "second/"


@dataclass
class TrainingState:
    """Trainable parameters on their way."""

    parameters: Mapping[str, nn.Parameter]
    rate: float
    steps: int
    best_value: float
    """The smallest divergence on held-out inputs."""
    best_step: int = 0
    step: int = 0
    checks_since: int = 0
    """The number of checks since the best one."""
    best: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.best = self._copied()
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=self.rate)

    @property
    def settled(self) -> bool:
        """Whether further steps have stopped to help."""
        return self.checks_since >= PATIENCE

    def descend(self, loss: Tensor) -> None:
        """Take one step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * _share_of_rate((self.step + 1) / (self.steps + 1))
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
        self.optimizer.step()
        self.step += 1

    def check(self, value: float) -> None:
        """Compare a held-out divergence with the best one, and remember the better state."""
        if value < self.best_value:
            self.best_value, self.best_step, self.best = value, self.step, self._copied()
            self.checks_since = 0
        else:
            self.checks_since += 1

    def restore(self) -> None:
        """Go back to the best parameters."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.best[name])

    def _copied(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.parameters.items()}

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def save(self, file: Path) -> None:
        """Write everything that the next step depends on."""
        moments = {name: self.optimizer.state[one] for name, one in self.parameters.items()}
        tensors = {
            **{_NOW + name: one.detach() for name, one in self.parameters.items()},
            **{_BEST + name: one for name, one in self.best.items()},
            **{_FIRST + name: one["exp_avg"] for name, one in moments.items() if one},
            **{_SECOND + name: one["exp_avg_sq"] for name, one in moments.items() if one},
        }
        numbers = {
            "step": self.step,
            "best_step": self.best_step,
            "best_value": self.best_value,
            "checks_since": self.checks_since,
        }
        staged = file.with_suffix(".new")
        held = {name: one.cpu().contiguous() for name, one in tensors.items()}
        write_tensors(staged, held, {"state": json.dumps(numbers)})
        os.replace(staged, file)

    def load(self, file: Path) -> bool:
        """Go on from a file that `save` has written; return whether there is one."""
        if not file.exists():
            return False
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            numbers = json.loads((opened.metadata() or {})["state"])
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[_NOW + name])
            self.best[name].copy_(tensors[_BEST + name])
            if _FIRST + name in tensors:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(numbers["step"])),
                    "exp_avg": tensors[_FIRST + name].to(parameter),
                    "exp_avg_sq": tensors[_SECOND + name].to(parameter),
                }
        self.step, self.best_step = numbers["step"], numbers["best_step"]
        self.best_value, self.checks_since = numbers["best_value"], numbers["checks_since"]
        return True


def _share_of_rate(done: float) -> float:
    """Return the learning rate when this share of the steps is done: it rises, then falls, along cosines."""
    part = done / WARM_UP if done < WARM_UP else (1 - done) / (1 - WARM_UP)
    return (1 - math.cos(math.pi * part)) / 2
