"""A short estimate of what `align` and `transport` take, from shapes and the two constants of a machine.

The operations of one pass over all gains follow from the shapes. How many passes a search makes, and how
often it reads the weights, are the constants below: rounded from runs on Llamas of 0.1 to 1.4 billion
parameters. docs/verbs/plan.md says how far off the estimate was.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transfusion.architecture.architecture import InnerPolicy, Residual
from transfusion.errors import SettingError
from transfusion.matching.advice import BLOCKS_OF_THE_NULL
from transfusion.matching.blocks import Block, NestedBlock, blocks
from transfusion.matching.methods import DEFAULT, METHODS, BlockOrder, Method, SearchStart, preset
from transfusion.matching.search_memory import SearchMemory
from transfusion.matching.weights.gain_products import BLOCK
from transfusion.matching.weights.gains import gain_bytes
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.bases import in_one_vocabulary
from transfusion.model.model import Model, require_same_shape
from transfusion.running.config_model import open_headers
from transfusion.runtime.machine import Machine
from transfusion.runtime.memory_budget import MemoryBudget
from transfusion.transport.transport_plan import TransportPlan

SWEEPS = 5
"""Sweeps that are counted unless a number is given. How many a search makes depends on the weights."""
NETWORK = 1.25e9
"""Bytes per second between storage and each node of a cluster: 10 Gb/s."""
_PROGRESSIVE = 0.6
"""The share of all products that a progressive first sweep makes; the second makes the rest."""
_CORRECTIONS = 0.25
"""The share of all products that each sweep from the third on makes, to correct the gains that are kept."""
_READS_OF_A_SWEEP = 2.5
_READS_IN_PLACE = 3.0
"""How often a sweep, and the similarity in place, read both models."""
_TIGHT = 2.0
"""How much longer reading takes within a memory limit: memory is given back at once, and handed out anew."""
_WRITING = 6.0
"""How much longer a byte takes to be moved, added, converted and written by transport than to be read."""
_ASSIGNMENT = 32
"""An assignment of n units takes as long as this many n^2.5 operations of products: 512 to 16384 units."""


@dataclass(frozen=True)
class Phase:
    """A part of `align`."""

    name: str
    seconds: float
    operations: float
    """Of matrix products, and of assignments in operations that take as long."""
    bytes: float
    """Bytes of weights that are read, from storage or from the page cache."""


@dataclass(frozen=True)
class Cluster:
    """The machines that do the work: threads of one process on one node, workers of Ray on several."""

    machine: Machine
    nodes: int
    cores: int
    memory: int | None
    network: float
    workers: int
    """Threads or workers on all nodes together: as many as there are cores, fewer if memory is short."""

    def seconds(self, operations: float, nbytes: float, side_by_side: float, written: float = 0.0) -> float:
        """Return the seconds of work on these bytes that at most ``side_by_side`` workers share."""
        slower = 1.0 if self.memory is None else _TIGHT
        busy = operations / self.machine.operations_per_second
        busy += (slower * nbytes + _WRITING * written) / self.machine.bytes_per_second
        shared = busy / max(1.0, min(self.workers, side_by_side))
        return shared if self.nodes == 1 else max(shared, (nbytes + written) / (self.nodes * self.network))


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of `align` and `transport`."""

    a: str
    b: str
    family: str
    parameters: int
    bytes: int
    """Of both models."""
    method: str
    sweeps: int
    cluster: Cluster
    phases: tuple[Phase, ...]
    memory: dict[str, int]
    """Bytes of a node: for blocks that are being solved, for kept gains, for the program, in all; and in all
    for transport."""
    traffic: dict[str, int]
    """Bytes that each verb reads from storage, sends over the network, and writes."""
    transport: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of `align`."""
        return sum(phase.seconds for phase in self.phases)

    def phase(self, name: str) -> Phase:
        """Return a phase by its name."""
        return next(phase for phase in self.phases if phase.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with the constants of the machine."""
        return {**asdict(self), "seconds": self.seconds}


