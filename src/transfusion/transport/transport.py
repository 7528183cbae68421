"""The functions `transport` and `merge`: B + α·π(τ), a checkpoint that loads where B does, or an adapter.

Both go straight down: open the bases and the fine-tunes, refuse from headers what can be refused, load or
find π, choose α, move, perhaps refine, and write in a staging folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.errors import SettingError, UselessResultError
from transfusion.files.publishing import require_writable
from transfusion.files.references import resolve
from transfusion.files.staging import StagingFolder, open_staging
from transfusion.matching.advice import Verdict
from transfusion.matching.settings import MatchingSettings
from transfusion.model.model import Model, input_files
from transfusion.model.pair import Pair
from transfusion.runtime.progress import Progress
from transfusion.runtime.resources import format_bytes
from transfusion.runtime.run_record import COMMAND, RunRecord
from transfusion.runtime.settings import recorded, verb
from transfusion.transport.adapters.lora_file import OtherParts, is_lora_file
from transfusion.transport.alpha import AUTO, Alpha, AlphaArgument
from transfusion.transport.finetunes import Finetune, open_finetune
from transfusion.transport.merge_rules import MergeRule
from transfusion.transport.merging import checked_merge
from transfusion.transport.output import Output
from transfusion.transport.plan import TransportPlan
from transfusion.transport.record import OutputRecord
from transfusion.transport.refinement.refine import refine
from transfusion.transport.refinement.settings import RefinementSettings, refinement_settings
from transfusion.transport.settings import MergeSettings, MovingSettings, TransportSettings

__all__ = ["merge", "transport"]

SettingsT = TypeVar("SettingsT", bound=MatchingSettings)
_PATHS = ("via", "config", "architecture", "calibrate")
_BESIDE_RECORD = {"finetuned", "base", "onto", "via", "architecture"}
"""Settings that may be given beside a record: where the inputs are now."""


@verb(TransportSettings)
def transport(settings: TransportSettings) -> Output:
    """Move a fine-tune of A onto B: B + α·π(τ). An adapter becomes an adapter for B.

    The result computes tensors when asked: ``save`` writes them as a model or adapter for B, ``state_dict``
    and ``module`` return them in memory. With ``output`` it is written at once.

    >>> moved = transfusion.transport("models/tuned", base="models/a", onto="models/b", via="pi.safetensors")
    >>> print(moved.save("models/tuned-on-b"))
    models/tuned-on-b
    >>> type(moved.module()).__name__  # the same without files
    'ViTForImageClassification'

    Models may be modules, or state dicts, as well:

    >>> load = transformers.ViTForImageClassification.from_pretrained
    >>> a, b, tuned = load("models/a"), load("models/b"), load("models/tuned")
    >>> model = transfusion.transport(tuned, base=a, onto=b, alpha=0.5).module()

    An adapter becomes an adapter for B:

    >>> moved = transfusion.transport(
    ...     "models/lora", base="models/a", onto="models/b", via="pi.safetensors", output="models/lora-on-b"
    ... )
    """
    if settings.repeat is not None:
        return _repeated(settings, () if settings.finetuned is None else (settings.finetuned,))
    record, resources, progress = RunRecord("transport"), settings.resources, settings.progress
    refinement = refinement_settings(
        settings.refine,
        steps=settings.refine_steps,
        rank=settings.refine_rank,
        keep=settings.refine_keep,
        calibrate=settings.calibrate,
        seed=settings.seed,
    )
    alpha = settings.alpha
    if refinement is not None:
        _require_refinable(settings)
        if resources.device != "cpu":
            progress.note(f"note: the refinement runs on the CPU, and not on {resources.device}")
        alpha = 1.0 if alpha is None else alpha  # the refinement chooses its start by what it measures
    measured = alpha == AUTO or settings.keep_support is not None or refinement is not None
    settings = calibrated(settings, settings.via, measured=measured)
    pair, (tuned,) = _opened(settings, [settings.finetuned])
    about = OutputRecord(
        "transport",
        command=record.command,
        settings=_kept(settings, refinement=refinement and asdict(refinement)),
        record=record,
    )
    if settings.via is None or settings.dry_run:  # refuse from headers, before the search
        plan = _with(TransportPlan.planned(pair.a, pair.b, _loaded(settings.via), assumed=True), settings)
        early = _moved(plan, tuned, settings, about, alpha)
        early.within_memory(resources)
        if settings.dry_run:
            return early
    with resources.connected(), _staging(settings) as staging:
        pi = _loaded(settings.via) or _found(settings, pair, staging, insists=refinement is not None)
        plan = _with(TransportPlan.between(pair, pi), settings)
        if refinement is None:
            _warn_of_doubt(pi, progress)
            output = _moved(plan, tuned, settings, about, alpha)
        else:
            with resources.in_process():
                output = _refined(plan, tuned, settings, about, alpha, refinement, staging)
        if staging is not None:
            _write(output, staging, settings)
    return output


def _moved(
    plan: TransportPlan,
    tuned: Model | str | Path,
    settings: TransportSettings,
    about: OutputRecord,
    alpha: AlphaArgument | None,
    *,
    full: bool | None = None,
) -> Output:
    """Return B + α·π(τ) for the π of a plan."""
    return plan.transport(
        tuned,
        alpha=alpha,
        dtype=settings.dtype,
        full=settings.full if full is None else full,
        trust_base=settings.trust_base or settings.dry_run,
        new_tokens=settings.new_tokens,
        keep_support=settings.keep_support,
        calibrate=settings.calibrate,
        output_record=about,
        force_unrelated=settings.force_unrelated,
    )


def _refined(
    plan: TransportPlan,
    tuned: Model | str | Path,
    settings: TransportSettings,
    about: OutputRecord,
    alpha: AlphaArgument | None,
    refinement: RefinementSettings,
    staging: StagingFolder | None,
) -> Output:
    """Return B + α·π(τ) after its refinement."""
    full, targets = settings.full, None
    if plan.alignment.other_shape and isinstance(tuned, str | Path) and not full:
        if refinement.rank is not None:
            raise SettingError(
                "`refine_rank`: the fine-tune is an adapter, and keeps its own rank", hint="leave it out"
            )
        _, rank, targets, _ = plan.lora(tuned, Alpha(), trust_base=True)
        refinement, full = replace(refinement, rank=rank), True
    output = _moved(plan, tuned, settings, about, alpha, full=full)
    unmoved = whole = None
    if output.moved is None or output.moved.adapter.kind.scalable:
        unbound = replace(settings, keep_support=None)
        unmoved = _moved(plan, tuned, unbound, about, 0.0, full=full)
    if output.moved is not None and output.moved.carried:
        whole = plan.transport(tuned, alpha=0.0, full=True, trust_base=True, dtype=torch.float32)
    return refine(
        output,
        plan.teacher(tuned),
        plan.b,
        refinement,
        unmoved=unmoved,
        whole=whole,
        targets=targets,
        checkpoint=staging.keep("refinement.safetensors") if staging else None,
        jobs=settings.resources.jobs,
        progress=settings.progress,
    )


@verb(MergeSettings)
def merge(settings: MergeSettings) -> Output:
    """Move several fine-tunes of A onto B by one π, and combine them there.

    Adapters alone come out as an adapter. With ``full``, or if any fine-tune is a model, the result is a
    model.

    >>> both = ["models/tuned", "models/tuned-again"]
    >>> merged = transfusion.merge(both, base="models/a", onto="models/b", how="ties", via="pi.safetensors")
    >>> print(merged.save("models/both-on-b"))
    models/both-on-b
    """
    if isinstance(settings.finetuned, str | Path):
        raise SettingError("one fine-tune was given, and not a list", hint="give a list, or use transport")
    if settings.repeat is not None:
        return _repeated(settings, settings.finetuned)
    record = RunRecord("merge")
    settings = calibrated(settings, settings.via, measured=settings.alpha == AUTO)
    pair, tuned = _opened(settings, settings.finetuned)
    about = OutputRecord(
        "merge",
        command=record.command,
        settings=_kept(settings, head=settings.head, rank=settings.rank),
        record=record,
    )
    rule = MergeRule.asked(settings.how, settings.weights, settings.density, settings.seed)
    if settings.via is None or settings.dry_run:  # refuse from headers, before the search
        plan = _with(TransportPlan.planned(pair.a, pair.b, _loaded(settings.via), assumed=True), settings)
        early = checked_merge(plan, tuned, replace(rule), settings, about)
        early.within_memory(settings.resources)
        if settings.dry_run:
            return early
    with settings.resources.connected(), _staging(settings) as staging:
        pi = _loaded(settings.via) or _found(settings, pair, staging)
        _warn_of_doubt(pi, settings.progress)
        output = checked_merge(_with(TransportPlan.between(pair, pi), settings), tuned, rule, settings, about)
        if staging is not None:
            _write(output, staging, settings)
    return output


# ── opening and checking ─────────────────────────────────────────────────────────────────────


def _opened(
    settings: MovingSettings, finetuned: Sequence[Finetune | None]
) -> tuple[Pair, list[Model | str | Path]]:
    """Open the bases and the fine-tunes; refuse an output that cannot be written or that holds an input."""
    given = {"finetuned": finetuned and all(one is not None for one in finetuned), "base": settings.base}
    if missing := [f"`{name}`" for name, one in {**given, "onto": settings.onto}.items() if not one]:
        raise SettingError(
            f"{', '.join(missing)} is missing", hint="give a folder, a file or a hub id; or `repeat` a run"
        )
    assert settings.base is not None
    assert settings.onto is not None
    _require_parts(settings)
    if settings.via is not None:
        refuse_beside_via(settings.aligning)
    pi = _loaded(settings.via)
    shapes = pi.other_shape if pi is not None else settings.chosen.functional is not None
    pair = Pair.open(
        settings.base,
        settings.onto,
        settings.config,
        settings.progress,
        settings.vocabulary_share,
        other_shapes=shapes,
    )
    tuned = [
        open_finetune(one, pair.a, pair.b, settings.config, settings.progress, trust_base=settings.trust_base)
        for one in finetuned
        if one is not None
    ]
    if settings.output is not None:
        output = Path(settings.output)
        adapters = [one if isinstance(one, Model) else resolve(one) for one in tuned]
        inputs = input_files(*adapters, pair.a, pair.b, settings.via)
        require_writable(output, force=settings.force, inputs=inputs, folder=output.suffix != ".safetensors")
    return pair, tuned


def _loaded(via: Alignment | str | Path | None) -> Alignment | None:
    return Alignment.load(via) if isinstance(via, str | Path) else via


def _with(plan: TransportPlan, settings: MovingSettings) -> TransportPlan:
    return replace(plan, resources=settings.resources, other_parts=OtherParts(settings.other_parts))


def _require_parts(settings: MovingSettings) -> None:
    """Refuse to keep a LoRA file's parts for other models where the output is a model."""
    if settings.other_parts not in list(OtherParts):
        raise SettingError(
            f"other_parts = {settings.other_parts} is not a choice",
            hint=f"choose one of {', '.join(OtherParts)}",
        )
    if settings.full and settings.other_parts == OtherParts.KEEP:
        raise SettingError(
            '`other_parts="keep"`: the whole model has no place for parts of another one',
            hint='`other_parts="drop"` leaves them out',
        )


