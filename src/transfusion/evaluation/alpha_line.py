"""Lines: B + α·π(τ) for every α, held by one live module in memory.

The change is linear in α, whatever the fine-tune and π are, so both ends are computed once and all else lies
on the straight lines between and behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.naming import Naming, without_part
from transfusion.architecture.table import Family
from transfusion.evaluation.adapted_model import hold
from transfusion.evaluation.evaluation_data import EvaluationData
from transfusion.live.live_model import LiveModel
from transfusion.matching.alignment_run import align
from transfusion.model.model import Model
from transfusion.runtime.devices import as_precision, require_device
from transfusion.transportation.adapters.adapter import is_adapter
from transfusion.transportation.alpha import Alpha
from transfusion.transportation.dense_transport import Action, DenseTransport
from transfusion.transportation.finetunes import Finetune
from transfusion.transportation.transport_plan import Base, TransportPlan

NAIVE = "naive"


@dataclass(frozen=True)
class AlphaLine:
    """One way of adding the fine-tune to B, for any α."""

    method: str | None
    """How π was found; none for τ as it is."""
    live: LiveModel
    start: Mapping[str, Tensor]
    """The parameters at α = 0, by their names in memory: those that the line passes over, and heads."""
    end: Mapping[str, Tensor]
    """The same at α = 1."""
    names: Mapping[str, str]
    """What the tables call them."""
    carries: bool = False
    """Whether it brings something at α = 0 already: the fine-tune's own head, moved."""

    @contextmanager
    def at(self, alpha: Alpha | float) -> Iterator[None]:
        """Within the block, the live module is B + α·π(τ)."""
        chosen = Alpha.of(alpha)
        held = {
            name: torch.lerp(start, self.end[name], chosen.at(self.names[name]))
            for name, start in self.start.items()
        }
        with self.live.holding(held):
            yield

    def moved(self) -> list[str]:
        """The parameters that depend on α, by their names in memory."""
        return [name for name, start in self.start.items() if not torch.equal(start, self.end[name])]


@dataclass(frozen=True)
class AlphaLines:
    """A fine-tune of A, and B as a live module of the kind that comes out, to be changed in place."""

    a: Model
    b: Model
    finetuned: Finetune
    live: LiveModel
    """B, with the fine-tune's own head where B has none of the kind: α = 0."""
    reader: Model
    """The model whose files say how its inputs are made."""
    naive: Alignment
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        finetuned: Finetune,
        base: Base,
        onto: Base,
        *,
        data: EvaluationData | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **options: Any,
    ) -> AlphaLines:
        """Open the three models and build the live one; ``options`` are those of `TransportPlan.transport`.

        If ``data`` borrows a head, the live model has it.
        """
        as_precision(dtype)
        require_device(device)
        a, b = (model if isinstance(model, Model) else Model.open(model) for model in (base, onto))
        adapter = isinstance(finetuned, str | Path) and is_adapter(finetuned)
        if not adapter and not isinstance(finetuned, Model):
            finetuned = Model.open(finetuned)
        naive = align(a, b, method=NAIVE, advice=False)
        moved = _whole(TransportPlan.between(a, b, naive), finetuned, alpha=0.0, dtype=dtype, **options)
        module = moved.module().to(dtype).eval()
        held = hold(module, moved)
        if data is not None and data.head is not None:
            live = data.live(held, dtype, device)
        else:
            live = LiveModel(module.to(device), held.family, held.architecture, {}).drawn(held, dtype=dtype)
        grown = any(entry.added for entry in moved.entries)
        reader = finetuned if grown and isinstance(finetuned, Model) else b
        return cls(a, b, finetuned, live, reader, naive, options)

    @property
    def label(self) -> str:
        """The fine-tune, as the user wrote it."""
        return self.finetuned.label if isinstance(self.finetuned, Model) else str(self.finetuned)

    def along(self, alignment: Alignment | None) -> AlphaLine:
        """The line that one π gives; without any, that of τ as it is."""
        example = next(self.live.module.parameters())
        plan = TransportPlan.between(self.a, self.b, alignment or self.naive)
        moved = _whole(plan, self.finetuned, alpha=1.0, dtype=example.dtype, **self.options)
        entries = {entry.name: entry for entry in moved.entries}
        calls, arrived = _calls(self.live.module, self.live.family), _arrived(moved, example)
        known = {*self.a.architecture.tensors, *entries}
        start: dict[str, Tensor] = {}
        end: dict[str, Tensor] = {}
        names: dict[str, str] = {}
        carries = False
        for name, parameter in self.live.module.named_parameters():
            own = here = parameter.data
            there = next((arrived[call] for call in calls[parameter] if call in arrived), None)
            if there is None:  # of a head that is borrowed for measuring
                continue
            wholes = [without_part(call)[0] for call in calls[parameter]]
            names[name] = next((call for call in wholes if call in known), wholes[0])
            entry = entries.get(names[name])
            if entry is not None and entry.action is Action.CARRIED:
                here = there
            elif entry is not None and entry.added:
                here = torch.cat([own[: -entry.added], there[-entry.added :]])
            brought = not torch.equal(here, own)
            carries = carries or brought
            if brought or not torch.equal(here, there):
                start[name], end[name] = here, there
        method = alignment.provenance.method if alignment is not None else None
        return AlphaLine(method, self.live, start, end, names, carries)


def _calls(module: nn.Module, family: Family) -> dict[nn.Parameter, list[str]]:
    """What the tables may call every parameter: a tied one has two names, and parts of a tensor say so."""
    calls: dict[nn.Parameter, list[str]] = {}
    for naming in (Naming(family, live=True), Naming(family)):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            calls.setdefault(parameter, []).append(naming.canonical(name))
    return calls


def _arrived(moved: DenseTransport, like: Tensor) -> dict[str, Tensor]:
    """Every parameter of the output, by all its names."""
    module = moved.module().to(like)
    calls = _calls(module, moved.onto.family)
    return {call: parameter.data for parameter, names in calls.items() for call in names}


def _whole(plan: TransportPlan, finetuned: Finetune, **options: Any) -> DenseTransport:
    """A transport as a whole model; an adapter is folded in."""
    adapter = isinstance(finetuned, str | Path) and is_adapter(finetuned)
    made = plan.transport(finetuned, full=adapter, **options)
    assert isinstance(made, DenseTransport)
    return made
