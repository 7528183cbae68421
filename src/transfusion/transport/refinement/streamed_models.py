"""The models of a refinement that trains an adapter alone, with one unit of each in memory.

The fine-tune is A with its adapter, the student is B with the moved one. Base weights are read from their
files when they are used, forwards and backwards, and have no gradients; adapters stay in memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from transfusion.errors import SettingError
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.meta_models import skeleton
from transfusion.running.streaming import StreamedModule, stream, unit_sizes
from transfusion.runtime.byte_sizes import format_bytes
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.progress import Progress
from transfusion.runtime.resources import Resources
from transfusion.transport.adapters.adapter_transport import AdapterTransport
from transfusion.transport.refinement.peft_students import with_adapter

MODELS = 5
"""A, its fine-tune, B, and the student from either start."""
TRAINED_COPIES = 6
"""An adapter, its gradients, two moments, its best state, and the other start."""
TOKENS = 16 * 48
"""The tokens of one step, about."""
LOGITS = 8
"""Copies of the logits of a step: of two models, as distributions, with gradients."""


class StreamedModels:
    """Opens the models of a refinement; they can be run within a ``with`` block."""

    def __init__(self, a: Model, b: Model, resources: Resources, progress: Progress) -> None:
        self.a, self.b, self.resources, self.progress = a, b, resources, progress
        self._open = ExitStack()

    def __enter__(self) -> StreamedModels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def require(self, moved: AdapterTransport) -> None:
        """Announce the memory, and refuse a limit that is too small and what needs whole models."""
        if moved.carried or self.a.vocabulary is not None or "tokens" not in self.a.family.inputs:
            raise SettingError(
                "memory: this refinement holds whole models (a head of its own, other tokens, or images)",
                hint="leave out `memory`",
            )
        needed = self.memory(moved)
        self.resources.budget.require(needed, "the refinement of the adapter")
        total = self.resources.budget.program + needed
        self.progress.note(
            f"note: the refinement takes about {format_bytes(total)} of memory: a unit of each model at a"
            " time, and the adapter with its gradients"
        )

    def memory(self, moved: AdapterTransport) -> int:
        """Return the bytes that a refinement takes beside the program."""
        weights = MODELS * max(unit_sizes(model, skeleton(model)) for model in (self.a, self.b))
        trained = sum(torch.Size(one.shape).numel() for one in moved.adapter.checkpoint.tensors.values())
        sizes = self.b.architecture.sizes
        width = max((sizes[one.id] for one in self.b.architecture.spaces.values() if one.stream), default=0)
        depth = len(self.b.architecture.shortcuts) + 2
        outputs = sum(
            self.b.info(name).shape[layout.outputs[0]]
            for name, layout in self.b.architecture.tensors.items()
            if layout.arrow is not None and name in self.b.names and VOCABULARY not in layout.names()
        )
        states = TOKENS * (width * depth + 4 * outputs // max(1, depth // 2))
        logits = LOGITS * TOKENS * sizes.get(VOCABULARY, 0)
        return weights + 4 * (TRAINED_COPIES * trained + states + logits)

    def plain(self, model: Model) -> nn.Module:
        """Return A or B."""
        return self._opened(stream(model, frozen=True)).module

    def tuned(self, adapter: str | Path) -> nn.Module:
        """Return A with the adapter that was trained on it."""
        streamed = stream(self.a, frozen=True)
        peft: Any = require_library("peft")
        with streamed.stood_in_for() as module:
            wrapped: nn.Module = peft.PeftModel.from_pretrained(module, str(adapter)).eval()
        self._opened(streamed)
        return wrapped

    def student(self, moved: AdapterTransport) -> nn.Module:
        """Return B with the moved adapter, which alone is trained."""
        streamed = stream(self.b, frozen=True)
        with streamed.stood_in_for() as module:
            wrapped = with_adapter(module, moved)
        self._opened(streamed)
        return wrapped

    def _opened(self, streamed: StreamedModule) -> StreamedModule:
        self._open.enter_context(streamed.loading())
        return streamed
