"""The memory that a search takes, computed from headers alone, and how a limit is kept.

A limit decides how many blocks are solved in parallel and which gains are kept, never the result. A gain
whose matrix does not fit into memory is written to a temporary file, some rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transfusion.errors import ArchitectureError, LibraryError, SettingError
from transfusion.files import tensor_content
from transfusion.matching.activations.functional_memory import FunctionalMemory
from transfusion.matching.blocks import AxisBlock, Block, NestedBlock, blocks
from transfusion.matching.methods import FunctionalOptions, Method
from transfusion.matching.solvers.assignment import HUGE
from transfusion.matching.weights import gain_products
from transfusion.matching.weights.gains import gain_bytes
from transfusion.matching.weights.gains_on_disk import solving_bytes
from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.runtime.byte_sizes import format_bytes
from transfusion.runtime.engines import Engine, LocalEngine
from transfusion.runtime.memory_budget import NO_LIMIT, MemoryBudget

COPIES = 7
"""The most copies of a tensor's rows in memory: as stored and converted for both models, with columns moved
by the new and by the old maps, and their difference."""
_SCORING = "scoring a tensor"


@dataclass(frozen=True)
class SearchMemory:
    """How the memory of one process is divided."""

    threads: int
    block: int
    """Bytes that the most demanding block takes."""
    demanding: str
    """The axis of that block."""
    kept: int
    """Bytes for gains that are kept from one sweep to the next."""
    room: int | None = None
    """Bytes that a block may take; None for no limit."""
    on_disk: int = 0
    """How many axes have gains in temporary files."""
    budget: MemoryBudget = NO_LIMIT

    @property
    def total(self) -> int:
        """The most bytes of the process."""
        return self.budget.program + self.threads * self.block + self.kept

    @classmethod
    def of(
        cls, weights: WeightPair, method: Method, threads: int, budget: MemoryBudget = NO_LIMIT
    ) -> SearchMemory:
        """Fit up to ``threads`` threads into the budget, and then as many kept gains as fit beside them."""
        found = blocks(weights, method)
        needs = {block.ids[0]: memory_needed(weights, block) for block in found}
        least = {block.ids[0]: memory_needed(weights, block, on_disk=True) for block in found}
        needs[_SCORING] = least[_SCORING] = _scoring_bytes(weights)
        gains = sum(gain_bytes(weights, space.id) for space in weights.architecture.free())
        if budget.room is None:
            demanding = max(needs, key=needs.__getitem__)
            return cls(
                threads, needs[demanding], demanding, min(gains, weights.nbytes * 3 // 4), budget=budget
            )
        demanding = max(least, key=least.__getitem__)
        budget.require(least[demanding], demanding)
        threads = budget.threads(threads, max(needs.values()))
        room = budget.room // threads
        on_disk = sum(needed > room for needed in needs.values())
        most = {id: min(needs[id], max(least[id], room)) for id in needs}
        demanding = max(most, key=most.__getitem__)
        kept = min(gains, budget.room - threads * most[demanding])
        return cls(threads, most[demanding], demanding, kept, room, on_disk, budget)

    def as_dict(self) -> dict[str, int | str]:
        """Return plain data for a dry run."""
        return {
            "memory": self.total,
            "threads": self.threads,
            "memory_of_a_block": self.block,
            "most_demanding": self.demanding,
            "memory_of_kept_gains": self.kept,
            "spilled": self.on_disk,
        }


def plan_memory(
    a: Model,
    b: Model,
    *,
    method: Method,
    memory: int | None = None,
    engine: str | Engine = "local",
    jobs: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return what `align` would read and how much memory it would take, from headers alone."""
    a, b = a.under(method.policy), b.under(method.policy)
    plan: dict[str, Any] = {
        "axes": len(a.architecture.free()),
        "bytes_to_read": sum(model.checkpoint.nbytes for model in (a, b)),
    }
    weights = WeightPair(a, b, vectors=method.vectors, dtype=dtype)
    if method.fusion is not None:
        refuse_limits(method, memory, engine)
    if method.searches:
        plan |= within_memory(weights, method, memory, engine, jobs).as_dict()
    if method.functional is not None:
        try:
            found = functional_memory(a, b, method.functional, memory, engine, jobs).as_dict()
        except (ArchitectureError, LibraryError):  # of a module that cannot be outlined, little is known
            if memory is not None:
                raise
            return plan
        both = {
            "memory": max(plan.get("memory", 0), found["memory"]),
            "threads": min(plan.get("threads", found["threads"]), found["threads"]),
        }
        plan |= found | both
    return plan


def functional_memory(
    a: Model,
    b: Model,
    options: FunctionalOptions,
    memory: int | None,
    engine: str | Engine = "local",
    jobs: int | None = None,
) -> FunctionalMemory:
    """Divide the memory of this process, or of each worker, in functional alignment."""
    if memory is not None and options.gradients:
        raise SettingError(
            f"memory of {format_bytes(memory)}: gradients need whole models",
            hint="leave out `memory`, or `gradients`",
        )
    here = engine == "local" or isinstance(engine, LocalEngine)
    return FunctionalMemory.of(
        a,
        b,
        options,
        _threads(engine, jobs),
        MemoryBudget.for_process(memory, local=here),
        by_unit=memory is not None,
    )


