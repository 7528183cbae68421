"""The functions `transport` and `merge`: B + α·π(τ), a checkpoint that loads where B does, or an adapter.

A `TransportPlan` holds two bases and the alignment between them. A `TaskVectorSource` is a fine-tune's
change in B's basis. An `Output` is B with one or several changes added, or an adapter for B. Tensors are
computed when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.errors import SettingError
from transfusion.model.pair import ConfigArgument, Pair
from transfusion.runtime.byte_sizes import format_bytes
from transfusion.runtime.progress import SILENT, Progress, followed
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.run_record import RunRecord
from transfusion.transport.adapters.lora_file import OtherParts, is_lora_file
from transfusion.transport.alpha import AlphaArgument
from transfusion.transport.balanced_alpha import AUTO
from transfusion.transport.finetunes import Finetune, open_finetune
from transfusion.transport.merge_rules import MergeMethod, MergeRule
from transfusion.transport.output import Output
from transfusion.transport.output_record import OutputRecord
from transfusion.transport.output_run import (
    Destination,
    OutputRun,
    accepts_shapes,
    calibrated,
    refined_output,
    refuse_beside_via,
)
from transfusion.transport.refinement.settings import refinement_settings
from transfusion.transport.task_vector import NewTokens
from transfusion.transport.transport_plan import Base, TransportPlan

__all__ = ["merge", "transport"]


@followed
def transport(
    finetuned: Finetune,
    *,
    base: Base,
    onto: Base,
    via: Alignment | str | Path | None = None,
    alpha: AlphaArgument | None = None,
    keep_support: float | None = None,
    refine: bool = False,
    refine_steps: int | None = None,
    refine_rank: int | None = None,
    calibrate: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    full: bool = False,
    new_tokens: NewTokens | str = NewTokens.REFUSE,
    other_parts: OtherParts | str = OtherParts.REFUSE,
    vocabulary_share: float | None = None,
    anyway: bool = False,
    trust_base: bool = False,
    seed: int = 0,
    config: ConfigArgument = None,
    architecture: str | Path | None = None,
    output: str | Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
    **aligning: Any,
) -> Output:
    """Move a fine-tune of A onto B: B + α·π(τ). An adapter becomes an adapter for B.

    The result computes tensors when asked: ``save`` writes them as a model or adapter for B, ``state_dict``
    and ``module`` return them in memory. With ``output`` it is written at once.

    ``finetuned`` is the fine-tune: a path, a hub id, a module, a state dict, a PEFT adapter, or a LoRA file.
    ``base`` is A, the base that was fine-tuned; ``onto`` is B, the new release.
    ``via`` is π, or its file; without it, A and B are aligned first, with ``seed`` and ``aligning`` passed on
    to `align`.
    ``alpha`` says how much of the change to add: a number, a file or a mapping with one number per layer, or
    ``"auto"``: as much as changes B's outputs in the direction in which the fine-tune changed A's.
    The default is 1, or less if π rotates and B's outputs would move far in another direction than A's did.
    ``keep_support`` bounds how far B's outputs may move, as a share of their own spread. With ``refine`` it
    is the weight of keeping them instead; the default is 0.3.
    ``refine`` trains the result for some steps to answer like the fine-tune, on synthetic inputs. Of an
    adapter, only its own tensors are trained.
    ``refine_steps`` is the largest number of steps.
    ``refine_rank`` leaves B untouched and trains a LoRA of this rank; the output is an adapter.
    ``calibrate`` names inputs for ``refine``, ``alpha="auto"``, ``keep_support`` and methods that run models;
    the default is synthetic inputs.
    ``dtype`` is the type to store; the default is B's.
    ``full`` writes an adapter as part of the whole model.
    ``new_tokens`` says what becomes of tokens that the fine-tune added: ``"refuse"``, ``"keep"``, ``"drop"``.
    ``other_parts`` says what becomes of the parts of a LoRA file that change another model than A, such as a
    text encoder: ``"refuse"``, ``"keep"`` as they are, ``"drop"``.
    ``vocabulary_share`` is the least share of tokens that the vocabularies of A and B must have in common, if
    they differ; the default is 0.5.
    ``anyway`` insists where the result would be of no use: the default method cannot align A and B, they
    have different shapes and compute unrelated things, or B's outputs would not move as A's did.
    ``trust_base`` skips the check that the fine-tune descends from A.
    ``config`` is the configuration of weights that come without one.
    ``architecture`` is the file of your own table, to be recorded with the output.
    ``output`` is the folder (or single ``.safetensors`` file) to write; with ``force``, an existing output is
    replaced. An interrupted run with the same ``output`` is resumed.
    ``dry_run`` reads only headers: every map is assumed, and the result is good for its ``plan()`` alone.
    ``resources`` are engine, threads, memory and device; ``progress`` follows the run.

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
    record, to = (
        RunRecord("transport"),
        Destination.at(output, force=force, dry_run=dry_run, resources=resources, progress=progress),
    )
    if via is not None:
        refuse_beside_via(aligning)
    refinement = refinement_settings(
        refine, steps=refine_steps, rank=refine_rank, keep=keep_support, calibrate=calibrate, seed=seed
    )
    if refinement is not None:
        _require_refinable(finetuned, resources)
        if resources.device != "cpu":
            progress.note(f"note: the refinement runs on the CPU, and not on {resources.device}")
    parts = _require_parts(other_parts, full=full)
    bound = keep_support if refinement is None else None
    if refinement is not None and alpha is None:
        alpha = 1.0  # the refinement chooses its start by what it measures
    tried = alpha == AUTO or keep_support is not None or refinement is not None
    aligning = calibrated(calibrate, via, aligning, used=tried)
    pi = Alignment.load(via) if isinstance(via, str | Path) else via
    shapes = accepts_shapes(pi, aligning)
    pair = Pair.open(base, onto, config, progress, vocabulary_share, other_shapes=shapes)
    a, b = pair.a, pair.b
    tuned = open_finetune(finetuned, a, b, config, progress, trust_base=trust_base)
    to.require_writable([tuned], a, b, via)
    settings = _settings(
        via=via,
        new_tokens=str(new_tokens),
        other_parts=None if parts is OtherParts.REFUSE else str(parts),
        full=full,
        config=config,
        architecture=architecture,
        calibrate=calibrate,
        keep_support=keep_support,
        refinement=refinement and asdict(refinement),
        vocabulary_share=vocabulary_share,
    )
    output_record = OutputRecord("transport", command=record.command, settings=settings, record=record)

    def prepare(plan: TransportPlan, alpha: AlphaArgument | None = alpha, full: bool = full) -> Output:
        return replace(plan, resources=resources, other_parts=parts).transport(
            tuned,
            alpha=alpha,
            dtype=dtype,
            full=full,
            trust_base=trust_base or dry_run,
            new_tokens=new_tokens,
            keep_support=bound,
            calibrate=calibrate,
            output_record=output_record,
            anyway=anyway,
        )

    def refined(plan: TransportPlan, checkpoint: Path | None) -> Output:
        assert refinement is not None
        limited = replace(plan, resources=resources, other_parts=parts)
        with resources.in_process():
            return refined_output(limited, tuned, refinement, prepare, checkpoint, progress)

    refining = None if refinement is None else refined
    aligning |= {"seed": seed, "anyway": anyway or refinement is not None}
    refinable = _is_refinable(finetuned, resources)
    return OutputRun(pair, pi, prepare, to, aligning, refining, refinable).run()