def _is_refinable(settings: MovingSettings) -> bool:
    try:
        _require_refinable(settings)
    except SettingError:
        return False
    return True


def _require_refinable(settings: MovingSettings) -> None:
    """Refuse a fine-tune that cannot be refined, and resources that a refinement cannot use."""
    memory = settings.resources.memory
    if not isinstance(settings, TransportSettings):
        raise SettingError("`refine`: a merge cannot be refined", hint="leave it out")
    if isinstance(settings.finetuned, str | Path) and is_lora_file(settings.finetuned):
        raise SettingError("`refine`: a LoRA file cannot be refined", hint="leave it out")
    if memory is not None:
        raise SettingError(
            f"memory of {format_bytes(memory)}: a refinement holds whole models", hint="leave out `memory`"
        )
    with settings.resources.in_process():
        pass


def _kept(settings: MovingSettings, **others: Any) -> dict[str, Any]:
    """Return the settings that a rerun needs, with absolute paths, so that it can start from elsewhere."""
    names = ("via", "new_tokens", "other_parts", "full", "config", "architecture", "calibrate")
    given = {name: getattr(settings, name) for name in (*names, "vocabulary_share")}
    given |= {"keep_support": getattr(settings, "keep_support", None), **others}
    if given["other_parts"] == OtherParts.REFUSE:
        del given["other_parts"]
    return {
        name: str(Path(value).resolve()) if name in _PATHS else value
        for name, value in given.items()
        if value is not None and value is not False
        if name not in _PATHS or isinstance(value, str | Path)
    }


