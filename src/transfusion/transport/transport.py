"""The functions `transport` and `merge`: B + α·π(τ), a checkpoint that loads where B does, or an adapter.

Both go straight down: open the bases and the fine-tunes, refuse from headers what can be refused, load or
find π, choose α, move, perhaps refine, and write in a staging folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.errors import MismatchError, SettingError, listing
from transfusion.files.publishing import StagingFolder, open_staging, require_writable, staging_of
from transfusion.files.tensor_files import as_dtype
from transfusion.matching.advice import Verdict
from transfusion.matching.settings import AlignSettings, MatchingSettings
from transfusion.model.model import Model, Reference, input_files
from transfusion.model.pair import Pair
from transfusion.runtime.engines import require_device
from transfusion.runtime.processes import processes
from transfusion.runtime.progress import Progress, phase
from transfusion.runtime.resources import format_bytes
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.settings import verb
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.factoring import lora_between_shapes
from transfusion.transport.adapters.kinds import LORA
from transfusion.transport.adapters.lora_file import OtherParts
from transfusion.transport.alpha import AUTO, Alpha
from transfusion.transport.ask import (
    asked_denoiser_of,
    asked_of,
    base_in,
    learns_by_answers,
    learns_denoising,
    require_answers,
)
from transfusion.transport.finetunes import Finetune, check_named_base, open_finetune
from transfusion.transport.merge_rules import MergeRule
from transfusion.transport.output import Action, Output
from transfusion.transport.plan import TransportPlan, require_lora
from transfusion.transport.push import push, require_repository
from transfusion.transport.record import OutputRecord
from transfusion.transport.refinement.estimate import expecting
from transfusion.transport.refinement.refine import (
    refine,
    refine_by_answers,
    refine_denoiser,
    require_no_rank,
)
from transfusion.transport.refinement.settings import RefinementSettings, refinement_settings
from transfusion.transport.settings import MergeSettings, MovingSettings, TransportSettings

__all__ = ["merge", "transport"]

SettingsT = TypeVar("SettingsT", bound=MatchingSettings)
_PATHS = ("via", "config", "architecture", "calibrate", "answers")


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
    _require_repository(settings)
    if settings.repeat is not None:
        return _repeated(settings, () if settings.finetuned is None else (settings.finetuned,))
    refinement = refinement_settings(settings)
    asks = refinement is not None and settings.answers is None  # answers were given with their own inputs
    measured = settings.alpha == AUTO or settings.keep_support is not None or asks
    settings = with_calibration(settings, settings.via, measured=measured)
    run = _Run("transport", settings, refinement=refinement, keep_support=settings.keep_support)
    return run.output([settings.finetuned])


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
    _require_repository(settings)
    if settings.repeat is not None:
        return _repeated(settings, settings.finetuned)
    settings = with_calibration(settings, settings.via, measured=settings.alpha == AUTO)
    rule = MergeRule.asked(settings.how, settings.weights, settings.density, settings.seed)
    return _Run("merge", settings, rule, settings.head, settings.rank).output(settings.finetuned)


@dataclass
class _Run:
    """One run of `transport`, or of `merge` with its rule, from the opened inputs to the written output."""

    verb: str
    settings: MovingSettings
    rule: MergeRule | None = None
    head: int | None = None
    rank: int | None = None
    refinement: RefinementSettings | None = None
    keep_support: float | None = None
    record: OutputRecord = field(init=False)

    def __post_init__(self) -> None:
        about, kept = RunRecord(self.verb), _recorded_settings(self.settings)
        of_verb: dict[str, Any] = {"head": self.head, "rank": self.rank, "keep_support": self.keep_support}
        if self.refinement is not None:
            of_verb["refinement"] = asdict(self.refinement)
        kept |= {name: value for name, value in of_verb.items() if value is not None}
        self.record = OutputRecord(self.verb, command=about.command, settings=kept, record=about)

    def output(self, finetuned: Sequence[Finetune | Reference | None]) -> Output:
        """Open, align, move, refine and write."""
        settings = self.settings
        require_device(settings.resources.device)
        given = Alignment.load(settings.via) if isinstance(settings.via, str | Path) else settings.via
        pair, tuned = _open_inputs(settings, finetuned, given)
        if self.refinement is not None:
            _require_refinable(settings)
        if settings.via is None or settings.dry_run:  # refuse from headers, before the search
            plan = TransportPlan.planned(pair.a, pair.b, given, assumed=True)
            early = self.moved(plan, tuned)
            early.within_memory(settings.resources)
            if self.refinement is not None:
                self._require_learnable(plan, tuned[0], self.refinement)
            if settings.dry_run and self.refinement is not None and learns_by_answers(plan, tuned[0]):
                asks = getattr(settings, "answers", None) is None
                with phase("measuring how fast this machine is"):
                    return expecting(plan.a.to_run, early, self.refinement, asks, settings.resources.device)
            if settings.dry_run:
                return early
        with settings.resources.connected(), _staging(settings) as staging:
            pi = given or _find_pi(settings, pair, tuned, staging, refines=self.refinement is not None)
            plan = replace(TransportPlan.between(pair, pi), resources=settings.resources)
            if self.refinement is None:
                _warn_of_doubt(pi, settings.progress)
                output = self.moved(plan, tuned)
            else:
                with settings.resources.in_process():
                    output = self.refined(plan, tuned[0], self.refinement, staging)
            if staging is not None and processes().is_main:
                _write(output, staging, settings)
        if settings.push is not None and settings.output is not None and processes().is_main:
            output.uploaded = push(output, Path(settings.output), settings.push)
        processes().wait()
        return output

    def moved(self, plan: TransportPlan, tuned: Sequence[Finetune], *, full: bool | None = None) -> Output:
        """Choose α, and return B + α·π(τ)."""
        settings, asked = self.settings, self.settings.alpha
        if self.refinement is not None and asked is None:
            asked = 1.0  # the refinement chooses its start by what it measures
        alpha, record = plan.choose_alpha(
            asked,
            tuned,
            self.record,
            self.rule,
            head=self.head,
            new_tokens=settings.new_tokens,
            calibrate=settings.calibrate,
            keep_support=self.keep_support,
            force_unrelated=settings.force_unrelated,
        )
        by_weights = asked == AUTO and "not_tried" in (record.output_shift or {})
        return self.moved_by(plan, tuned, alpha, record, full=full, by_weights=by_weights)

    def moved_by(
        self,
        plan: TransportPlan,
        tuned: Sequence[Finetune],
        alpha: Alpha,
        record: OutputRecord,
        *,
        full: bool | None = None,
        by_weights: bool = False,
    ) -> Output:
        """Return B + α·π(τ) for a given α."""
        settings = self.settings
        return plan.move(
            tuned,
            alpha,
            self.rule,
            full=settings.full if full is None else full,
            head=self.head,
            rank=self.rank,
            dtype=settings.dtype,
            trust_base=settings.trust_base or settings.dry_run,
            new_tokens=settings.new_tokens,
            record=record,
            by_weights=by_weights,
        )

    def refined(
        self,
        plan: TransportPlan,
        tuned: Finetune,
        refinement: RefinementSettings,
        staging: StagingFolder | None,
    ) -> Output:
        """Return B + α·π(τ) after its refinement."""
        self._require_learnable(plan, tuned, refinement)
        settings = self.settings
        how: dict[str, Any] = {
            "checkpoint": staging.keep("refinement.safetensors") if staging else None,
            "insists": settings.force_unrelated,
            "progress": settings.progress,
        }
        asked = {**how, "answers": getattr(settings, "answers", None), "device": settings.resources.device}
        if learns_by_answers(plan, tuned):
            return self._refined_by_answers(plan, tuned, refinement, asked)
        if learns_denoising(plan, tuned) and not settings.full:
            ask = partial(asked_denoiser_of, plan, tuned, settings)
            return refine_denoiser(self.moved(plan, (tuned,)), plan.b, ask, refinement, **asked)
        full, targets = settings.full, None
        if plan.alignment.other_shape and isinstance(tuned, Adapter) and not full:
            if refinement.rank is not None:
                raise SettingError(
                    "`refine_rank`: the fine-tune is an adapter, and keeps its own rank", hint="leave it out"
                )
            _, rank, targets, _ = plan.lora(tuned, Alpha(), trust_base=True)
            refinement, full = replace(refinement, rank=rank), True
        output = self.moved(plan, (tuned,), full=full)
        unmoved = whole = None
        if output.moved_adapter is None or output.moved_adapter.adapter.kind.scalable:
            unmoved = self.moved_by(plan, (tuned,), Alpha(0.0), self.record, full=full)
        if output.moved_adapter is not None and output.moved_adapter.carried:
            whole = plan.move((tuned,), Alpha(0.0), full=True, trust_base=True, dtype=torch.float32)
        return refine(
            output,
            plan.teacher(tuned),
            plan.b,
            refinement,
            unmoved=unmoved,
            whole=whole,
            targets=targets,
            resources=settings.resources,
            **how,
        )

    def _require_learnable(
        self, plan: TransportPlan, tuned: Finetune, refinement: RefinementSettings
    ) -> None:
        """Refuse answers of another fine-tune, and settings of which a refinement makes nothing."""
        file = getattr(self.settings, "answers", None)
        if learns_by_answers(plan, tuned) or (learns_denoising(plan, tuned) and not self.settings.full):
            if file is not None:
                require_answers(plan, tuned, file)
            return
        only = "only language models, and adapters of models that denoise,"
        if file is not None:
            raise SettingError(f"`answers`: {only} learn from them", hint="leave it out")
        if refinement.batch is not None:
            raise SettingError(f"`refine_batch`: {only} learn in batches of any size", hint="leave it out")
        if processes().count > 1:
            raise SettingError(
                f"{only} are refined by several processes",
                hint="start the command itself, without `accelerate launch`",
            )

    def _refined_by_answers(
        self,
        plan: TransportPlan,
        tuned: Finetune,
        refinement: RefinementSettings,
        asked: Mapping[str, Any],
    ) -> Output:
        """Return B + α·π(τ) of a language model after it has learned what the fine-tune answers."""
        output = self.moved(plan, (tuned,))
        if refinement.rank is not None:
            require_no_rank(output)
            unmoved = self.moved_by(plan, (tuned,), Alpha(0.0), self.record)
            parts = refinement.rank, None, output.names(Action.CARRIED)
            dtype = as_dtype(self.settings.dtype)
            output = lora_between_shapes(output, unmoved, parts, dtype, planned=False)
        kind = None if output.moved_adapter is None else output.moved_adapter.adapter.kind
        return refine_by_answers(
            output,
            plan.b,
            partial(asked_of, plan, tuned, self.settings),
            refinement,
            unmoved=None
            if kind is None or kind is LORA or not kind.scalable
            else self.moved_by(plan, (tuned,), Alpha(0.0), self.record),
            allowed=None if (known := plan.a.to_run.vocabulary) is None else known.shared,
            **asked,
        )


# ── opening and checking ─────────────────────────────────────────────────────────────────────


def _open_inputs(
    settings: MovingSettings, finetuned: Sequence[Finetune | Reference | None], pi: Alignment | None
) -> tuple[Pair, list[Finetune]]:
    """Open the bases and the fine-tunes; refuse an output that cannot be written or that holds an input."""
    references = [one for one in finetuned if one is not None]
    base, answers = settings.base, getattr(settings, "answers", None)
    if base is None and answers is not None:
        base = base_in(Path(answers))
    given = {"finetuned": references, "base": base, "onto": settings.onto}
    if missing := [f"`{name}`" for name, one in given.items() if not one]:
        raise SettingError(
            f"{', '.join(missing)} is missing", hint="give a folder, a file or a hub id; or `repeat` a run"
        )
    assert base is not None
    assert settings.onto is not None
    _require_parts(settings)
    if settings.via is not None:
        refuse_beside_via(settings.aligning)
    pair = Pair.open(
        base,
        settings.onto,
        settings.config,
        settings.progress,
        _vocabulary_share(settings),
        other_shapes=pi.other_shape if pi is not None else settings.chosen.functional is not None,
        kin=True,
    )
    tuned = [open_finetune(one, settings.config, settings.other_parts) for one in references]
    tuned = [one.on_base(pair.a) if isinstance(one, Adapter) else one for one in tuned]
    _require_way(settings, pair, tuned, pi)
    adapters = [one for one in tuned if isinstance(one, Adapter)]
    if settings.full and not adapters:
        what = "fine-tune is a whole model" if len(tuned) == 1 else "fine-tunes are whole models"
        raise SettingError(f"`full`: the {what} already", hint="leave it out")
    if pair.of_kin:
        _require_adapters(settings, pair, tuned)
    for adapter in adapters:
        check_named_base(adapter, pair.a, pair.b, settings.progress, trust_base=settings.trust_base)
        if pair.difference is not None and not settings.full:
            require_lora(adapter)
    if settings.output is not None:
        output = Path(settings.output)
        roots = [one.checkpoint.root for one in adapters]
        inputs = input_files(
            *(one for one in tuned if isinstance(one, Model)), *roots, pair.a, pair.b, settings.via
        )
        require_writable(output, force=settings.force, inputs=inputs, folder=output.suffix != ".safetensors")
    return pair, tuned


def _require_way(
    settings: MovingSettings, pair: Pair, tuned: Sequence[Finetune], pi: Alignment | None
) -> None:
    """Refuse bases of different shapes, if the method is not chosen and nothing would go on."""
    refines = isinstance(settings, TransportSettings) and settings.refine
    decides = pi is None and settings.chosen.follows_advice and not (refines or settings.force_unrelated)
    if decides and pair.difference is not None:
        from transfusion.matching.align import require_match

        require_match(pair, {}, refines=_is_refinable(settings))


def _require_repository(settings: MovingSettings) -> None:
    if settings.push is not None:
        require_repository(settings.push, settings.output, settings.progress)


def _require_adapters(settings: MovingSettings, pair: Pair, tuned: Sequence[Finetune]) -> None:
    """Refuse all but adapters between two families: a whole model has parts that belong to one of them."""
    asked = [f"`{one}`" for one in ("full", "refine") if getattr(settings, one, False)]
    models = [one.label for one in tuned if isinstance(one, Model)]
    if asked or models:
        raise MismatchError(
            f"{pair.a.label} is a {pair.a.family.name} and {pair.b.label} a {pair.b.family.name}: adapters"
            f" move between them, and no whole models ({listing(models or asked)})",
            hint="give the fine-tune as a LoRA, and leave out `full` and `refine`",
        )


def _vocabulary_share(settings: MovingSettings) -> float | None:
    """Return the least share of common tokens: none where a refinement learns from texts."""
    refined = isinstance(settings, TransportSettings) and settings.refine
    return 0.0 if refined and settings.vocabulary_share is None else settings.vocabulary_share


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
    """Refuse a merge, and resources that a refinement cannot use."""
    memory = settings.resources.memory
    if not isinstance(settings, TransportSettings):
        raise SettingError("`refine`: a merge cannot be refined", hint="leave it out")
    if memory is not None:
        raise SettingError(
            f"memory of {format_bytes(memory)}: a refinement holds whole models", hint="leave out `memory`"
        )
    settings.resources.require_in_process()


def _recorded_settings(settings: MovingSettings) -> dict[str, Any]:
    """Return the settings that a rerun needs, with absolute paths, so that it can start from elsewhere."""
    names = ("via", "new_tokens", "other_parts", "full", "config", "architecture", "calibrate")
    given = {name: getattr(settings, name, None) for name in (*names, "vocabulary_share", "answers")}
    if given["other_parts"] == OtherParts.REFUSE:
        del given["other_parts"]
    return {
        name: str(Path(value).resolve()) if name in _PATHS else value
        for name, value in given.items()
        if value is not None and value is not False
        if name not in _PATHS or isinstance(value, str | Path)
    }


def _repeated(settings: MovingSettings, finetuned: Sequence[Any]) -> Output:
    from transfusion.transport.rerun import repeat

    assert settings.repeat is not None
    return repeat(settings.repeat, settings, finetuned)


# ── finding π ────────────────────────────────────────────────────────────────────────────────


def refuse_beside_via(aligning: Mapping[str, Any]) -> None:
    """Refuse parameters of `align` beside a π that is aligned already."""
    if aligning:
        names = ", ".join(f"`{name}`" for name in aligning)
        raise SettingError(
            f"{names} says how to align, and `via` is aligned already",
            hint="leave it out; or it is misspelled",
        )


def with_calibration(settings: SettingsT, via: object, *, measured: bool = False) -> SettingsT:
    """Return the settings with the user's own inputs for a method that runs models.

    Refuse inputs that nothing would use: neither the method, nor what is ``measured``.
    """
    if settings.calibrate is None:
        return settings
    method = settings.chosen
    refines = isinstance(settings, TransportSettings) and settings.refine
    runs = via is None and method.functional is not None and (refines or not method.searches)
    if not (runs or measured):
        raise SettingError(
            "`calibrate`: nothing would use these inputs",
            hint='leave it out, or choose `refine=True`, `method="functional"`, `alpha="auto"` or'
            " `keep_support`",
        )
    if not runs:
        return settings
    return replace(settings, method=method.changed(calibrate=str(Path(settings.calibrate).resolve())))


def _find_pi(
    settings: MovingSettings,
    pair: Pair,
    tuned: Sequence[Finetune],
    staging: StagingFolder | None,
    *,
    refines: bool,
) -> Alignment:
    """Align A and B; keep π in the staging folder until the output is complete."""
    from transfusion.matching.align import align_pair, require_match

    place = staging.keep(f"{_key(settings, pair, refines)}.safetensors") if staging else None
    if place is not None and not processes().is_main:
        processes().wait()
        return Alignment.load(place)
    if place is not None and place.exists():
        processes().wait()
        settings.progress.note("note: going on with the π that an interrupted run had found")
        return Alignment.load(place)
    insists = refines or settings.force_unrelated
    found = align_pair(
        pair,
        AlignSettings(
            pair.a,
            pair.b,
            **settings.aligning,
            seed=settings.seed,
            force_unrelated=insists,
            goes_on=refines,
            resources=settings.resources,
            progress=settings.progress,
        ),
    )
    if settings.chosen.follows_advice and not insists:
        require_match(pair, found.provenance.advice, refines=_is_refinable(settings))
    if place is not None:
        found.save(place, force=True)
    processes().wait()
    return found


def _key(settings: MatchingSettings, pair: Pair, refines: bool) -> str:
    """A hash of everything that decides π."""
    asked = [asdict(settings.chosen), settings.seed, settings.resources.device, refines]
    tokens = [pair.vocabulary["source"], pair.vocabulary["target"]] if pair.vocabulary else []
    text = json.dumps([asked, pair.a.fingerprint, pair.b.fingerprint, *tokens], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    if not processes().is_main:
        yield staging_of(Path(settings.output))
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
