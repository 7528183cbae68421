"""Transport: B + α·π(τ), a checkpoint that loads where B does, or an adapter for B.

A `TransportPlan` holds two bases and the alignment between them. A `TaskVectorSource` is a fine-tune's
change in B's basis. A `DenseTransport` is B with one or several changes added, an `AdapterTransport` an
adapter for B. Tensors are computed when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.matching.methods import DEFAULT, Method, preset
from transfusion.transportation.adapters.adapter_merging import MergedAdapters
from transfusion.transportation.adapters.adapter_output import AdapterOutput
from transfusion.transportation.adapters.adapter_transport import AdapterTransport
from transfusion.transportation.applied_model import AppliedModel, apply
from transfusion.transportation.dense_transport import Action, DenseTransport
from transfusion.transportation.merge_rules import MergeMethod, MergeRule
from transfusion.transportation.output_record import OutputRecord
from transfusion.transportation.task_vector import NewTokens
from transfusion.transportation.transport_plan import (
    AlphaArgument,
    Base,
    Finetune,
    TransportPlan,
    open_models,
    refuse_early,
)

__all__ = [
    "Action",
    "AdapterOutput",
    "AdapterTransport",
    "AppliedModel",
    "DenseTransport",
    "MergeMethod",
    "MergeRule",
    "MergedAdapters",
    "NewTokens",
    "OutputRecord",
    "TransportPlan",
    "apply",
    "merge",
    "transport",
]


def transport(
    finetuned: Finetune,
    *,
    base: Base,
    onto: Base,
    via: Alignment | str | Path | None = None,
    alpha: AlphaArgument = 1.0,
    dtype: torch.dtype | str | None = None,
    full: bool = False,
    trust_base: bool = False,
    new_tokens: NewTokens | str = NewTokens.REFUSE,
    keep_support: float | None = None,
    calibrate: str | Path | None = None,
    **aligning: Any,
) -> DenseTransport | AdapterTransport:
    """Prepare B + α·π(τ). Without ``via`` the bases are aligned first, with ``aligning`` passed on.

    With ``alpha="auto"``, α is the largest that changes B's outputs in about the direction in which the
    fine-tune changed A's, and no further; ``keep_support`` bounds how far they may move beside their own
    spread. Both are seen on made-up inputs, or on those that ``calibrate`` names.

    The result computes tensors when asked: ``save`` writes them as a model or adapter for B,
    ``state_dict`` gives them in memory.

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

    >>> moved = transfusion.transport("models/lora", base="models/a", onto="models/b", via="pi.safetensors")
    >>> print(moved.save("models/lora-on-b"))
    models/lora-on-b
    """
    if via is None and calibrate is not None:
        aligning = _shown(calibrate, **aligning)
    a, b = open_models(base, onto)
    if via is None and full:
        refuse_early([finetuned], a, b)
    return TransportPlan.between(a, b, via, **aligning).transport(
        finetuned,
        alpha=alpha,
        dtype=dtype,
        full=full,
        trust_base=trust_base,
        new_tokens=new_tokens,
        keep_support=keep_support,
        calibrate=calibrate,
    )


def _shown(calibrate: str | Path, method: str | Method = DEFAULT, **aligning: Any) -> dict[str, Any]:
    """How to align, with inputs of the user's own for a method that runs models."""
    chosen = method if isinstance(method, Method) else preset(method)
    if chosen.functional is not None:
        chosen = chosen.changed(calibrate=str(Path(calibrate).resolve()))
    return {**aligning, "method": chosen}


def merge(
    finetuned: Sequence[Finetune],
    *,
    base: Base,
    onto: Base,
    how: MergeMethod | str = MergeMethod.SUM,
    weights: Sequence[float] = (),
    density: float | None = None,
    seed: int = 0,
    head: int | None = None,
    full: bool = False,
    rank: int | None = None,
    new_tokens: NewTokens | str = NewTokens.REFUSE,
    via: Alignment | str | Path | None = None,
    alpha: AlphaArgument = 1.0,
    dtype: torch.dtype | str | None = None,
    trust_base: bool = False,
    **aligning: Any,
) -> DenseTransport | MergedAdapters:
    """Prepare several fine-tunes of A, moved by one π and combined at B.

    Adapters alone come out as an adapter: of the sum of their ranks, or of the ``rank`` that is asked for.
    With ``full``, or when any of them is a model, the result is a model.

    >>> both = ["models/tuned", "models/tuned-again"]
    >>> merged = transfusion.merge(both, base="models/a", onto="models/b", how="ties", via="pi.safetensors")
    >>> print(merged.save("models/both-on-b"))
    models/both-on-b
    """
    a, b = open_models(base, onto)
    if via is None and full and not isinstance(finetuned, str | Path):
        refuse_early(finetuned, a, b)
    plan = TransportPlan.between(a, b, via, **({"seed": seed} if via is None else {}), **aligning)
    return plan.merge(
        finetuned,
        merging=MergeRule.asked(how, weights, density, seed, plan.alpha(alpha)),
        head=head,
        full=full,
        rank=rank,
        new_tokens=new_tokens,
        dtype=dtype,
        trust_base=trust_base,
    )