@followed
def merge(
    finetuned: Sequence[Finetune],
    *,
    base: Base,
    onto: Base,
    how: MergeMethod | str = MergeMethod.SUM,
    weights: Sequence[float] = (),
    density: float | None = None,
    head: int | None = None,
    rank: int | None = None,
    via: Alignment | str | Path | None = None,
    alpha: AlphaArgument | None = None,
    calibrate: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    full: bool = False,
    new_tokens: NewTokens | str = NewTokens.REFUSE,
    other_parts: OtherParts | str = OtherParts.REFUSE,
    vocabulary_share: float | None = None,
    anyway: bool = False,
    trust_base: bool = False,
    seed: int = 0,
    config: ConfigArgument = None,
    architecture: str | Path | None = None,
    output: str | Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
    **aligning: Any,
) -> Output:
    """Move several fine-tunes of A onto B by one π, and combine them there.

    Adapters alone come out as an adapter. With ``full``, or if any fine-tune is a model, the result is a
    model.

    ``finetuned`` lists the fine-tunes.
    ``how`` is the rule: ``"sum"``, ``"mean"``, ``"ties"`` or ``"dare"``, with one of ``weights`` for each
    fine-tune; ``density`` is the share of each change that ties and dare keep.
    ``head`` is the place in the list, counted from 0, of the fine-tune whose heads are kept.
    ``rank`` is the rank of the merged adapter; the default is the sum of their ranks.
    ``calibrate`` names inputs for ``alpha="auto"`` and for methods that run models.
    ``seed`` is for the search and for dare.
    All other parameters are those of `transport`.

    >>> both = ["models/tuned", "models/tuned-again"]
    >>> merged = transfusion.merge(both, base="models/a", onto="models/b", how="ties", via="pi.safetensors")
    >>> print(merged.save("models/both-on-b"))
    models/both-on-b
    """
    from transfusion.transport.checked_merge import checked_merge

    record, to = (
        RunRecord("merge"),
        Destination.at(output, force=force, dry_run=dry_run, resources=resources, progress=progress),
    )
    if isinstance(finetuned, str | Path):
        raise SettingError("one fine-tune was given, and not a list", hint="give a list, or use transport")
    parts = _require_parts(other_parts, full=full)
    if via is not None:
        refuse_beside_via(aligning)
    aligning = calibrated(calibrate, via, aligning, used=alpha == AUTO)
    pi = Alignment.load(via) if isinstance(via, str | Path) else via
    shapes = accepts_shapes(pi, aligning)
    pair = Pair.open(base, onto, config, progress, vocabulary_share, other_shapes=shapes)
    a, b = pair.a, pair.b
    tuned = [open_finetune(one, a, b, config, progress, trust_base=trust_base) for one in finetuned]
    to.require_writable(tuned, a, b, via)
    settings = _settings(
        via=via,
        head=head,
        full=full,
        rank=rank,
        new_tokens=str(new_tokens),
        other_parts=None if parts is OtherParts.REFUSE else str(parts),
        config=config,
        architecture=architecture,
        calibrate=calibrate,
        vocabulary_share=vocabulary_share,
    )
    output_record = OutputRecord("merge", command=record.command, settings=settings, record=record)

    def prepare(plan: TransportPlan) -> Output:
        return checked_merge(
            replace(plan, resources=resources, other_parts=parts),
            tuned,
            merging=MergeRule.asked(how, weights, density, seed),
            alpha=alpha,
            head=head,
            calibrate=calibrate,
            anyway=anyway,
            full=full,
            rank=rank,
            new_tokens=new_tokens,
            dtype=dtype,
            trust_base=trust_base or dry_run,
            output_record=output_record,
        )

    aligning |= {"seed": seed, "anyway": anyway}
    return OutputRun(pair, pi, prepare, to, aligning).run()


