"""LoRA in, LoRA out between models of different shapes, at the same rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.naming import Naming
from transfusion.model.model import Model
from transfusion.transport.adapters.adapter_output import AdapterOutput
from transfusion.transport.dense_transport import Action, DenseTransport
from transfusion.transport.output_record import OutputRecord
from transfusion.transport.refinement.peft_students import adapter_tensors, lora_config, with_lora


@dataclass(repr=False)
class RectangularLora(AdapterOutput):
    """An adapter for B whose products are the nearest of their rank to the moved changes."""

    dense: DenseTransport
    """B with all of the moved change."""
    unmoved: DenseTransport
    """The same with α = 0."""
    rank: int
    targets: frozenset[str]
    """The tensors of B that the adapter changes."""
    wholes: frozenset[str]
    """The tensors of B that the adapter replaces."""
    dtype: torch.dtype | None = None
    output_record: OutputRecord = field(default_factory=OutputRecord)

    def __repr__(self) -> str:
        return f"<{self.dense.lead.label}, moved onto {self.onto.label} as an adapter>"

    @property
    def onto(self) -> Model:  # type: ignore[override]
        return self.dense.onto

    @cached_property
    def _made(self) -> tuple[dict[str, Tensor], dict[str, Any], float]:
        """Return the tensors, the configuration, and the least share of a change that the rank holds."""
        moved, kept = (
            replace(one, dtype=torch.float32, changed=set()).module() for one in (self.dense, self.unmoved)
        )
        naming = Naming(self.onto.family, live=True)
        student, shares = with_lora(
            moved, self.rank, kept, sorted(self.wholes), naming=naming, targets=self.targets
        )
        return adapter_tensors(student), lora_config(student), min(shares.values())

    def tensors(self) -> Mapping[str, Callable[[], Tensor]]:
        return {key: partial(self._tensor, key) for key in self._made[0]}

    def _tensor(self, key: str) -> Tensor:
        return self._made[0][key].to(self.dtype or torch.float32).contiguous()

    @property
    def pi(self) -> Alignment:
        return self.dense.alignment

    def amounts(self) -> dict[str, int]:
        size = (self.dtype or torch.float32).itemsize
        shapes = [self.onto.info(name).shape for name in self.targets]
        wholes = [entry.shape.nbytes for entry in self.dense.entries if entry.name in self.wholes]
        weights = [shape for shape in shapes if len(shape) == 2]
        return {
            "tensors": 2 * len(weights) + len(wholes),
            "moved": 2 * len(weights),
            "carried": len(self.dense.names(Action.CARRIED)),
            "bytes_to_read": self.dense.plan()["bytes_to_read"],
            "bytes_to_write": sum(self.rank * sum(shape) * size for shape in weights) + sum(wholes),
        }

    def settings(self) -> dict[str, Any]:
        return self._made[1]

    def metadata(self) -> dict[str, Any]:
        lead = self.dense.lead
        return {
            **self.output_record.of((lead,), self.dense.base, self.onto, self.dense.alignment),
            "kind": "adapter",
            "peft_type": "LORA",
            "dtype": self.dtype and str(self.dtype).removeprefix("torch."),
            "moved": len(self._made[0]),
            "carried": self.dense.names(Action.CARRIED),
            "rank": self.rank,
            "kept": self._made[2],
        }
