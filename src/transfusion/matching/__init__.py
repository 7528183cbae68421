"""Matching: from two models to an alignment.

`blocks` says what is solved in one go and how, `search` in which order and how often, `scores` what
it has come to, `advice` whether it was worth it, and `turning` asks what both models compute. The evidence
itself is in the folders `evidence` and `functional`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import torch

from transfusion.alignment import Alignment, random_maps
from transfusion.architecture import Inner, Residual
from transfusion.clock import Clock
from transfusion.engines import Engine, hired
from transfusion.errors import SettingError
from transfusion.evidence.weights import Weights
from transfusion.fusion import fuse
from transfusion.maps import Map
from transfusion.matching.advice import Advice, Verdict, advise
from transfusion.matching.budget import budgeted, planned
from transfusion.matching.journal import Journal
from transfusion.matching.search import AT_HOME, Search, Step, Trial
from transfusion.matching.turning import best, turned
from transfusion.methods import DEFAULT, Fusion, Method, Moves, preset
from transfusion.model import Model, Reference, require_same_shape, take_hashes
from transfusion.provenance import Provenance
from transfusion.scratch import give_back_at_once

__all__ = ["Advice", "Step", "Verdict", "align", "planned"]

MUCH = 2**32
"""Bytes of two models from which memory that is not in use is given back at once, even without a limit: it
costs a share of the time that falls with the size, and would come to gigabytes."""


def align(
    a: Model | Reference,
    b: Model | Reference,
    *,
    method: str | Method = DEFAULT,
    residual: Residual | str | None = None,
    inner: Inner | str | None = None,
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
    weights = Weights(a, b, vectors=chosen.vectors, dtype=dtype, device=device, clock=clock)
    budget = budgeted(weights, chosen, memory, engine, jobs)
    if memory is not None or weights.nbytes > MUCH:
        give_back_at_once()
    with hired(engine, jobs=budget.threads if engine == "local" else jobs, address=address) as hands:
        take_hashes(a, b, engine=hands, checked=True)
        story = Provenance(
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
        deciding = json.dumps({**asdict(story), "source": "", "target": "", "dtype": dtype}, default=str)
        notes = Journal(Path(journal), deciding) if journal else None
        if chosen.fusion is not None:
            return _fused(weights, chosen.fusion, story, on_step)
        if chosen.functional is not None and not chosen.searches:
            return turned(weights, chosen.functional, story, on_step)
        if not chosen.searches:
            return _without_search(weights, chosen, story)
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
        told = advise(search, trial) if advice or chosen.follows_advice else None
    if notes:
        notes.forget()
    told_as = told.as_dict() if told else {}
    story = replace(story, gap=max(trial.gaps.values(), default=0.0))
    if told and chosen.follows_advice and chosen.functional is not None:
        if told.verdict is not Verdict.ADD:
            story = replace(story, objective=tuple(trial.trace), advice=told_as)
            return best(weights, trial.maps, chosen.functional, story, on_step)
        trial = Trial(AT_HOME, {}, trial.trace[:1])
    story = replace(story, objective=tuple(trial.trace), advice=told_as)
    return Alignment.of(trial.maps, a.architecture, story)


def _fused(
    weights: Weights, options: Fusion, story: Provenance, on_step: Callable[[Step], None]
) -> Alignment:
    """A plan for every axis, in one pass."""
    before, total, done = weights.objective({}), len(weights.architecture.free()), count(1)

    def on_axis(id: str) -> None:
        on_step(Step("pass", 0, next(done), total, id, before))

    maps = fuse(weights.a, weights.b, options, on_axis=on_axis, **weights.place)
    trace = (before, weights.objective(maps))
    return Alignment.of(maps, weights.architecture, replace(story, objective=trace))


def _without_search(weights: Weights, method: Method, story: Provenance) -> Alignment:
    """Nothing moved, or everything at random."""
    maps: dict[str, Map] = (
        random_maps(weights.architecture, story.seed) if method.moves is Moves.RANDOM else {}
    )
    trace = [weights.objective(moved) for moved in ({}, maps)[: 1 + bool(maps)]]
    return Alignment.of(maps, weights.architecture, replace(story, objective=tuple(trace)))
