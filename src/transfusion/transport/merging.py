"""A merge whose α is chosen by running models: the combined change on A beside the same on B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transfusion.transport.adapters.lora_file import is_adapter
from transfusion.transport.alpha_on_probes import AlphaSearch, RunnableFinetune
from transfusion.transport.finetunes import Finetune
from transfusion.transport.merge_rules import MergeRule
from transfusion.transport.output import Output
from transfusion.transport.plan import TransportPlan
from transfusion.transport.record import OutputRecord
from transfusion.transport.settings import MergeSettings
from transfusion.transport.task_vector import NewTokens


def checked_merge(
    plan: TransportPlan,
    finetuned: Sequence[Finetune],
    merging: MergeRule,
    settings: MergeSettings,
    record: OutputRecord,
) -> Output:
    """Return the combined fine-tunes on B; α is chosen as `transport` does, by the combined change."""
    search = partial(merged_search, plan, finetuned, merging, settings.head, settings.calibrate)
    chosen, record = plan.choose_alpha(
        settings.alpha, finetuned, search, record, force_unrelated=settings.force_unrelated, refinable=False
    )
    return plan.merge(
        finetuned,
        merging=replace(merging, alpha=chosen),
        head=settings.head,
        full=settings.full,
        rank=settings.rank,
        new_tokens=settings.new_tokens,
        dtype=settings.dtype,
        trust_base=settings.trust_base or settings.dry_run,
        output_record=record,
    )


def merged_search(
    plan: TransportPlan,
    finetuned: Sequence[Finetune],
    merging: MergeRule,
    head: int | None = None,
    calibrate: str | Path | None = None,
) -> AlphaSearch:
    """Return a search for α that runs the combined fine-tunes on A and on B, on probes.

    The rule combines them in A's basis for A, and in B's for B. New tokens are left out: no probe has any.
    """
    on_a = TransportPlan.planned(plan.running(plan.a), plan.running(plan.a))
    on_a = replace(on_a, other_parts=plan.other_parts)
    of_a = [one if _adapts(one) else plan.running(plan.opened(one)) for one in finetuned]
    return plan.search_between(
        partial(_combined, on_a, of_a, merging, head),
        partial(_combined, plan, finetuned, merging, head),
        calibrate,
    )


def _combined(
    plan: TransportPlan, finetuned: Sequence[Finetune], merging: MergeRule, head: int | None
) -> RunnableFinetune:
    """Return the target of a plan with all fine-tunes in it; adapters become part of the model."""
    merged = plan.merge(
        finetuned,
        merging=replace(merging),  # a copy: the thresholds of TIES belong to one basis
        head=head,
        full=any(map(_adapts, finetuned)),
        new_tokens=NewTokens.DROP,
        trust_base=True,
    )
    return RunnableFinetune(merged, plan.resources)


def _adapts(finetuned: Finetune) -> bool:
    return isinstance(finetuned, str | Path) and is_adapter(finetuned)