def _repeated(settings: MovingSettings, finetuned: Sequence[Any]) -> Output:
    """Run again what a record says; refuse settings that the record decides."""
    from transfusion.transport.rerun import rerun

    decided = [name for name in recorded(settings) if name not in _BESIDE_RECORD]
    if decided:
        names = ", ".join(f"`{name}`" for name in decided)
        raise SettingError(f"`repeat` decides {names}", hint="leave it out")
    assert settings.repeat is not None
    places: dict[str, Any] = {name: getattr(settings, name) for name in ("base", "onto", "via", "output")}
    how = {name: getattr(settings, name) for name in ("force", "dry_run", "resources", "progress")}
    return rerun(settings.repeat, finetuned=finetuned, **places, **how)


# ── finding π ────────────────────────────────────────────────────────────────────────────────


def refuse_beside_via(aligning: Mapping[str, Any]) -> None:
    """Refuse parameters of `align` beside a π that is aligned already."""
    if aligning:
        names = ", ".join(f"`{name}`" for name in aligning)
        raise SettingError(
            f"{names} says how to align, and `via` is aligned already",
            hint="leave it out; or it is misspelled",
        )


def calibrated(settings: SettingsT, via: object, *, measured: bool = False) -> SettingsT:
    """Return the settings with the user's own inputs for a method that runs models.

    Refuse inputs that nothing would use: neither the method, nor what is ``measured``.
    """
    if settings.calibrate is None:
        return settings
    method = settings.chosen
    runs = via is None and method.functional is not None
    if not (runs or measured):
        raise SettingError(
            "`calibrate`: nothing would use these inputs",
            hint='leave it out, or choose `method="functional"`, `method="auto"`, `alpha="auto"` or'
            " `keep_support`",
        )
    if not runs:
        return settings
    return replace(settings, method=method.changed(calibrate=str(Path(settings.calibrate).resolve())))


