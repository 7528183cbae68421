"""Align: from two models to an alignment.

Settings, the opened pair, the method, then its evidence: weights, for a search (`search`), or activations
(`functional`, `other_shapes`). `advice` says whether to align at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.alignment.maps import Map
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import Policy
from transfusion.errors import SettingError, UselessResultError
from transfusion.files.publishing import require_writable
from transfusion.matching.activations import running_within_memory
from transfusion.matching.advice import Advice, Verdict, advise, base_drift, what_else
from transfusion.matching.functional import align_auto, align_functional, counting, require_rotatable
from transfusion.matching.methods import Method, MovesKind
from transfusion.matching.ot_fusion import fuse
from transfusion.matching.other_shapes import align_shapes, count_axes, depths
from transfusion.matching.search import Search, Step, block_bytes, search_blocks
from transfusion.matching.settings import AlignSettings
from transfusion.matching.weights import WeightPair, tensor_products
from transfusion.model.model import Model, input_files
from transfusion.model.pair import Pair, require_same_shape
from transfusion.running.streaming import RunConfig
from transfusion.runtime.engines import Engine, as_precision
from transfusion.runtime.progress import Progress
from transfusion.runtime.resources import Resources, format_bytes
from transfusion.runtime.run_record import COMMAND, RunRecord
from transfusion.runtime.scratch import give_back_at_once, keep_blocks_only
from transfusion.runtime.settings import verb

__all__ = ["Advice", "Step", "Verdict", "align", "plan_align"]

MUCH = 2**32
"""Bytes of two models from which the C library keeps no large blocks that were freed: those would come to
gigabytes."""


@verb(AlignSettings)
def align(settings: AlignSettings) -> Alignment:
    """Find how the units of A correspond to those of B.

    The result serves every fine-tune of A. By default, nothing moves where B descends from A, units are
    permuted where they are found again, and else it stops. With the method ``"functional"``, A and B may have
    different widths, depths, heads, patches, tokenizers or families.

    >>> pi = transfusion.align("models/a", "models/b", residual="tied", output="tied.safetensors")
    >>> print(pi.provenance.advice["verdict"], pi.provenance.advice["text"], sep=": ")
    alignable: the units of A were found again in B
    """
    pair = _open(settings)
    found = align_pair(pair, settings)
    if settings.chosen.follows_advice and not (settings.goes_on or settings.force_unrelated):
        require_match(pair, found.provenance.advice, refines=True)
    if settings.output is not None:
        found.save(settings.output, force=settings.force)
    return found


def require_match(pair: Pair, advice: Mapping[str, Any], *, refines: bool) -> None:
    """Refuse bases whose units no permutation matches; say what else to do, if the verb ``refines``."""
    if pair.difference is None and advice.get("verdict") != Verdict.DOUBT:
        return
    refines = refines and not pair.of_kin  # only adapters move between those, as they are
    rotates = not (pair.a.architecture.unrotated or pair.b.architecture.unrotated)
    if pair.difference is not None:
        if not rotates or set(pair.a.family.inputs) != set(pair.b.family.inputs):
            require_same_shape(pair.a, pair.b)  # no method can do anything
        depths(pair.a, pair.b)
        reason = f"they have different shapes ({pair.difference}), and weights cannot be compared"
    else:
        reason = str(advice["text"])
    hint = what_else(refines=refines, rotates=rotates, insists=pair.difference is None)
    typed = COMMAND.get() or ""
    raise UselessResultError(
        f"nothing was written: {pair.a.label} and {pair.b.label} are {Verdict.DOUBT}: {reason}",
        hint=hint,
        command=f"{typed} --refine" if refines and typed.startswith("transfusion transport ") else None,
    )


def align_pair(pair: Pair, settings: AlignSettings) -> Alignment:
    """Align two models that have been opened and compared."""
    _require_alignable(pair, settings)
    record, chosen, resources = RunRecord("align"), settings.chosen, settings.resources
    with _followed(settings.on_step, settings.progress) as following:
        if pair.difference is not None:
            found = _between_shapes(pair, chosen, settings, following)
        else:
            known, dtype = pair.with_common_tokens.under(chosen.policy), as_precision(settings.dtype)
            device = resources.device
            weights = WeightPair(known.a, known.b, vectors=chosen.vectors, dtype=dtype, device=device)
            found = _align(weights, chosen, settings, following, pair.vocabulary)
    return replace(found, provenance=replace(found.provenance, run=record.run()))


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
        kin=True,
    )
    if output is not None:
        inputs = input_files(pair.a, pair.b)
        require_writable(Path(output), force=settings.force, inputs=inputs, folder=False)
    _require_alignable(pair, settings)
    return pair


def _require_alignable(pair: Pair, settings: AlignSettings) -> None:
    """Refuse models and limits that the method cannot work with."""
    chosen = settings.chosen
    if chosen.follows_advice and not (settings.goes_on or settings.force_unrelated):
        require_match(pair, {}, refines=True)
    if chosen.functional is not None and (not chosen.searches or pair.difference is not None):
        require_rotatable(pair.a, pair.b)  # nothing else is tried
    if pair.difference is not None:
        _refuse_limits(chosen, settings.resources)
        depths(pair.a, pair.b)


def _between_shapes(
    pair: Pair, chosen: Method, settings: AlignSettings, on_step: Callable[[Step], None]
) -> Alignment:
    """Align two models of different shapes, by activations alone."""
    assert chosen.functional is not None
    made = _provenance(pair.a, pair.b, chosen, torch.float64, settings.seed, pair.vocabulary)
    return align_shapes(
        pair.a,
        pair.b,
        chosen.functional,
        replace(made, policy=Policy()),
        force_unrelated=settings.force_unrelated,
        device=settings.resources.device,
        on_axis=counting("pass", on_step),
    )


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
    run_config = RunConfig(
        workers=(resources.jobs or threads) if resources.shared else threads,
        device=resources.device,
        limit=resources.memory,
        note=settings.progress.note,
    )
    with resources.opened() as engine:
        metadata = _provenance(a, b, chosen, dtype, seed, vocabulary)
        if chosen.functional is not None and not chosen.searches:
            return align_functional(weights, chosen.functional, metadata, on_step, engine, run_config)
        if not chosen.searches:
            return _without_search(weights, chosen, metadata, engine, on_step)
        search = Search(weights, chosen, seed=seed, engine=engine, limit=kept, on_step=on_step)
        trial = search.run()
        info = advise(search, trial) if settings.advice else None
        drift = base_drift(weights, trial.maps, engine) if info and info.verdict is Verdict.ADD else None
        metadata = replace(
            metadata,
            gap=max(trial.gaps.values(), default=0.0),
            objective=tuple(trial.trace),
            advice={**(info.as_dict() if info else {}), **({"drift": drift} if drift else {})},
        )
        if info and chosen.follows_advice and chosen.functional is not None:
            if info.verdict is Verdict.ADD:
                metadata = replace(metadata, objective=tuple(trial.trace[:1]))
                return Alignment.of({}, a.architecture, metadata)
            if info.verdict is Verdict.DOUBT and settings.goes_on:
                return align_auto(
                    weights, trial.maps, chosen.functional, metadata, on_step, engine, run_config
                )
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
        needs = {block.ids[0]: block_bytes(weights, block) for block in search_blocks(weights, method)}
        largest = max(needs, key=needs.__getitem__, default="")
        each = needs.get(largest, 0)
        resources = resources.within_memory(each, f"solving {largest}")
        threads = (resources.jobs or 1) if resources.shared else 1
        kept = memory - resources.program - threads * each
    if method.functional is not None and not method.searches:
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


def _without_search(
    weights: WeightPair, method: Method, metadata: Provenance, engine: Engine, on_step: Callable[[Step], None]
) -> Alignment:
    """Return the identity, random maps, or a transport plan for every axis."""
    maps: dict[str, Map] = {}
    if method.fusion is not None:
        maps = fuse(weights.a, weights.b, method.fusion, on_axis=counting("pass", on_step), **weights.place)
    elif method.moves is MovesKind.RANDOM:
        maps = random_maps(weights.architecture, metadata.seed)
    states = ({}, maps)[: 1 + bool(maps)]
    scores = [tensor_products(weights, list(weights.tensors), state, engine) for state in states]
    trace = tuple(sum(one for (one,) in found.values()) for found in scores)
    return Alignment.of(maps, weights.architecture, replace(metadata, objective=trace))
