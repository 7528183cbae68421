"""Plans: time, memory and traffic of `align` and of `transport`, before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transfusion.architecture.architecture import InnerPolicy, Residual
from transfusion.errors import SettingError
from transfusion.matching.methods import DEFAULT, METHODS, Method, preset
from transfusion.matching.search_memory import SearchMemory
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model, require_same_shape
from transfusion.runtime.resources import PROGRAM, WORKER
from transfusion.transportation.planning import assumptions
from transfusion.transportation.planning.costs import Costs
from transfusion.transportation.planning.machine import Machine
from transfusion.transportation.planning.machine_benchmark import measure
from transfusion.transportation.planning.paper import sketch
from transfusion.transportation.planning.phases import Phase, SearchRehearsal
from transfusion.transportation.planning.schedule import makespan
from transfusion.transportation.planning.sweep_cost import gain_sizes
from transfusion.transportation.planning.transport_cost import transport_cost as moved
from transfusion.transportation.planning.work import ParallelGroup, WorkItem

GIGA = 10**9


@dataclass(frozen=True)
class PlannedCluster:
    """Where it is to run."""

    machine: Machine
    nodes: int = 1
    cores: int = 1
    memory: float | None = None
    """Bytes of a node that may be taken; as many as it takes, if there is no limit."""
    network: float = 1.25 * GIGA
    """Bytes in a second between storage and a node, where there are several."""
    at_once: int = 1
    """How many cores of a node are at work: all of them, unless memory is short."""

    @property
    def storage(self) -> float:
        """Bytes in a second that all nodes together read; several read from what they share."""
        return self.machine.storage if self.nodes == 1 else self.nodes * self.network

    def seconds(self, parallel_groups: Iterable[ParallelGroup]) -> float:
        """How long waves take, one after the other."""
        return sum(self._wave(parallel_group) for parallel_group in parallel_groups if parallel_group)

    def _wave(self, parallel_group: ParallelGroup) -> float:
        workers = self.nodes * self.at_once
        if self.nodes == 1 and len(parallel_group) == 1:
            return self.machine.seconds_alone(parallel_group[0], workers)
        if self.nodes > 1 and parallel_group[0].shares and 2 * len(parallel_group) <= workers:
            return sum(self._divided(task, workers) for task in parallel_group)
        pace = self.machine.pace(min(self.at_once, -(-len(parallel_group) // self.nodes)))
        return makespan((self.machine.seconds(task.work) / pace for task in parallel_group), workers)

    def _divided(self, task: WorkItem, workers: int) -> float:
        """One block by all workers of several nodes, which send their rows of its gain to one of them."""
        shares = min(task.shares, workers)
        pace = self.machine.pace(min(self.at_once, -(-shares // self.nodes)))
        sent = 0.0 if shares == 1 else assumptions.COMPUTED * task.height**2 / self.network
        return self.machine.seconds_divided(task.work, shares) / pace + sent


@dataclass(frozen=True)
class TimedPhase:
    """A phase, and what it takes."""

    name: str
    seconds: float
    counted: bool
    flops: float
    read: float
    """Bytes of weights that are looked at."""
    stored: float
    """Those among them that come from storage, not from memory."""
    assignments: dict[str, float]


@dataclass(frozen=True)
class CostPlan:
    """What aligning and moving would take."""

    a: str
    b: str
    family: str
    parameters: int
    bytes: int
    """Of both models."""
    method: str
    cluster: PlannedCluster
    sweeps: int
    phases: tuple[TimedPhase, ...]
    memory: dict[str, int]
    """Bytes of a node: for blocks at work, for gains that are kept, in all; and for transport."""
    traffic: dict[str, int]
    transport: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of `align`, the phases that belong to every run."""
        return sum(phase.seconds for phase in self.phases if phase.counted)

    def phase(self, name: str) -> TimedPhase:
        """A phase by its name."""
        return next(phase for phase in self.phases if phase.name == name)

    def as_dict(self) -> dict[str, Any]:
        """As plain data, with all that it rests on."""
        info = asdict(self)
        cluster = {**info.pop("cluster"), "machine": self.cluster.machine.as_dict()}
        assumed = {name.lower(): getattr(assumptions, name) for name in dir(assumptions) if name.isupper()}
        return {**info, "seconds": self.seconds, "cluster": cluster, "assumptions": assumed}


