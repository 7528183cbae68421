"""B + α·π(τ) for any α, in one live module.

The change is linear in α, whatever the fine-tune and π are. The weights at α = 0 and α = 1 are computed once;
all others are interpolated.
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
from transfusion.alignment.rectangular import require_one_shape
from transfusion.architecture.naming import Naming, without_part
from transfusion.architecture.table import Family
from transfusion.evaluation.adapted_model import hold
from transfusion.evaluation.evaluation_data import EvaluationData
from transfusion.matching.alignment_run import align
from transfusion.model.model import Model
from transfusion.running.building import in_type
from transfusion.running.live_model import LiveModel
from transfusion.runtime.devices import as_precision, require_device
from transfusion.transport.adapters.adapter_opening import is_adapter
from transfusion.transport.alpha import Alpha
from transfusion.transport.dense_transport import Action, DenseTransport
from transfusion.transport.finetunes import Finetune
from transfusion.transport.transport_plan import Base, TransportPlan

NAIVE = "naive"


@dataclass(frozen=True)
class AlphaLine:
    """The line B + α·π(τ) for one π."""

    method: str | None
    """The method of π; None for τ as it is."""
    live: LiveModel
    start: Mapping[str, Tensor]
    """The parameters at α = 0 that change along the line, and task heads, by their names in memory."""
    end: Mapping[str, Tensor]
    """The same at α = 1."""
    names: Mapping[str, str]
    """Their canonical names."""
    carries: bool = False
    """Whether α = 0 differs from B: the fine-tune's task head is there, moved by π."""

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
        """Return the parameters that depend on α, by their names in memory."""
        return [name for name, start in self.start.items() if not torch.equal(start, self.end[name])]


@dataclass(frozen=True)
class AlphaLines:
    """A fine-tune of A, and B as a live module of the fine-tune's class."""

    a: Model
    b: Model
    finetuned: Finetune
    live: LiveModel
    """B at α = 0, with the fine-tune's task head if B has none of that kind."""
    input_model: Model
    """The model whose folder says how inputs are prepared."""
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

        If ``data`` names a task head, the live model has it.
        """
        as_precision(dtype)
        require_device(device)
        a, b = (model if isinstance(model, Model) else Model.open(model) for model in (base, onto))
        adapter = isinstance(finetuned, str | Path) and is_adapter(finetuned)
        if not adapter and not isinstance(finetuned, Model):
            finetuned = Model.open(finetuned)
        naive = require_one_shape(align(a, b, method=NAIVE, advice=False))
        moved = _transport(TransportPlan.between(a, b, naive), finetuned, alpha=0.0, dtype=dtype, **options)
        module = in_type(moved.module(), dtype).eval()
        held = hold(module, moved)
        if data is not None and data.task_head is not None:
            live = data.live(held, dtype, device)
        else:
            live = LiveModel(module.to(device), held.family, held.architecture, {}).drawn(held, dtype=dtype)
        grown = any(entry.added for entry in moved.entries)
        input_model = finetuned if grown and isinstance(finetuned, Model) else b
        return cls(a, b, finetuned, live, input_model, naive, options)

    @property
    def label(self) -> str:
        """The reference of the fine-tune."""
        return self.finetuned.label if isinstance(self.finetuned, Model) else str(self.finetuned)

    def along(self, alignment: Alignment | None) -> AlphaLine:
        """Return the line of one π; without π, that of τ as it is."""
        example = next(self.live.module.parameters())
        plan = TransportPlan.between(self.a, self.b, alignment or self.naive)
        moved = _transport(plan, self.finetuned, alpha=1.0, dtype=example.dtype, **self.options)
        entries = {entry.name: entry for entry in moved.entries}
        known_as, arrived = (
            _canonical_names(self.live.module, self.live.family),
            _output_parameters(moved, example),
        )
        known = {*self.a.architecture.tensors, *entries}
        start: dict[str, Tensor] = {}
        end: dict[str, Tensor] = {}
        names: dict[str, str] = {}
        carries = False
        for name, parameter in self.live.module.named_parameters():
            own = here = parameter.data
            there = next((arrived[call] for call in known_as[parameter] if call in arrived), None)
            if there is None:  # of a task head that is used for measuring only
                continue
            wholes = [without_part(call)[0] for call in known_as[parameter]]
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


def _canonical_names(module: nn.Module, family: Family) -> dict[nn.Parameter, list[str]]:
    """Return the canonical names of every parameter; a tied parameter has two."""
    calls: dict[nn.Parameter, list[str]] = {}
    for naming in (Naming(family, live=True), Naming(family)):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            calls.setdefault(parameter, []).append(naming.canonical(name))
    return calls


def _output_parameters(moved: DenseTransport, like: Tensor) -> dict[str, Tensor]:
    """Return every parameter of the output, by all its canonical names."""
    module = nn.Module.to(moved.module(), like)
    calls = _canonical_names(module, moved.onto.family)
    return {call: parameter.data for parameter, names in calls.items() for call in names}


def _transport(plan: TransportPlan, finetuned: Finetune, **options: Any) -> DenseTransport:
    """Prepare a transport as a whole model; an adapter is folded in."""
    adapter = isinstance(finetuned, str | Path) and is_adapter(finetuned)
    made = plan.transport(finetuned, full=adapter, **options)
    assert isinstance(made, DenseTransport)
    return made
