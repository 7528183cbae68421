"""What runs are compared with: the floor, the plan, and each other."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from scale.models import Size
from scale.watching import Run
from transfusion.matching.methods import SearchStart, preset
from transfusion.matching.search import Search
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.runtime.engines import LocalEngine
from transfusion.runtime.threads import Threads
from transfusion.transportation.planning.cost_plan import plan
from transfusion.transportation.planning.costs import Costs
from transfusion.transportation.planning.machine import Machine
from transfusion.transportation.planning.sweep_cost import Rehearsed


@dataclass(frozen=True)
class Floor:
    """One pass of all gains at the speed of this machine's products, and one of assignments."""

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
    """No sweep that looks at everything can take less."""
    method = preset("guarded")
    weights = WeightPair(*(Model.open(place).under(method.policy) for place in (a, b)))
    search = Search(weights, method, seed=0, engine=LocalEngine(Threads(1)))
    blocks = Rehearsed(search, Costs(weights), set()).sweep(SearchStart.IDENTITY).parallel_groups
    works = [task.work for parallel_group in blocks for task in parallel_group]
    assigned = sum(n * machine.assigning(size) for work in works for size, n in work.assignments.items())
    operations = sum(work.flops for work in works)
    return Floor(operations, _speed(size, threads), assigned / threads)


def _speed(size: Size, threads: int) -> float:
    """The best of three products as large as those of this size."""
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
    """What a plan says of a run on threads: the seconds that pass, those of one core, and the memory."""
    task = run.task
    asked: dict[str, Any] = {"machine": machine, "sweeps": max(1, run.sweeps), "memory": task.memory}
    if task.related:
        asked["moving"] = (0.0,)
    both = [plan(task.a, task.b, cores=cores, **asked) for cores in (task.jobs, 1)]
    seconds, busy = ({one.name: one.seconds for one in each.phases if one.counted} for each in both)
    return {"seconds": seconds, "busy": busy, "memory": both[0].memory["total"]}


def between(one: Machine, other: Machine) -> Machine:
    """The middle of two measurements."""
    times = ("assignments", "candidates")
    names = [each.name for each in fields(Machine) if each.name not in ("cores", *times)]
    middle: dict[str, Any] = {name: math.sqrt(getattr(one, name) * getattr(other, name)) for name in names}
    for name in times:
        first, second = getattr(one, name), getattr(other, name)
        middle[name] = {size: math.sqrt(first[size] * second[size]) for size in first}
    return replace(one, **middle)


def growth(points: Sequence[tuple[float, float]]) -> float | None:
    """The power of the first by which the second grows: a line through the logarithms."""
    if len(points) < 2:
        return None
    xs, ys = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def ratios(info: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Predicted over measured, phase by phase, and of all together."""
    both = [name for name in measured if name in info]
    found = {name: info[name] / measured[name] for name in both}
    return {**found, "all": sum(info[name] for name in both) / sum(measured[name] for name in both)}
