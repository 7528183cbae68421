"""The budget: how much memory a search takes, known from headers alone, and how a limit is kept.

What a limit changes is how many blocks are solved side by side and which gains are kept, never what comes
out. A gain whose matrix does not fit into memory is written to a temporary file, some rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transfusion.errors import SettingError
from transfusion.matching.blocks import AxisBlock, Block, NestedBlock, blocks
from transfusion.matching.methods import Method
from transfusion.matching.solvers.assignment import HUGE
from transfusion.matching.weights import gain_products, weight_pair
from transfusion.matching.weights.gains_on_disk import solving_bytes
from transfusion.matching.weights.sections import Section
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.runtime.byte_sizes import at_least, format_bytes
from transfusion.runtime.engines import Engine, LocalEngine
from transfusion.runtime.resources import PROGRAM, WORKER

COPIES = 7
"""How often what is read of a tensor is in memory at most: as stored and converted on both sides, with its
columns moved as they are and as they were, and their difference."""


@dataclass(frozen=True)
class SearchMemory:
    """How the memory of one process is divided."""

    threads: int
    block: int
    """Bytes that the most demanding block takes."""
    demanding: str
    """Its axis."""
    kept: int
    """Bytes for gains that are kept from one sweep to the next."""
    room: int | None = None
    """Bytes that a block may take, if that is limited."""
    spilled: int = 0
    """How many axes have gains that go to temporary files."""
    program: int = PROGRAM
    """Bytes that the process takes before it has a model."""

    @property
    def total(self) -> int:
        """What all of it takes at most."""
        return self.program + self.threads * self.block + self.kept

    @classmethod
    def of(
        cls,
        weights: WeightPair,
        method: Method,
        threads: int,
        memory: int | None = None,
        program: int = PROGRAM,
    ) -> SearchMemory:
        """As many threads as asked for and fit into the memory, and then as many gains as fit beside them."""
        found = blocks(weights, method)
        needs = {block.ids[0]: memory_needed(weights, block) for block in found}
        least = {block.ids[0]: memory_needed(weights, block, spilled=True) for block in found}
        needs["every tensor"] = least["every tensor"] = _looked_at(weights)
        every = _gains(weights)
        if memory is None:
            demanding = max(needs, key=needs.__getitem__)
            kept = min(every, weights.nbytes * 3 // 4)
            return cls(threads, needs[demanding], demanding, kept, program=program)
        demanding = max(least, key=least.__getitem__)
        if program + least[demanding] > memory:
            raise SettingError(
                f"memory of {format_bytes(memory)} is too little: {demanding} takes"
                f" {format_bytes(least[demanding])} at a time, and the program {format_bytes(program)}",
                hint=f"give at least {at_least(program + least[demanding])}",
            )
        threads = max(1, min(threads, (memory - program) // max(*needs.values(), 1)))
        room = (memory - program) // threads
        spilled = [id for id in needs if needs[id] > room]
        most = {id: min(needs[id], max(least[id], room)) for id in needs}
        demanding = max(most, key=most.__getitem__)
        kept = min(every, memory - program - threads * most[demanding])
        return cls(threads, most[demanding], demanding, kept, room, len(spilled), program)

    def as_dict(self) -> dict[str, int | str]:
        """As plain data, for a plan."""
        return {
            "memory": self.total,
            "threads": self.threads,
            "memory_of_a_block": self.block,
            "most_demanding": self.demanding,
            "memory_of_kept_gains": self.kept,
            "spilled": self.spilled,
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
    """What `align` would do, known from the headers alone."""
    a, b = a.under(method.policy), b.under(method.policy)
    plan: dict[str, Any] = {
        "axes": len(a.architecture.free()),
        "bytes_to_read": sum(model.checkpoint.nbytes for model in (a, b)),
    }
    weights = WeightPair(a, b, vectors=method.vectors, dtype=dtype)
    budget = within_memory(weights, method, memory, engine, jobs)
    return plan | budget.as_dict() if method.searches else plan


def within_memory(
    weights: WeightPair, method: Method, memory: int | None, engine: str | Engine, jobs: int | None
) -> SearchMemory:
    """How the memory is divided; only what searches alone keeps to a limit, and has work for a cluster."""
    runs = method.fusion is not None or method.functional is not None
    idle = [f"memory of {format_bytes(memory)}"] if memory is not None else []
    idle += [f"engine = {engine!r}"] if engine != "local" else []
    if runs and idle:
        raise SettingError(
            f"{idle[0]}: the method {method.name} holds whole models in this process",
            hint="leave out --memory and --engine, or choose a method that compares weights, such as guarded",
        )
    here = engine == "local" or isinstance(engine, LocalEngine)
    if not here and str(weights.place["device"]) != "cpu":
        raise SettingError(
            f"device {str(weights.place['device'])!r}: workers of Ray compute on cpu",
            hint="leave out --device, or --engine",
        )
    match engine:
        case LocalEngine():
            threads = engine.count
        case "local":
            threads = jobs or torch.get_num_threads()
        case _:
            threads = 1
    budget = SearchMemory.of(weights, method, threads, memory, PROGRAM if here else WORKER)
    if isinstance(engine, LocalEngine) and budget.threads < engine.count:
        raise SettingError(
            f"memory of {format_bytes(memory or 0)}: enough for {budget.threads} thread(s),"
            f" and the engine has {engine.count}",
            hint=f"hire {budget.threads}, or give more memory",
        )
    return budget


def memory_needed(weights: WeightPair, block: Block, *, spilled: bool = False) -> int:
    """Bytes that solving a block takes, at least if its gain may be spilled."""
    match block:
        case AxisBlock(id):
            return _of_alone(weights, id, spilled=spilled)
        case NestedBlock(parent, children):
            inside = (_of_pairs(weights, child) for child in children)
            return max(*inside, _of_alone(weights, parent))
        case _:
            read = (_whole(weights, section) for section in weights.sections[block.ids[0]])
            return 4 * max(read, default=0)  # in float64, with its square


def _of_alone(weights: WeightPair, id: str, *, spilled: bool = False) -> int:
    """A gain and what the solver makes of it, what is read at a time, and the tensor as it is stored."""
    sections = weights.sections[id]
    read = COPIES * max((_at_a_time(weights, section) for section in sections), default=0)
    stored = max((weights.a.info(section.tensor).nbytes for section in sections), default=0)
    size, rows = weights.architecture.sizes[id], weights.architecture.rows(id)
    if size < HUGE:
        return 2 * _gain(weights, id) + read + stored
    at_once = _gain(weights, id) * gain_products.BLOCK // size if spilled else _gain(weights, id)
    return 2 * (at_once + solving_bytes(rows, size)) + read + stored


def _of_pairs(weights: WeightPair, child: str) -> int:
    """Every element of a parent with every other, tensor by tensor and summed."""
    architecture = weights.architecture
    sections = weights.sections.get(child, [])
    pairs = _per_number(weights) * (architecture.rows(child) * architecture.sizes[child]) ** 2
    read = max((_whole(weights, section) for section in sections), default=0)
    return pairs * (len(sections) + 3) + COPIES * read


def _at_a_time(weights: WeightPair, section: Section) -> int:
    whole = _whole(weights, section)
    if section.member is not None:
        return whole // section.shape[0]
    if not section.plain:
        return whole
    other = section.shape[1 - section.dim] if section.dim == 0 else section.shape[1]
    return min(whole, _per_number(weights) * max(gain_products.NUMBERS, gain_products.BLOCK * other))


def _whole(weights: WeightPair, section: Section) -> int:
    return _per_number(weights) * torch.Size(section.shape).numel()


def _looked_at(of: WeightPair) -> int:
    """What scoring the largest tensor takes, and asking who is at home in it."""
    odd = {one.tensor for sections in of.sections.values() for one in sections if not one.plain}
    numbers = 0
    for name in of.tensors:
        shape = of.a.info(name).shape
        whole, row = torch.Size(shape).numel(), torch.Size(shape[1:]).numel()
        numbers = max(numbers, whole if name in odd else min(whole, max(weight_pair.NUMBERS, row)))
    return COPIES * _per_number(of) * numbers


def _gains(weights: WeightPair) -> int:
    return sum(_gain(weights, space.id) for space in weights.architecture.free())


def _gain(weights: WeightPair, id: str) -> int:
    architecture = weights.architecture
    return _per_number(weights) * architecture.rows(id) * architecture.sizes[id] ** 2


def _per_number(weights: WeightPair) -> int:
    return torch.empty((), **weights.place).element_size()