def refuse_limits(method: Method, memory: int | None, engine: str | Engine) -> None:
    """Refuse a memory or a cluster for a method that holds whole models."""
    idle = [f"memory of {format_bytes(memory)}"] if memory is not None else []
    idle += [f"engine = {engine!r}"] if engine != "local" else []
    if idle:
        raise SettingError(
            f"{idle[0]}: the method {method.name} holds whole models in this process",
            hint="leave out `memory` and `engine`, or choose a method that compares weights, such as guarded",
        )


def within_memory(
    weights: WeightPair, method: Method, memory: int | None, engine: str | Engine, jobs: int | None
) -> SearchMemory:
    """Divide the memory of this process, or of each worker, in a search."""
    here = engine == "local" or isinstance(engine, LocalEngine)
    if not here and str(weights.place["device"]) != "cpu":
        raise SettingError(
            f"device {str(weights.place['device'])!r}: workers of Ray compute on cpu",
            hint="leave out `device`, or `engine`",
        )
    budget = SearchMemory.of(
        weights, method, _threads(engine, jobs), MemoryBudget.for_process(memory, local=here)
    )
    if isinstance(engine, LocalEngine) and budget.threads < engine.count:
        raise SettingError(
            f"memory of {format_bytes(memory or 0)}: enough for {budget.threads} thread(s),"
            f" and the engine has {engine.count}",
            hint=f"open an engine of {budget.threads}, or give more memory",
        )
    return budget


def _threads(engine: str | Engine, jobs: int | None) -> int:
    """Return how many threads this process, or each worker, would use."""
    match engine:
        case LocalEngine():
            return engine.count
        case "local":
            return jobs or torch.get_num_threads()
        case _:
            return 1


def memory_needed(weights: WeightPair, block: Block, *, on_disk: bool = False) -> int:
    """Return the bytes that solving a block takes; ``on_disk`` if its gain is in a temporary file."""
    match block:
        case AxisBlock(id):
            return _axis_bytes(weights, id, on_disk=on_disk)
        case NestedBlock(parent, children):
            inside = (_pair_bytes(weights, child) for child in children)
            return max(*inside, _axis_bytes(weights, parent))
        case _:
            read = (_section_bytes(weights, section) for section in weights.sections[block.ids[0]])
            return 4 * max(read, default=0)  # in float64, with its square


def _axis_bytes(weights: WeightPair, id: str, *, on_disk: bool = False) -> int:
    """Return the bytes of a gain and its solver, the rows read at a time, and a tensor as stored."""
    sections = weights.sections[id]
    read = COPIES * max((_chunk_bytes(weights, section) for section in sections), default=0)
    stored = max((weights.a.info(section.tensor).nbytes for section in sections), default=0)
    size, rows = weights.architecture.sizes[id], weights.architecture.rows(id)
    if size < HUGE:
        return 2 * gain_bytes(weights, id) + read + stored
    at_once = gain_bytes(weights, id) * gain_products.BLOCK // size if on_disk else gain_bytes(weights, id)
    return 2 * (at_once + solving_bytes(rows, size)) + read + stored


def _pair_bytes(weights: WeightPair, child: str) -> int:
    """Return the bytes of the gains between all pairs of a parent's elements, per tensor and summed."""
    architecture = weights.architecture
    sections = weights.sections.get(child, [])
    pairs = weights.itemsize * (architecture.rows(child) * architecture.sizes[child]) ** 2
    read = max((_section_bytes(weights, section) for section in sections), default=0)
    return pairs * (len(sections) + 3) + COPIES * read


def _chunk_bytes(weights: WeightPair, section: Section) -> int:
    whole = _section_bytes(weights, section)
    if section.member is not None:
        return whole // section.shape[0]
    if not section.plain:
        return whole
    other = section.shape[1 - section.dim] if section.dim == 0 else section.shape[1]
    return min(whole, weights.itemsize * max(gain_products.NUMBERS, gain_products.BLOCK * other))


def _section_bytes(weights: WeightPair, section: Section) -> int:
    return weights.itemsize * torch.Size(section.shape).numel()


def _scoring_bytes(of: WeightPair) -> int:
    """Return the bytes of scoring the largest tensor, and of its similarity in place."""
    odd = {one.tensor for sections in of.sections.values() for one in sections if not one.plain}
    numbers = 0
    for name in of.tensors:
        shape = of.a.info(name).shape
        whole, row = torch.Size(shape).numel(), torch.Size(shape[1:]).numel()
        numbers = max(numbers, whole if name in odd else min(whole, max(tensor_content.BLOCK, row)))
    return COPIES * of.itemsize * numbers