def plan(
    a: str | Path | Model,
    b: str | Path | Model | None = None,
    *,
    nodes: int = 1,
    cores: int | None = None,
    memory: int | None = None,
    network: float = NETWORK,
    method: str | Method = DEFAULT,
    residual: Residual | str | None = None,
    inner: InnerPolicy | str | None = None,
    sweeps: int = SWEEPS,
    advice: bool = True,
    finetunes: int = 1,
    machine: Machine | str | Path | None = None,
) -> Estimate:
    """Estimate time, memory and traffic of `align` and `transport`, from two configurations alone.

    Args:
        a: A model, its folder or hub id, a folder with nothing but a config.json, or that file.
        b: The other base, in the same way; by default one of A's shapes.
        nodes: How many machines share the work. Several are a Ray cluster with a worker for every core.
        cores: Cores of a node; by default those of the machine.
        memory: Bytes that may be taken of a node's memory; by default there is no limit.
        network: Bytes per second between storage and each of several nodes.
        method: A preset that searches, by name or changed to your wishes.
        residual: How the residual stream is matched; by default as the method does.
        inner: How the units inside heads are matched; by default as the method does.
        sweeps: How many sweeps to count.
        advice: Whether `align` compares with a null, and advises.
        finetunes: How many fine-tunes are transported afterwards.
        machine: Constants, or their file (``transfusion plan --measure-machine``); by default this machine is
            measured, which takes about a second.

    >>> estimate = transfusion.plan("models/a/config.json", sweeps=3)
    >>> [phase.name for phase in estimate.phases]
    ['hash and compare', 'first sweep', 'later sweeps', 'advice']
    >>> estimate.seconds > 0 and estimate.memory["total"] > estimate.memory["gains"]
    True
    """
    for name, count in (("nodes", nodes), ("cores", cores), ("sweeps", sweeps), ("finetunes", finetunes)):
        if count is not None and count < 1:
            raise SettingError(f"{name} = {count}: at least one is needed", hint="give 1 or more")
    for name, amount in (("memory", memory), ("network", network)):
        if amount is not None and not amount > 0:
            raise SettingError(f"{name} = {amount}: more than 0 is needed", hint="give a number of bytes")
    chosen = method if isinstance(method, Method) else preset(method)
    chosen = chosen.changed(residual=residual, inner=inner)
    if not chosen.searches:
        known = ", ".join(one.name for one in METHODS.values() if one.searches)
        raise SettingError(f"method {chosen.name} does not search: no estimate", hint=f"one of {known}")
    one = open_headers(a)
    other = one if b is None else open_headers(b)
    one = in_one_vocabulary(one, other, 0.0)
    require_same_shape(one, other)
    found = (
        machine if isinstance(machine, Machine) else Machine.load(machine) if machine else Machine.measure()
    )
    weights = WeightPair(one.under(chosen.policy), other.under(chosen.policy), vectors=chosen.vectors)
    budget, workers = _memory(weights, chosen, nodes, cores or found.cores, memory)
    cluster = Cluster(found, nodes, cores or found.cores, memory, network, workers)
    stored = sum(model.checkpoint.nbytes for model in (one, other))
    phases = tuple(_phases(weights, chosen, budget, cluster, stored, sweeps, advice=advice))
    transported = TransportPlan.planned(one, other, assumed=True).transport(one, trust_base=True).plan()
    processes = workers // nodes if nodes > 1 else 1
    total = processes * budget.total
    cached = memory is None or stored <= nodes * (memory - total)
    read = stored if cached else int(sum(phase.bytes for phase in phases))
    maps = 8 * sum(space.size * weights.architecture.rows(space.id) for space in weights.architecture.free())
    moved, written = (finetunes * transported[f"bytes_to_{what}"] for what in ("read", "write"))
    return Estimate(
        a=one.label,
        b=other.label,
        family=one.family.name,
        parameters=one.checkpoint.parameters,
        bytes=stored,
        method=chosen.name,
        sweeps=sweeps,
        cluster=cluster,
        phases=phases,
        memory={
            "blocks": processes * budget.threads * budget.block,
            "gains": processes * budget.kept,
            "program": processes * budget.budget.program,
            "total": total,
            "transport": transported["memory_in_all"],
        },
        traffic={
            "align_read": read,
            "align_network": read + 2 * sweeps * maps if nodes > 1 else 0,
            "align_written": maps,
            "transport_read": moved,
            "transport_network": moved + written if nodes > 1 else 0,
            "transport_written": written,
        },
        transport={"finetunes": finetunes, "seconds": cluster.seconds(0, moved, workers, written)},
    )


