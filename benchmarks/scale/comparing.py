"""What runs are compared with: the floor, the estimate of `transfusion plan`, and each other."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scale.models import Size
from scale.watching import Run
from transfusion.matching.blocks import blocks
from transfusion.matching.methods import preset
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.runtime.machine import Machine
from transfusion.transport.estimate import assignments_of, plan, products_of


@dataclass(frozen=True)
class Floor:
    """The least that a sweep can take: all products and all assignments once, at this machine's speed."""

    operations: float
    speed: float
    """Operations in a second, of products in float32 on all cores."""
    assignments: float
    """Seconds of all assignments, divided by the cores."""

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.operations / self.speed + self.assignments

    def as_dict(self) -> dict[str, float]:
        """As plain data."""
        return {**asdict(self), "seconds": self.seconds}


def floor(a: Path, b: Path, size: Size, machine: Machine, threads: int) -> Floor:
    """Return the floor of a sweep that visits every block."""
    method = preset("guarded")
    weights = WeightPair(*(Model.open(place).under(method.policy) for place in (a, b)))
    found = blocks(weights, method)
    operations = sum(products_of(weights, block) for block in found)
    assigned = sum(assignments_of(weights, block) for block in found) / machine.operations_per_second
    return Floor(operations, _speed(size, threads), assigned / threads)


def _speed(size: Size, threads: int) -> float:
    """Return the operations per second of the best of three products as large as those of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    left, right = torch.randn(size.ffn, size.width), torch.randn(size.ffn, size.width)
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        left @ right.T
        taken.append(time.perf_counter() - begun)
    torch.set_num_threads(before)
    return 2 * size.ffn**2 * size.width / min(taken)


def predicted(run: Run, machine: Machine) -> dict[str, Any]:
    """Return the estimate of a run on threads: the seconds that pass, those of one core, and the memory."""
    task = run.task
    asked: dict[str, Any] = {"machine": machine, "sweeps": max(1, run.sweeps), "memory": task.memory}
    both = [plan(task.a, task.b, cores=cores, **asked) for cores in (task.jobs, 1)]
    seconds, busy = ({phase.name: phase.seconds for phase in each.phases} for each in both)
    return {"seconds": seconds, "busy": busy, "memory": both[0].memory["total"]}


def in_phases(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a run by the phases of an estimate."""
    names = {"opening": "", "sweep 1": "first sweep", "advice": "advice"}
    total: dict[str, float] = {}
    for name, seconds in measured.items():
        other = "later sweeps" if name.startswith("sweep") else "hash and compare"
        if phase := names.get(name, other):
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def between(one: Machine, other: Machine) -> Machine:
    """Return the geometric mean of two measurements."""
    return Machine(
        one.cores,
        math.sqrt(one.operations_per_second * other.operations_per_second),
        math.sqrt(one.bytes_per_second * other.bytes_per_second),
    )


def growth(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the power of the first by which the second grows: a line through the logarithms."""
    if len(points) < 2:
        return None
    xs, ys = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def ratios(info: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Return predicted over measured seconds, by phase and of all together."""
    both = [name for name in measured if name in info]
    found = {name: info[name] / measured[name] for name in both}
    return {**found, "all": sum(info[name] for name in both) / sum(measured[name] for name in both)}