def plan(
    a: str | Path | Model,
    b: str | Path | Model | None = None,
    *,
    nodes: int = 1,
    cores: int | None = None,
    memory: float | None = None,
    network: float = 1.25 * GIGA,
    method: str | Method = DEFAULT,
    residual: Residual | str | None = None,
    inner: InnerPolicy | str | None = None,
    sweeps: int = assumptions.SWEEPS,
    moving: Sequence[float] = assumptions.MOVING,
    finetunes: int = 1,
    advice: bool = True,
    machine: Machine | str | Path | None = None,
) -> CostPlan:
    """Predict what `align` and `transport` take, from the configurations of two models alone.

    A model is a folder or a file as everywhere, a folder with nothing but its config.json, or that file; B is
    like A, if not said. ``machine`` is a file of constants, measured by ``plan --measure-machine``; without
    one, this machine is measured, which takes some seconds.

    >>> found = transfusion.plan("models/a/config.json", sweeps=3)
    >>> [phase.name for phase in found.phases]
    ['hashing', 'kinship', 'identity', 'sweep 1', 'sweep 1 from identity', 'sweep 2', 'sweep 3', 'advice']
    >>> found.seconds > 0 and found.memory["total"] > found.memory["working"]
    True
    """
    for name, value in (("nodes", nodes), ("cores", cores), ("sweeps", sweeps), ("finetunes", finetunes)):
        if value is not None and value < 1:
            raise SettingError(f"{name} = {value}: nothing could be done", hint="give 1 or more")
    for name, amount in (("memory", memory), ("network", network)):
        if amount is not None and not amount > 0:
            raise SettingError(f"{name} = {amount}: nothing could be done", hint="give some bytes")
    chosen = method if isinstance(method, Method) else preset(method)
    chosen = chosen.changed(residual=residual, inner=inner)
    if not chosen.searches:
        known = ", ".join(one.name for one in METHODS.values() if one.searches)
        raise SettingError(
            f"method {chosen.name}: it does not search, and is not planned", hint=f"one of {known}"
        )
    one = sketch(a)
    other = one if b is None else sketch(b)
    require_same_shape(one, other)
    found = machine if isinstance(machine, Machine) else Machine.load(machine) if machine else measure()
    cluster = PlannedCluster(found, nodes, cores or found.cores, memory, network)
    return _Planning(one, other, chosen, cluster).plan(sweeps, moving, finetunes, advice=advice)


class _Planning:
    """A plan in the making."""

    def __init__(self, a: Model, b: Model, method: Method, cluster: PlannedCluster) -> None:
        self.a, self.b, self.method = a, b, method
        self.weights = WeightPair(a.under(method.policy), b.under(method.policy), vectors=method.vectors)
        self.costs = Costs(self.weights)
        self.stored = a.checkpoint.nbytes + b.checkpoint.nbytes
        self.budget, at_once = self._budget(cluster)
        self.cluster = replace(cluster, at_once=at_once)
        share = assumptions.NEW if cluster.memory is None and cluster.nodes == 1 else 1.0
        self.cluster = replace(self.cluster, machine=cluster.machine.with_new_memory(share))

    def _budget(self, cluster: PlannedCluster) -> tuple[SearchMemory, int]:
        """The memory of a process, and how many cores of a node are at work: threads of one process, or on
        several nodes as many processes as fit.
        """
        memory = None if cluster.memory is None else int(cluster.memory)
        if cluster.nodes == 1:
            budget = SearchMemory.of(self.weights, self.method, cluster.cores, memory)
            return budget, budget.threads
        if memory is None:
            return SearchMemory.of(self.weights, self.method, 1, program=WORKER), cluster.cores
        for count in range(cluster.cores, 1, -1):
            try:
                return SearchMemory.of(self.weights, self.method, 1, memory // count, WORKER), count
            except SettingError:
                continue
        return SearchMemory.of(self.weights, self.method, 1, memory, WORKER), 1

    def plan(self, sweeps: int, moving: Sequence[float], finetunes: int, *, advice: bool) -> CostPlan:
        cluster, nodes, budget = self.cluster, self.cluster.nodes, self.budget
        processes = cluster.at_once if nodes > 1 else 1
        total = processes * budget.total
        cached = cluster.memory is None or self.stored <= nodes * (cluster.memory - total)
        alpha_search = SearchRehearsal(self.weights, self.method, budget)
        phases = alpha_search.phases(sweeps, moving, advice=advice)
        timed = tuple(self._timed(phase, cached) for phase in phases)
        moved_ = moved(self.a, self.b, self.method.policy)
        memory = {
            "working": processes * budget.threads * budget.block,
            "gains": processes * budget.kept,
            "largest_gain": max(gain_sizes(self.costs).values(), default=0),
            "program": processes * budget.program,
            "total": total,
            "transport": moved_.memory + PROGRAM,
        }
        stored = sum(phase.stored for phase in timed if phase.counted)
        maps = 8 * sum(
            space.size * self.costs.architecture.rows(space.id) for space in self.costs.architecture.free()
        )
        traffic = {
            "align_read": int(stored),
            "align_network": int(stored + sweeps * 2 * maps) if nodes > 1 else 0,
            "align_written": maps,
            "transport_read": finetunes * moved_.read,
            "transport_network": finetunes * (moved_.read + moved_.written) if nodes > 1 else 0,
            "transport_written": finetunes * moved_.written,
        }
        return CostPlan(
            a=self.a.label,
            b=self.b.label,
            family=self.a.family.name,
            parameters=self.a.checkpoint.parameters,
            bytes=self.stored,
            method=self.method.name,
            cluster=cluster,
            sweeps=sweeps,
            phases=timed,
            memory=memory,
            traffic=traffic,
            transport={
                "finetunes": finetunes,
                "seconds": finetunes * self._transport(moved_.parallel_group, moved_.read),
            },
        )

    def _timed(self, phase: Phase, cached: bool) -> TimedPhase:
        work = phase.work
        looked = work.read + work.hashed
        stored = looked if not cached or phase.name == "hashing" else 0.0
        seconds = max(self.cluster.seconds(phase.parallel_groups), stored / self.cluster.storage)
        info = {str(size): count for size, count in sorted(work.assignments.items())}
        return TimedPhase(phase.name, seconds, phase.counted, work.flops, looked, stored, info)

    def _transport(self, parallel_group: ParallelGroup, read: int) -> float:
        """Limited by the cores, or by storage in either direction."""
        cluster = self.cluster
        written = sum(task.work.written for task in parallel_group)
        to = cluster.machine.writing if cluster.nodes == 1 else cluster.nodes * cluster.network
        return max(cluster.seconds([parallel_group]), read / cluster.storage, written / to)
