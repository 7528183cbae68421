"""What larger models would take: operations and bytes, counted from configurations, at measured speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from scale.comparing import growth
from transfusion.matching.activations.functional_memory import FunctionalMemory, ModelPasses, is_assigned
from transfusion.matching.blocks import blocks
from transfusion.matching.methods import FunctionalOptions, preset
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.activation_store import HELD_OUT
from transfusion.running.config_model import open_headers
from transfusion.runtime.machine import Machine
from transfusion.transport.estimate import assignments_of, plan, products_of

CONFIGS = Path(__file__).parent.parent / "scale" / "configs"
LARGER = {"8 B": CONFIGS / "llama-8b.json", "70 B": CONFIGS / "llama-70b.json"}
CORES = 2
POLAR = 13
"""Products of two square matrices that count for one polar factor (docs/scale.md)."""
ASSIGNMENT = 32
"""An assignment of n units takes as long as so many n^2.5 operations (docs/verbs/plan.md)."""
RECORDED = 3
"""Modules that are recorded for an axis: they write it, or read it."""
GENERATED = 0.5
"""The share of all probes that a causal model writes itself, token by token."""
BEYOND = 3.0
"""A run counts for an exponent if it takes more than so many times the same run of a tiny model."""
SPAN = 2.0
"""An exponent needs points of which the largest has so many times the parameters of the smallest."""

Results = Mapping[str, Any]


def planned(a: Path, method: str, sweeps: int, machine: Machine) -> dict[str, Any]:
    """Return the estimate of `transfusion plan`: its phases, and the part of them that is reading."""
    found = plan(a, method=method, sweeps=sweeps, machine=machine, cores=CORES)
    return {
        "seconds": found.seconds,
        "phases": {phase.name: phase.seconds for phase in found.phases},
        "reading": sum(phase.bytes for phase in found.phases) / (CORES * machine.bytes_per_second),
        "memory": found.memory["total"],
        "transport": found.transport["seconds"],
        "transport_memory": found.memory["transport"],
        "bytes": found.bytes // 2,
        "parameters": found.parameters,
    }


def one_pass(config: Path, method: str, machine: Machine) -> dict[str, float]:
    """Return the seconds of all products and of all assignments of a method, once, on all cores."""
    chosen = preset(method)
    model = open_headers(config).under(chosen.policy)
    weights = WeightPair(model, model, vectors=chosen.vectors)
    found = blocks(weights, chosen)
    speed = CORES * machine.operations_per_second
    return {
        "products": sum(products_of(weights, block) for block in found) / speed,
        "assignments": sum(assignments_of(weights, block) for block in found) / speed,
    }


def functional(config: Path, machine: Machine) -> dict[str, Any]:
    """Return the parts of functional alignment within a memory limit: seconds of each, and bytes."""
    options = FunctionalOptions()
    model = open_headers(config).under(preset("functional").policy)
    passes, spaces = ModelPasses(model, options), model.architecture
    sizes = {space.id: space.size for space in spaces.moving() if space.parent is None}
    assigned = [id for id in sizes if is_assigned(model, spaces.spaces[id], options)]
    points = [id for id in sizes if spaces.spaces[id].stream]
    learned = options.samples - options.samples // HELD_OUT
    weights = sum(
        prod(model.info(name).shape)
        for name, layout in spaces.tensors.items()
        if layout.arrow is not None and VOCABULARY not in layout.names()
    )
    length = passes.tokens // options.probes
    written = GENERATED * passes.tokens
    memory = FunctionalMemory.of(model, model, options, CORES, by_unit=True)
    speed, reading = machine.operations_per_second, machine.bytes_per_second
    seconds = {
        "forward passes of both models": 2 * 2 * passes.tokens * weights / (CORES * speed),
        "texts: products": 2 * written * model.checkpoint.parameters / (CORES * speed),
        "texts: weights read at every token": length * model.checkpoint.nbytes / reading,
        "covariances": RECORDED
        * 2
        * learned
        * sum(sizes[id] ** 2 for id in {*assigned, *points})
        / (CORES * speed),
        "polar factors": POLAR * 2 * sum(sizes[id] ** 3 for id in points) / (CORES * speed),
        "assignments of gated MLPs": sum(ASSIGNMENT * sizes[id] ** 2.5 for id in assigned) / (CORES * speed),
        "samples, written and read": 2 * memory.samples / reading,
    }
    return {"seconds": seconds, "samples": memory.samples, "maps": memory.maps, "memory": memory.total}


def outlook(machine: Machine) -> dict[str, Any]:
    """Return what 8 B and 70 B take, on paper."""
    return {
        name: {
            "plan": planned(config, "guarded", 5, machine),
            "pass": one_pass(config, "guarded", machine),
            "functional": functional(config, machine),
        }
        for name, config in LARGER.items()
    }


def exponent(runs: Sequence[Results], start: Results | None, what: str) -> tuple[float | None, int]:
    """Return the power of parameters by which runs grow beyond the start of the program, and the points."""
    if start is None:
        return None, 0
    points = [
        (one["parameters"], one[what] - start[what]) for one in runs if one[what] > BEYOND * start[what]
    ]
    sizes = [size for size, _ in points]
    return growth(points) if points and max(sizes) >= SPAN * min(sizes) else None, len(points)
