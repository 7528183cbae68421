"""Matching: from two models to an alignment.

`blocks` says which axes are solved together and how, `search` in which order and how often, `objective`
keeps the objective, `advice` says whether to align at all, and `functional_choice` compares activations.
The evidence is in the folders `weights` and `activations`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import torch

from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.alignment.maps import Map
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import InnerPolicy, Residual
from transfusion.errors import SettingError
from transfusion.matching.advice import Advice, Verdict, advise
from transfusion.matching.functional_choice import align_auto, align_functional
from transfusion.matching.methods import DEFAULT, FusionOptions, Method, MovesKind, preset
from transfusion.matching.ot_fusion import fuse
from transfusion.matching.search import UNMOVED, Search, Step, Trial
from transfusion.matching.search_journal import SearchJournal
from transfusion.matching.search_memory import plan_memory, within_memory
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model, Reference, require_same_shape, take_hashes
from transfusion.runtime.clock import Clock
from transfusion.runtime.engines import Engine, open_engine
from transfusion.runtime.scratch import give_back_at_once

__all__ = ["Advice", "Step", "Verdict", "align", "plan_memory"]

MUCH = 2**32
"""Bytes of two models from which memory that is not in use is given back at once, even without a limit: it
costs a share of the time that falls with the size, and would come to gigabytes."""


def align(
    a: Model | Reference,
    b: Model | Reference,
    *,
    method: str | Method = DEFAULT,
    residual: Residual | str | None = None,
    inner: InnerPolicy | str | None = None,
    seed: int = 0,
    jobs: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    memory: int | None = None,
    engine: str | Engine = "local",
    address: str | None = None,
    advice: bool = True,
    journal: str | Path | None = None,
    clock: Clock | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Alignment:
    """Find how the units of A correspond to those of B.

    The result is kept with ``align("models/a", "models/b").save("pi.safetensors")`` and is then good for
    any number of fine-tunes of A. ``method`` is the name of a preset, or one changed to your wishes, as in
    ``preset("transfusion").changed(outputs=True, order="random", restarts=3)``. With a ``journal``, a file
    that an interrupted search is taken up from, nothing is lost; ``clock`` is told where the time went.
    ``memory`` is how many bytes this process, or with ``engine="ray"`` each worker, may take; neither changes
    what comes out.

    >>> pi = transfusion.align("models/a", "models/b", residual="tied")
    >>> print(pi.provenance.advice["verdict"], pi.provenance.advice["text"], sep=": ")
    alignable: the units of A were found again in B: move the task vector by this π
    """
    chosen = method if isinstance(method, Method) else preset(method)
    chosen = chosen.changed(residual=residual, inner=inner)
    if seed < 0:
        raise SettingError(f"seed = {seed}: a seed cannot be negative", hint="give 0 or more")
    if dtype not in (torch.float32, torch.float64):
        raise SettingError(f"dtype = {dtype}: sums would lose their digits", hint="choose float32 or float64")
    a, b = (
        (model if isinstance(model, Model) else Model.open(model)).under(chosen.policy) for model in (a, b)
    )
    require_same_shape(a, b)
    weights = WeightPair(a, b, vectors=chosen.vectors, dtype=dtype, device=device, clock=clock)
    budget = within_memory(weights, chosen, memory, engine, jobs)
    if memory is not None or weights.nbytes > MUCH:
        give_back_at_once()
    with open_engine(engine, jobs=budget.threads if engine == "local" else jobs, address=address) as hands:
        take_hashes(a, b, engine=hands, checked=True)
        metadata = Provenance(
            family=a.family.name,
            architecture=a.architecture.digest(),
            policy=chosen.policy,
            method=chosen.name,
            options={**chosen.options(), "dtype": str(dtype).removeprefix("torch.")},
            seed=seed,
            source=a.label,
            source_digest=a.digest,
            target=b.label,
            target_digest=b.digest,
        )
        deciding = json.dumps({**asdict(metadata), "source": "", "target": "", "dtype": dtype}, default=str)
        notes = SearchJournal(Path(journal), deciding) if journal else None
        if chosen.fusion is not None:
            return _fused(weights, chosen.fusion, metadata, on_step)
        if chosen.functional is not None and not chosen.searches:
            return align_functional(weights, chosen.functional, metadata, on_step)
        if not chosen.searches:
            return _without_search(weights, chosen, metadata)
        search = Search(
            weights,
            chosen,
            seed=seed,
            engine=hands,
            limit=budget.kept,
            room=budget.room,
            on_step=on_step,
            on_sweep=notes.note if notes else lambda trial: None,
            known=notes.recall() if notes else None,
        )
        trial = search.run()
        info = advise(search, trial) if advice or chosen.follows_advice else None
    if notes:
        notes.forget()
    recorded_as = info.as_dict() if info else {}
    metadata = replace(metadata, gap=max(trial.gaps.values(), default=0.0))
    if info and chosen.follows_advice and chosen.functional is not None:
        if info.verdict is not Verdict.ADD:
            metadata = replace(metadata, objective=tuple(trial.trace), advice=recorded_as)
            return align_auto(weights, trial.maps, chosen.functional, metadata, on_step)
        trial = Trial(UNMOVED, {}, trial.trace[:1])
    metadata = replace(metadata, objective=tuple(trial.trace), advice=recorded_as)
    return Alignment.of(trial.maps, a.architecture, metadata)


def _fused(
    weights: WeightPair, options: FusionOptions, metadata: Provenance, on_step: Callable[[Step], None]
) -> Alignment:
    """A plan for every axis, in one pass."""
    before, total, done = weights.objective({}), len(weights.architecture.free()), count(1)

    def on_axis(id: str) -> None:
        on_step(Step("pass", 0, next(done), total, id, before))

    maps = fuse(weights.a, weights.b, options, on_axis=on_axis, **weights.place)
    trace = (before, weights.objective(maps))
    return Alignment.of(maps, weights.architecture, replace(metadata, objective=trace))


def _without_search(weights: WeightPair, method: Method, metadata: Provenance) -> Alignment:
    """Nothing moved, or everything at random."""
    maps: dict[str, Map] = (
        random_maps(weights.architecture, metadata.seed) if method.moves is MovesKind.RANDOM else {}
    )
    trace = [weights.objective(moved) for moved in ({}, maps)[: 1 + bool(maps)]]
    return Alignment.of(maps, weights.architecture, replace(metadata, objective=tuple(trace)))