def _is_refinable(finetuned: Finetune, resources: Resources) -> bool:
    try:
        _require_refinable(finetuned, resources)
    except SettingError:
        return False
    return True


def _require_refinable(finetuned: Finetune, resources: Resources) -> None:
    """Refuse a fine-tune that cannot be refined, and resources that a refinement cannot use."""
    if isinstance(finetuned, str | Path) and is_lora_file(finetuned):
        raise SettingError("`refine`: a LoRA file cannot be refined", hint="leave it out")
    if resources.memory is not None:
        raise SettingError(
            f"memory of {format_bytes(resources.memory)}: a refinement holds whole models",
            hint="leave out `memory`",
        )
    with resources.in_process():
        pass


def _require_parts(other_parts: OtherParts | str, *, full: bool) -> OtherParts:
    """Return what becomes of a LoRA file's parts for other models; a model cannot hold such parts."""
    if other_parts not in list(OtherParts):
        raise SettingError(
            f"other_parts = {other_parts} is not a choice", hint=f"choose one of {', '.join(OtherParts)}"
        )
    if full and other_parts == OtherParts.KEEP:
        raise SettingError(
            '`other_parts="keep"`: the whole model has no place for parts of another one',
            hint='`other_parts="drop"` leaves them out',
        )
    return OtherParts(other_parts)


def _settings(**given: Any) -> dict[str, Any]:
    """Return the settings that a rerun needs, with absolute paths, so that it can start from elsewhere."""
    paths = ("via", "config", "architecture", "calibrate")
    known = {name: value for name, value in given.items() if value is not None and value is not False}
    return {
        name: str(Path(value).resolve()) if name in paths else value
        for name, value in known.items()
        if name not in paths or isinstance(value, str | Path)
    }
