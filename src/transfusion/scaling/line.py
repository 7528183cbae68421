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

from transfusion.adapter import is_adapter
from transfusion.alignment import Alignment
from transfusion.alpha import Alpha
from transfusion.errors import SettingError
from transfusion.live import Live
from transfusion.matching import align
from transfusion.model import Model
from transfusion.naming import Naming, without_part
from transfusion.transportation import Action, Journey, Transport
from transfusion.transportation.journey import Base, Finetune

NAIVE = "naive"


@dataclass(frozen=True)
class Line:
    """One way of adding the fine-tune to B, for any α."""

    method: str | None
    """How π was found; none for τ as it is."""
    live: Live
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
class Lines:
    """A fine-tune of A, and B as a live module of the kind that comes out, to be changed in place."""

    a: Model
    b: Model
    finetuned: Finetune
    live: Live
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
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Lines:
        """Open the three models and build the live one; ``options`` are those of `Journey.transport`."""
        if dtype not in (torch.float32, torch.float64):
            raise SettingError(f"dtype = {dtype}: too coarse here", hint="choose float32 or float64")
        a, b = (model if isinstance(model, Model) else Model.open(model) for model in (base, onto))
        if not isinstance(finetuned, str | Path | Model) or (
            not isinstance(finetuned, Model) and not is_adapter(finetuned)
        ):
            finetuned = Model.open(finetuned)
        naive = align(a, b, method=NAIVE, advice=False)
        moved = _whole(Journey.between(a, b, naive), finetuned, alpha=0.0, dtype=dtype, **options)
        module = moved.module().to(dtype).eval()
        known = hasattr(module, "config")  # modules of transformers; the others do not say what they are
        held = Model.open(module) if known else Model.open(module, config=moved.config())
        live = Live(module, held.family, held.architecture, {}).drawn(held, dtype=dtype)
        grown = any(entry.added for entry in moved.entries)
        reader = finetuned if grown and isinstance(finetuned, Model) else b
        return cls(a, b, finetuned, live, reader, naive, options)

    @property
    def label(self) -> str:
        """The fine-tune, as the user wrote it."""
        return self.finetuned.label if isinstance(self.finetuned, Model) else str(self.finetuned)

    def along(self, alignment: Alignment | None) -> Line:
        """The line that one π gives; without any, that of τ as it is."""
        dtype = next(self.live.module.parameters()).dtype
        journey = Journey.between(self.a, self.b, alignment or self.naive)
        moved = _whole(journey, self.finetuned, alpha=1.0, dtype=dtype, **self.options)
        own = {name: parameter.data for name, parameter in self.live.module.named_parameters()}
        names = canonical_names(self.live, self.a, moved)
        arrived = dict(moved.module().to(dtype).named_parameters())
        entries = {entry.name: entry for entry in moved.entries}
        start: dict[str, Tensor] = {}
        end: dict[str, Tensor] = {}
        carries = False
        for name, here in own.items():
            there, entry = arrived[name].data, entries.get(names[name])
            if entry is not None and entry.action is Action.CARRIED:
                here = there
            elif entry is not None and entry.added:
                here = torch.cat([here[: -entry.added], there[-entry.added :]])
            brought = not torch.equal(here, own[name])
            carries = carries or brought
            if brought or not torch.equal(here, there):
                start[name], end[name] = here, there
        method = alignment.provenance.method if alignment is not None else None
        return Line(method, self.live, start, end, {name: names[name] for name in start}, carries)


def _whole(journey: Journey, finetuned: Finetune, **options: Any) -> Transport:
    """A transport as a whole model; an adapter is folded in."""
    adapter = isinstance(finetuned, str | Path) and is_adapter(finetuned)
    made = journey.transport(finetuned, full=adapter, **options)
    assert isinstance(made, Transport)
    return made


def canonical_names(live: Live, a: Model, moved: Transport) -> dict[str, str]:
    """What the tables call every parameter; a tied one may be known under either of its names."""
    known = {*a.architecture.tensors, *(entry.name for entry in moved.entries)}
    calls: dict[nn.Parameter, list[str]] = {}
    for naming in (Naming(live.family, live=True), Naming(live.family)):
        for name, parameter in live.module.named_parameters(remove_duplicate=False):
            calls.setdefault(parameter, []).append(without_part(naming.canonical(name))[0])
    return {
        name: next((one for one in calls[parameter] if one in known), calls[parameter][0])
        for name, parameter in live.module.named_parameters()
    }
