"""Refined outputs: a transport whose tensors come from a trained student."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.model.model import Model
from transfusion.transport.adapters.adapter_output import AdapterOutput
from transfusion.transport.adapters.adapter_tensor import AdapterTensor
from transfusion.transport.adapters.adapter_transport import AdapterTransport
from transfusion.transport.dense_transport import DenseTransport, TensorAction
from transfusion.transport.output_record import OutputRecord
from transfusion.transport.refinement.refinement_settings import REFINEMENT, RefinementRecord
from transfusion.transport.task_vector_sources import TaskVectorSource


@dataclass(repr=False)
class RefinedModel(DenseTransport):
    """A dense transport after refinement."""

    student: Model = field(kw_only=True)
    refinement: RefinementRecord = field(kw_only=True)

    @classmethod
    def of(cls, moved: DenseTransport, student: Model, refinement: RefinementRecord) -> RefinedModel:
        """Return the output of a transport with the tensors of its student."""
        own = [one.name for one in fields(DenseTransport) if one.name != "changed"]
        parts: dict[str, Any] = {name: getattr(moved, name) for name in own}
        return cls(**parts, student=student, refinement=refinement)

    def by_rows(self, entry: TensorAction) -> bool:
        return bool(entry.shape.extents)

    def cuts(self, entry: TensorAction) -> Any:
        return super(DenseTransport, self).cuts(entry)

    def rows(self, entry: TensorAction, rows: slice) -> Tensor:
        name = entry.name
        if name not in self.student.names:
            return super().rows(entry, rows)
        whole = None if not entry.shape.extents else rows
        refined = self.student.raw(name, whole)
        if self._differs(entry, refined, whole):
            self.changed.add(name)
        return refined

    def _differs(self, entry: TensorAction, refined: Tensor, rows: slice | None) -> bool:
        """Whether rows of a tensor that B has, too, differ from B's own."""
        if entry.name not in self.onto.names:
            return False
        own = self.onto.raw(entry.name, rows)
        return own.shape != refined.shape or not torch.equal(own.to(refined.dtype), refined)

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), REFINEMENT: self.student.fingerprint}

    def metadata(self) -> dict[str, Any]:
        return self.refinement.added_to(super().metadata())


@dataclass
class RefinedAdapter(AdapterTransport):
    """The transport of an adapter after refinement: the same keys, kind and rank."""

    trained: Mapping[str, Tensor] = field(kw_only=True)
    refinement: RefinementRecord = field(kw_only=True)

    @classmethod
    def of(
        cls, moved: AdapterTransport, trained: Mapping[str, Tensor], refinement: RefinementRecord
    ) -> RefinedAdapter:
        """Return the output of a transport with trained tensors."""
        names = ("adapter", "base", "onto", "alignment", "alpha", "dtype", "output_record")
        parts: dict[str, Any] = {name: getattr(moved, name) for name in names}
        return cls(**parts, trained=trained, refinement=refinement)

    def tensor(self, factor: AdapterTensor) -> Tensor:
        if factor.key not in self.trained:
            return super().tensor(factor)
        info = self.adapter.checkpoint.tensors[factor.key]
        return self.trained[factor.key].reshape(info.shape).to(self.dtype or info.dtype).contiguous()

    def metadata(self) -> dict[str, Any]:
        return self.refinement.added_to(super().metadata())


@dataclass(repr=False)
class RefinedLora(AdapterOutput):
    """A LoRA for B that was trained in place of a dense fine-tune's weights."""

    source: TaskVectorSource
    base: Model
    onto: Model
    alignment: Alignment
    trained: Mapping[str, Tensor]
    adapter_config: Mapping[str, Any]
    refinement: RefinementRecord
    dtype: torch.dtype | None = None
    output_record: OutputRecord = field(default_factory=OutputRecord)

    def __repr__(self) -> str:
        return f"<{self.source.label}, moved onto {self.onto.label} as an adapter>"

    @property
    def pi(self) -> Alignment:
        return self.alignment

    def tensors(self) -> dict[str, Callable[[], Tensor]]:
        return {key: partial(self._tensor, key) for key in self.trained}

    def _tensor(self, key: str) -> Tensor:
        return self.trained[key].to(self.dtype or torch.float32).contiguous()

    def amounts(self) -> dict[str, int]:
        size = sum(one.numel() * (self.dtype or one.dtype).itemsize for one in self.trained.values())
        read = sum(model.checkpoint.nbytes for model in (self.base, self.onto))
        return {
            "tensors": len(self.trained),
            "moved": len(self.trained),
            "carried": 0,
            "bytes_to_read": read,
            "bytes_to_write": size,
        }

    def settings(self) -> dict[str, Any]:
        return dict(self.adapter_config)

    def metadata(self) -> dict[str, Any]:
        metadata = {
            **self.output_record.of((self.source,), self.base, self.onto, self.alignment),
            "kind": "adapter",
            "peft_type": "LORA",
            "dtype": self.dtype and str(self.dtype).removeprefix("torch."),
            "moved": len(self.trained),
            "carried": [],
        }
        return self.refinement.added_to(metadata)
