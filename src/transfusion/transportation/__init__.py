"""Transport: B + α·π(τ), a checkpoint that loads where B does, or an adapter for B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from transfusion.adapter import Adapter, is_adapter
from transfusion.alignment import Alignment
from transfusion.alpha import Alpha
from transfusion.checkpoint import FLOATS
from transfusion.errors import SettingError
from transfusion.matching import align
from transfusion.model import Model, require_same_shape
from transfusion.task_vector import TaskVector
from transfusion.transportation.adapters import AdapterTransport
from transfusion.transportation.applied import Applied, apply
from transfusion.transportation.dense import Action, Transport

__all__ = ["Action", "AdapterTransport", "Applied", "Transport", "apply", "transport"]


def transport(
    finetuned: Model | str | Path,
    *,
    base: Model | str | Path,
    onto: Model | str | Path,
    via: Alignment | str | Path | None = None,
    alpha: float = 1.0,
    dtype: torch.dtype | str | None = None,
    trust_base: bool = False,
    **aligning: Any,
) -> Transport | AdapterTransport:
    """Prepare B + α·π(τ). Without ``via`` the bases are aligned first, with ``aligning`` passed on.

    The result computes tensors when asked: ``save`` writes them as a model or adapter for B,
    ``state_dict`` gives them in memory.
    """
    chosen = Alpha.of(alpha)
    dtype = _dtype(dtype)
    a, b = (model if isinstance(model, Model) else Model.open(model) for model in (base, onto))
    require_same_shape(a, b)
    alignment = alignment_between(a, b, via, **aligning)
    story = alignment.provenance
    a, b = a.under(story.policy), b.under(story.policy)
    if not isinstance(finetuned, Model) and is_adapter(finetuned):
        return AdapterTransport(Adapter.open(finetuned), a, b, alignment, chosen, dtype)
    tuned = finetuned if isinstance(finetuned, Model) else Model.open(finetuned)
    tuned = tuned.under(story.policy)
    return Transport(TaskVector.between(tuned, a, trust_base=trust_base), b, alignment, alpha, dtype)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and chosen not in FLOATS:
        known = ", ".join(str(one).removeprefix("torch.") for one in FLOATS)
        raise SettingError(f"dtype = {dtype} is not a choice", hint=f"choose one of {known}")
    return chosen


def alignment_between(a: Model, b: Model, via: Alignment | str | Path | None, **aligning: Any) -> Alignment:
    """The given alignment, checked against both models; or a new one."""
    if via is None:
        return align(a, b, **aligning)
    alignment = via if isinstance(via, Alignment) else Alignment.load(via)
    story = alignment.provenance
    alignment.require_for(a.architecture.under(story.policy))
    alignment.require_between(source=a, target=b)
    return alignment