def _memory(
    weights: WeightPair, method: Method, nodes: int, cores: int, memory: int | None
) -> tuple[SearchMemory, int]:
    """Return the memory of a process, and how many threads or workers there are on all nodes."""
    if nodes == 1:
        budget = SearchMemory.of(weights, method, cores, MemoryBudget(memory))
        return budget, budget.threads
    worker = MemoryBudget.for_process(memory, local=False)
    least = SearchMemory.of(weights, method, 1, worker)  # refuses a node without room for one worker
    if memory is None:
        return least, nodes * cores
    count = min(cores, max(1, memory // (worker.program + least.block)))
    share = MemoryBudget.for_process(memory // count, local=False)
    return SearchMemory.of(weights, method, 1, share), nodes * count


def _phases(
    weights: WeightPair,
    method: Method,
    memory: SearchMemory,
    cluster: Cluster,
    stored: int,
    sweeps: int,
    *,
    advice: bool,
) -> list[Phase]:
    """Return the phases of a search in which no unit is in place: the identity is dropped as a start."""
    found = blocks(weights, method)
    products = {block: products_of(weights, block) for block in found}
    assignments = sum(assignments_of(weights, block) for block in found)
    every = sum(products.values())
    progressive = method.starts[0] is not SearchStart.IDENTITY
    starts = [s for s in method.starts[1:] if not (method.screen and s is SearchStart.IDENTITY)]
    gains = sum(gain_bytes(weights, space.id) for space in weights.architecture.free())
    forgotten = 1 - memory.kept / gains if gains else 0.0
    in_turn = sum(
        count / min(cluster.workers, -(-weights.architecture.sizes[block.ids[0]] // BLOCK))
        for block, count in products.items()
    )

    def sweep(name: str, share: float, assigned: float, reads: float, *, parallel: bool) -> Phase:
        """A share of all products and assignments, by blocks in parallel or by one block after another."""
        operations, nbytes = share * every + assigned * assignments, reads * stored
        if parallel:
            seconds = cluster.seconds(operations, nbytes, len(found) / 3)
        else:
            seconds = cluster.seconds(share * in_turn + assigned * assignments, nbytes, 1)
        return Phase(name, seconds, operations, nbytes)

    reads = 2 + _READS_IN_PLACE * method.screen
    compare = cluster.seconds(0, reads * stored, cluster.workers)
    phases = [Phase("hash and compare", compare, 0, reads * stored)]
    first = (_PROGRESSIVE if progressive else 1.0) + len(starts)
    phases.append(
        sweep("first sweep", first, 1 + len(starts), _READS_OF_A_SWEEP * (1 + len(starts)), parallel=False)
    )
    parallel = method.order is BlockOrder.PARALLEL
    second = 1 - _PROGRESSIVE if progressive else 1.0
    shares = [share + (1 - share) * forgotten for share in [second, *[_CORRECTIONS] * (sweeps - 2)]]
    later = shares[: sweeps - 1]
    phases.append(
        sweep("later sweeps", sum(later), len(later) / 2, _READS_OF_A_SWEEP * len(later), parallel=parallel)
    )
    if advice:  # two sweeps over blocks in the middle of the model, or over all where the stream is one axis
        middle = min(1.0, BLOCKS_OF_THE_NULL / len(found)) if found else 0.0
        part = 1.0 if method.policy.residual is Residual.TIED else middle
        null = part * (1.0 if progressive else 2.0)
        phases.append(sweep("advice", null, 2 * part, 3 + 2 * _READS_OF_A_SWEEP * part, parallel=False))
    return phases


def products_of(weights: WeightPair, block: Block) -> float:
    """Return the operations of all products of a block."""
    nested = isinstance(block, NestedBlock)
    ids = block.children if isinstance(block, NestedBlock) else block.ids
    return sum(
        2.0
        * section.rows
        * section.width
        * weights.architecture.sizes[id] ** 2
        * (section.rows if nested else 1)
        for id in ids
        for section in weights.sections.get(id, [])
    )


def assignments_of(weights: WeightPair, block: Block) -> float:
    """Return the operations that take as long as the assignments of a block."""
    architecture = weights.architecture
    first = block.ids[0]
    counts = {first: architecture.rows(first)}
    if isinstance(block, NestedBlock):
        counts |= dict.fromkeys(block.children, architecture.sizes[first] ** 2)  # for every pair of heads
    return sum(count * _ASSIGNMENT * math.pow(architecture.sizes[id], 2.5) for id, count in counts.items())
