"""The driver: from two models to an alignment.

Each sweep visits every free axis in the order in which a signal meets it, gathers the evidence with
all other axes at their current maps, and solves for a new map; sweeps go on until nothing changes
(Algorithm 1). A parent, such as a head, is matched before what lies within it, by a score that its
inner order cannot change (Algorithm 2, step 1); that score depends on no map, so it is solved once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import torch

from transfusion.alignment import Alignment, Provenance, random_maps
from transfusion.architecture import Inner, Residual
from transfusion.errors import SettingError
from transfusion.evidence.weights import Weights
from transfusion.maps import Map
from transfusion.methods import Method, Start, preset
from transfusion.model import Model, require_same_shape
from transfusion.solvers.assignment import assign


@dataclass(frozen=True)
class Step:
    """What the driver reports after each axis: for progress bars and logs."""

    sweep: int
    done: int
    total: int
    axis: str
    objective: float


def align(
    a: Model | str | Path,
    b: Model | str | Path,
    *,
    method: str | Method = "transfusion",
    residual: Residual | str | None = None,
    inner: Inner | str | None = None,
    start: Start | str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    on_step: Callable[[Step], None] = lambda step: None,
) -> Alignment:
    """Find how the units of A correspond to those of B.

    The result is kept with ``align("models/a", "models/b").save("pi.safetensors")`` and is then good for
    any number of fine-tunes of A.
    """
    chosen = method if isinstance(method, Method) else preset(method)
    chosen = replace(
        chosen,
        policy=replace(
            chosen.policy,
            residual=one_of(Residual, residual, "residual") if residual else chosen.policy.residual,
            inner=one_of(Inner, inner, "inner") if inner else chosen.policy.inner,
        ),
        start=one_of(Start, start, "start") if start else chosen.start,
    )
    if seed < 0:
        raise SettingError(f"seed = {seed}: a seed cannot be negative", hint="give 0 or more")
    a, b = (
        (model if isinstance(model, Model) else Model.open(model)).under(chosen.policy) for model in (a, b)
    )
    require_same_shape(a, b)
    maps: dict[str, Map]
    weights = Weights(a, b, vectors=chosen.vectors, dtype=dtype, device=device)
    if chosen.name == "naive":
        maps, trace = {}, [weights.objective({})]
    elif chosen.name == "random":
        maps = random_maps(a.architecture, seed)
        trace = [weights.objective({}), weights.objective(maps)]
    else:
        maps, trace = _sweep_until_still(weights, chosen, on_step)
    return Alignment.of(
        maps,
        a.architecture,
        Provenance(
            family=a.family.name,
            architecture=a.architecture.digest(),
            policy=chosen.policy,
            method=chosen.name,
            options=chosen.options(),
            seed=seed,
            source=a.label,
            source_digest=a.digest,
            target=b.label,
            target_digest=b.digest,
            objective=tuple(trace),
        ),
    )


_Choice = TypeVar("_Choice", bound=StrEnum)


def one_of(kind: type[_Choice], value: str, name: str) -> _Choice:
    """The choice that a word names, or an error that lists the choices."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise SettingError(f"{name} = {value!r} is not a choice", hint=f"choose one of {known}") from None


def _sweep_until_still(
    weights: Weights, chosen: Method, on_step: Callable[[Step], None]
) -> tuple[dict[str, Map], list[float]]:
    maps: dict[str, Map] = {}
    trace = [weights.objective(maps)]
    axes = [space for space in weights.architecture.free() if weights.speaks_of(space.id)]
    for sweep in range(chosen.max_sweeps):
        changed = False
        for done, space in enumerate(axes, 1):
            parent = space.id in weights.architecture.children
            if not (parent and sweep):
                settled = maps if chosen.start is Start.SETTLED and not sweep else None
                found = _solve(weights, chosen, space.id, maps, settled, parent=parent)
                if found != maps.get(space.id):
                    maps[space.id] = found
                    changed = True
            on_step(Step(sweep, done, len(axes), space.id, trace[-1]))
        trace.append(weights.objective(maps))
        if not changed:
            break
    return maps, trace


def _solve(
    weights: Weights,
    chosen: Method,
    id: str,
    maps: dict[str, Map],
    settled: dict[str, Map] | None,
    *,
    parent: bool,
) -> Map:
    if parent:
        distance = weights.spectral_distance(id, produced_only=chosen.produced_only)
        return assign(-distance[None])
    within = id in weights.architecture.parents
    produced_only = chosen.produced_only and within
    return assign(weights.gain(id, maps, produced_only=produced_only, settled=settled))
