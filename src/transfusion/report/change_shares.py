"""Shares: which parts of the model a fine-tune changed, and how well these parts match in B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.errors import MismatchError
from transfusion.files.tensor_content import BLOCK, row_blocks
from transfusion.model.model import Model
from transfusion.report.report_bases import Bases
from transfusion.report.tensor_roles import roles
from transfusion.report.unit_quality import Qualities
from transfusion.transport.alpha import Alpha
from transfusion.transport.task_vector import NewTokens
from transfusion.transport.task_vector_sources import TaskVectorSource
from transfusion.transport.transport_plan import TransportPlan


@dataclass
class TensorGroup:
    """The tensors of one role."""

    role: str
    square: float = 0.0
    """‖τ‖² of its tensors."""
    tensors: int = 0
    found: float | None = None
    """The mean quality of its tensors' axes, weighted by ‖τ‖² of each tensor."""
    null: float | None = None
    moved: float | None = None
    """The cosine between π(τ) and the change of B's own fine-tune."""
    unmoved: float | None = None
    """The same cosine for τ as it is."""
    _sums: dict[str, float] = field(default_factory=dict, repr=False)

    def add(self, **parts: float) -> None:
        for name, value in parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def conclude(self) -> None:
        """Compute means and cosines from the sums."""
        sums = self._sums
        if sums.get("weight"):
            self.found, self.null = sums["found"] / sums["weight"], sums["null"] / sums["weight"]
        for name in ("moved", "unmoved"):
            if (lengths := sums.get(f"{name}_square", 0.0) * sums.get("own_square", 0.0)) > 0:
                setattr(self, name, sums[f"{name}_own"] / lengths**0.5)


def groups(
    pi: Alignment | None, bases: Bases, quality: Qualities | None, ceiling: str | None
) -> list[TensorGroup]:
    """Read A and its fine-tunes once, tensor by tensor, and group the change by role, the largest first.

    With a single fine-tune and a ceiling (B fine-tuned itself), also compare π(τ) with the ceiling's change.
    """
    a = bases.a
    if a is None or not bases.finetuned:
        return []
    home = [_source(TransportPlan.planned(a, a), place) for place in bases.finetuned]
    together = _Together.of(pi, bases, ceiling) if ceiling and len(home) == 1 else None
    role_of = roles(a.architecture)
    under = a.architecture.under(pi.provenance.policy) if pi else a.architecture
    found: dict[str, TensorGroup] = {}
    for name in a.architecture.tensors:
        changing = [source for source in home if source.changes(name)]
        square = sum(_square(source, name, a) for source in changing)
        if not square:
            continue
        group = found.setdefault(role_of[name], TensorGroup(role_of[name]))
        group.square += square
        group.tensors += 1
        if quality is not None:
            axes = [quality.at(id, under.parents) for id in under.tensors[name].names()]
            if known := [axis for axis in axes if axis is not None]:
                mean = fmean(axis.found for axis in known), fmean(axis.null for axis in known)
                group.add(weight=square, found=square * mean[0], null=square * mean[1])
        if together is not None:
            group.add(**together.compared(name, home[0], a))
    for group in found.values():
        group.conclude()
    return sorted(found.values(), key=lambda group: -group.square)


@dataclass(frozen=True)
class _Together:
    """The moved change and the change of B's own fine-tune."""

    moved: TaskVectorSource | None
    own: TaskVectorSource

    @classmethod
    def of(cls, pi: Alignment | None, bases: Bases, ceiling: str) -> _Together | None:
        if bases.a is None or bases.b is None:
            return None
        own = _source(TransportPlan.planned(bases.b, bases.b), ceiling)
        plan = TransportPlan.planned(bases.a, bases.b, pi) if pi else None
        return cls(_source(plan, bases.finetuned[0]) if plan else None, own)

    def compared(self, name: str, home: TaskVectorSource, a: Model) -> dict[str, float]:
        if not self.own.changes(name):
            return {}
        sums = {"own_square": _square(self.own, name, a)}
        for what, source in (("unmoved", home), ("moved", self.moved)):
            if source is not None:
                pairs = list(_together((source, self.own), name, a))
                sums[f"{what}_square"] = sum(float(one.square().sum()) for one, _ in pairs)
                sums[f"{what}_own"] = sum(float((one * own).sum()) for one, own in pairs)
        return sums


def require_ceiling(b: Model | None, ceiling: str | None) -> None:
    """Refuse a ceiling that is no fine-tune of B, as `transport` would."""
    if b is None or ceiling is None:
        return
    try:
        TransportPlan.planned(b, b).source(ceiling, Alpha(), new_tokens=NewTokens.DROP)
    except MismatchError as error:
        raise MismatchError(error.message, hint="give B fine-tuned itself as `ceiling`") from error


def _source(plan: TransportPlan, place: str) -> TaskVectorSource:
    return plan.source(place, Alpha(), trust_base=True, new_tokens=NewTokens.DROP)


def _together(sources: Sequence[TaskVectorSource], name: str, a: Model) -> Iterator[tuple[Tensor, ...]]:
    """Yield the changes of one tensor from all sources, in blocks of rows if possible."""
    by_rows = all(source.by_rows(name) for source in sources)
    for rows in row_blocks(a.info(name).shape, BLOCK if by_rows else None):
        yield tuple(source.change(name, rows).to(torch.float64) for source in sources)


def _square(source: TaskVectorSource, name: str, a: Model) -> float:
    return sum(float(change.square().sum()) for (change,) in _together((source,), name, a))
