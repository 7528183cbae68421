"""Align: from two models to an alignment.

Settings, the opened pair, the method, then its evidence: weights, for a search (`search`), or activations
(`functional`, `other_shapes`). `advice` says whether to align at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.alignment.maps import Map
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import Policy
from transfusion.errors import SettingError
from transfusion.files.publishing import require_writable
from transfusion.matching.activations.probed_pair import running_within_memory
from transfusion.matching.advice import Advice, Verdict, advise, base_drift
from transfusion.matching.blocks import block_bytes, blocks
from transfusion.matching.functional import align_auto, align_functional, require_rotatable
from transfusion.matching.methods import FusionOptions, Method, MovesKind
from transfusion.matching.ot_fusion import fuse
from transfusion.matching.other_shapes import align_shapes, count_axes
from transfusion.matching.search import Search, Step, score_tensors
from transfusion.matching.settings import AlignSettings
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model, input_files
from transfusion.model.pair import Pair
from transfusion.running.live_model import HowToRun
from transfusion.runtime.engines import Engine, as_precision
from transfusion.runtime.progress import Progress
from transfusion.runtime.resources import Resources, format_bytes
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.scratch import give_back_at_once, keep_blocks_only
from transfusion.runtime.settings import verb

__all__ = ["Advice", "Step", "Verdict", "align", "plan_align"]

MUCH = 2**32
"""Bytes of two models from which memory that is not in use is given back at once, even without a limit: it
costs a share of the time that falls with the size, and would come to gigabytes."""


@verb(AlignSettings)
def align(settings: AlignSettings) -> Alignment:
    """Find how the units of A correspond to those of B.

    The result serves every fine-tune of A. With the methods ``"functional"`` and ``"auto"``, A and B may have
    different widths, depths, heads, patches, tokenizers or families; the result is then of
    other shapes on both sides.

    >>> pi = transfusion.align("models/a", "models/b", residual="tied", output="tied.safetensors")
    >>> print(pi.provenance.advice["verdict"], pi.provenance.advice["text"], sep=": ")
    alignable: the units of A were found again in B
    """
    record, chosen, resources = RunRecord("align"), settings.chosen, settings.resources
    pair = _open(settings)
    with _followed(settings.on_step, settings.progress) as following:
        if pair.difference is not None:
            found = _between_shapes(pair, chosen, settings, following)
        else:
            known, dtype = pair.with_common_tokens.under(chosen.policy), as_precision(settings.dtype)
            device = resources.device
            weights = WeightPair(known.a, known.b, vectors=chosen.vectors, dtype=dtype, device=device)
            found = _align(weights, chosen, settings, following, pair.vocabulary)
    found = replace(found, provenance=replace(found.provenance, run=record.run()))
    if settings.output is not None:
        found.save(settings.output, force=settings.force)
    return found


def _open(settings: AlignSettings) -> Pair:
    """Open the bases, and refuse what can be refused from their headers."""
    chosen, output = settings.chosen, settings.output
    pair = Pair.open(
        settings.a,
        settings.b,
        settings.config,
        settings.progress,
        settings.vocabulary_share,
        other_shapes=chosen.functional is not None,
    )
    _refuse_rotation(chosen, pair)
    if output is not None:
        inputs = input_files(pair.a, pair.b)
        require_writable(Path(output), force=settings.force, inputs=inputs, folder=False)
    if pair.difference is not None:
        _refuse_limits(chosen, settings.resources)
    return pair


def _refuse_rotation(chosen: Method, pair: Pair) -> None:
    """Refuse functional maps, where nothing else is tried, of models whose stream cannot be rotated."""
    alone = not chosen.searches or pair.difference is not None
    if chosen.functional is not None and alone:
        require_rotatable(pair.a, pair.b)


def _between_shapes(
    pair: Pair,
    chosen: Method,
    settings: AlignSettings,
    on_step: Callable[[Step], None],
) -> Alignment:
    """Align two models of different shapes, by activations alone."""
    assert chosen.functional is not None
    made = _provenance(pair.a, pair.b, chosen, torch.float64, settings.seed, pair.vocabulary)
    done = count(1)

    def on_axis(name: str, total: int) -> None:
        on_step(Step("pass", 0, next(done), total, name, None))

    provenance, force = replace(made, policy=Policy()), settings.force_unrelated
    return align_shapes(pair.a, pair.b, chosen.functional, provenance, force_unrelated=force, on_axis=on_axis)


@verb(AlignSettings)
def plan_align(settings: AlignSettings) -> dict[str, int]:
    """Return how much `align` would read, from headers alone; refuse what it would refuse."""
    pair, chosen = _open(settings), settings.chosen
    read = pair.a.checkpoint.nbytes + pair.b.checkpoint.nbytes
    if pair.difference is not None:
        return {"axes": count_axes(pair.a, pair.b), "bytes_to_read": read}
    pair = pair.under(chosen.policy)
    weights = WeightPair(pair.a, pair.b, vectors=chosen.vectors, dtype=as_precision(settings.dtype))
    _within_memory(weights, chosen, settings.resources)
    return {"axes": len(pair.a.architecture.free()), "bytes_to_read": read}


def _align(
    weights: WeightPair,
    chosen: Method,
    settings: AlignSettings,
    on_step: Callable[[Step], None],
    vocabulary: Mapping[str, Any],
) -> Alignment:
    """Align two models by a method."""
    a, b, dtype, seed = weights.a, weights.b, weights.place["dtype"], settings.seed
    resources, kept = _within_memory(weights, chosen, settings.resources)
    if resources.memory is not None:
        give_back_at_once()
    elif weights.nbytes > MUCH:
        keep_blocks_only()
    threads = torch.get_num_threads()
    how = HowToRun(
        workers=(resources.jobs or threads) if resources.shared else threads,
        device=resources.device,
        limit=resources.memory,
        shared=resources.shared,
        note=settings.progress.note,
    )
    with resources.opened() as engine:
        metadata = _provenance(a, b, chosen, dtype, seed, vocabulary)
        if chosen.fusion is not None:
            return _fused(weights, chosen.fusion, metadata, on_step)
        if chosen.functional is not None and not chosen.searches:
            return align_functional(weights, chosen.functional, metadata, on_step, engine, how)
        if not chosen.searches:
            return _without_search(weights, chosen, metadata, engine)
        search = Search(weights, chosen, seed=seed, engine=engine, limit=kept, on_step=on_step)
        trial = search.run()
        info = advise(search, trial) if settings.advice or chosen.follows_advice else None
        drift = base_drift(weights, trial.maps, engine) if info and info.verdict is Verdict.ADD else None
        metadata = replace(
            metadata,
            gap=max(trial.gaps.values(), default=0.0),
            objective=tuple(trial.trace),
            advice={**(info.as_dict() if info else {}), **({"drift": drift} if drift else {})},
        )
        if info and chosen.follows_advice and chosen.functional is not None:
            if info.verdict is not Verdict.ADD:
                return align_auto(weights, trial.maps, chosen.functional, metadata, on_step, engine, how)
            metadata = replace(metadata, objective=tuple(trial.trace[:1]))
            return Alignment.of({}, a.architecture, metadata)
        return Alignment.of(trial.maps, a.architecture, metadata)


def _refuse_limits(method: Method, resources: Resources) -> None:
    """Refuse a memory or a cluster for a method that holds whole models."""
    idle = [f"memory of {format_bytes(resources.memory)}"] if resources.memory is not None else []
    idle += [f"engine = {resources.engine!r}"] if resources.engine != "local" else []
    if idle:
        raise SettingError(
            f"{idle[0]}: the method {method.name} holds whole models in this process",
            hint="leave out `memory` and `engine`, or choose a method that compares weights, such as guarded",
        )


def _within_memory(weights: WeightPair, method: Method, resources: Resources) -> tuple[Resources, int | None]:
    """Return the resources with as many threads as fit, and the bytes that are left for gains."""
    if method.fusion is not None:
        _refuse_limits(method, resources)
    if not resources.shared and resources.device != "cpu":
        raise SettingError(
            f"device {resources.device!r}: workers of Ray compute on cpu",
            hint="leave out `device`, or `engine`",
        )
    if (memory := resources.memory) is None:
        return resources, None
    kept = None
    if method.searches:
        needs = {block.ids[0]: block_bytes(weights, block) for block in blocks(weights, method)}
        largest = max(needs, key=needs.__getitem__, default="")
        each = needs.get(largest, 0)
        resources = resources.within_memory(each, f"solving {largest}")
        threads = (resources.jobs or 1) if resources.shared else 1
        kept = memory - resources.program - threads * each
    if method.functional is not None:
        if method.functional.gradients:
            raise SettingError(
                f"memory of {format_bytes(memory)}: gradients need whole models",
                hint="leave out `memory`, or `gradients`",
            )
        resources = running_within_memory(weights.a, weights.b, method.functional, resources)
    return resources, kept


def _provenance(
    a: Model, b: Model, chosen: Method, dtype: torch.dtype, seed: int, vocabulary: Mapping[str, Any]
) -> Provenance:
    return Provenance(
        family=a.family.name,
        architecture=a.architecture.digest(),
        policy=chosen.policy,
        method=chosen.name,
        options={**chosen.options(), "dtype": str(dtype).removeprefix("torch.")},
        seed=seed,
        source=a.label,
        source_fingerprint=a.fingerprint,
        target=b.label,
        target_fingerprint=b.fingerprint,
        vocabulary=vocabulary,
    )


@contextmanager
def _followed(on_step: Callable[[Step], None], progress: Progress) -> Iterator[Callable[[Step], None]]:
    """Show every step on a bar that starts anew with every sweep."""
    sweep = ("", -1)
    with progress.bar(text="reading") as advance:

        def show(step: Step) -> None:
            nonlocal sweep
            on_step(step)
            name = f"{step.trial}, sweep {step.sweep + 1}"
            if (step.trial, step.sweep) != sweep and step.objective is not None:
                progress.detail(f"{name}: objective {step.objective:.6g} before it")
            sweep = (step.trial, step.sweep)
            objective = "" if step.objective is None else f" · objective {step.objective:.4g}"
            advance(f"{name} · {step.axis}{objective}", step.done, step.total)

        yield show


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


def _without_search(weights: WeightPair, method: Method, metadata: Provenance, engine: Engine) -> Alignment:
    """Nothing moved, or everything at random."""
    maps: dict[str, Map] = (
        random_maps(weights.architecture, metadata.seed) if method.moves is MovesKind.RANDOM else {}
    )
    names = list(weights.tensors)
    states = ({}, maps)[: 1 + bool(maps)]
    trace = [sum(score_tensors(weights, names, state, engine).values()) for state in states]
    return Alignment.of(maps, weights.architecture, replace(metadata, objective=tuple(trace)))