def _found(
    settings: MovingSettings, pair: Pair, staging: StagingFolder | None, *, insists: bool = False
) -> Alignment:
    """Align A and B; keep π in the staging folder until the output is complete."""
    from transfusion.matching.align import align

    place = staging.keep(f"{_key(settings, pair)}.safetensors") if staging else None
    if place is not None and place.exists():
        settings.progress.note("note: going on with the π that an interrupted run had found")
        return Alignment.load(place)
    insists = insists or settings.force_unrelated
    found = align(
        pair.a,
        pair.b,
        **settings.aligning,
        seed=settings.seed,
        force_unrelated=insists,
        vocabulary_share=0.0,  # compared when both were opened
        resources=settings.resources,
        progress=settings.progress,
    )
    decided = settings.method is not None and not settings.chosen.follows_advice  # by the user
    if not decided and not insists:
        _require_alignable(settings, pair.a, pair.b, found.provenance.advice)
    if place is not None:
        found.save(place, force=True)
    return found


def _key(settings: MatchingSettings, pair: Pair) -> str:
    """A hash of everything that decides π."""
    asked = [asdict(settings.chosen), settings.seed, settings.resources.device]
    tokens = [pair.vocabulary["source"], pair.vocabulary["target"]] if pair.vocabulary else []
    text = json.dumps([asked, pair.a.fingerprint, pair.b.fingerprint, *tokens], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require_alignable(settings: MovingSettings, a: Model, b: Model, advice: Mapping[str, Any]) -> None:
    """Refuse models that the default method cannot align, or all that were tried; name the command that
    brings more.
    """
    if advice.get("verdict") != Verdict.DOUBT:
        return
    better = [] if settings.chosen.follows_advice or a.architecture.unrotated else ['`method="auto"`']
    better += ["`refine=True`"] if _is_refinable(settings) else []
    command = COMMAND.get()
    if not better:
        instead = "or fine-tune B itself"
    elif command is None:
        instead = f"give {' and '.join(better)}"
    else:
        instead = f"type this instead: {' '.join([command, *better])}"
    raise UselessResultError(
        f"nothing was written: {a.label} and {b.label} are {advice['verdict']}: {advice['text']}",
        hint=f"`force_unrelated` writes the result nevertheless; {instead}",
    )


def _warn_of_doubt(alignment: Alignment, progress: Progress) -> None:
    """Warn of a π that brings little of a fine-tune."""
    advice = alignment.provenance.advice
    if advice.get("verdict") == Verdict.DOUBT:
        progress.warn(f"{advice['verdict']}: {advice['text']}")


# ── writing ──────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _staging(settings: MovingSettings) -> Iterator[StagingFolder | None]:
    """Open the staging folder of the output, which is published at the end of the block; None without one."""
    if settings.output is None:
        yield None
        return
    with open_staging(Path(settings.output), force=settings.force) as staging:
        yield staging


def _write(output: Output, staging: StagingFolder, settings: MovingSettings) -> None:
    """Write an output into its staging folder, with its notes and a bar."""
    for note in output.notes:
        settings.progress.warn(note)
    with settings.progress.bar(len(output.tensors)) as advance:
        output.write(staging, advance, settings.resources)
    output.keep_pi(staging)
