"""What is asked of CLIPs beside zero-shot classes: those under a frozen head, and those of texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.data.dataset import Dataset
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.inputs import Batch, TensorBatches
from transfusion.evaluation.scorers import Scorer, ZeroShotScorer
from transfusion.evaluation.task import EvaluationData
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.runtime.optional_libraries import require_library

BATCH = 250


@dataclass(frozen=True)
class Captioned(Scorer):
    """Which caption is nearest to an image; the captions' embeddings stay as they are: a frozen head."""

    live: LiveModel
    captions: Tensor
    """One embedding of unit length for every class."""
    question: str = "nearest caption"

    @property
    def classes(self) -> int:  # type: ignore[override]
        return len(self.captions)

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """As the live model sees images at this moment."""
        module: Any = self.live.module
        there = self.captions.device
        with torch.set_grad_enabled(gradients):
            seen = nn.functional.normalize(
                module.encode_image(batch.inputs["pixel_values"].to(there)), dim=-1
            )
            return module.logit_scale.exp() * seen @ self.captions.T, batch.targets.to(there)


def frozen(evaluator: Evaluator) -> Evaluator:
    """The same zero-shot question with the head that the captions make now, however the towers change."""
    assert isinstance(evaluator.scorer, ZeroShotScorer)
    return replace(evaluator, scorer=Captioned(evaluator.live, evaluator.scorer.embeddings().detach()))


@dataclass(frozen=True)
class Classified(Scorer):
    """What a linear head says about the embedding of a text."""

    live: LiveModel
    head: nn.Linear
    question: str = "class of a text by a linear head"

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.head.out_features

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """As the live model reads at this moment."""
        there = self.head.weight.device
        with torch.set_grad_enabled(gradients):
            module: Any = self.live.module
            read = module.encode_text(batch.inputs["input_ids"].to(there))
            return self.head(read), batch.targets.to(there)


@cache
def _splitter(context: int) -> Any:
    return require_library("open_clip").SimpleTokenizer(context_length=context)


def pieces(texts: list[str], context: int) -> Tensor:
    """Texts in CLIP's pieces of words, cut where they are longer than the context."""
    found: Tensor = _splitter(context)(texts)
    return found


@dataclass(frozen=True)
class Read(EvaluationData):
    """Texts in CLIP's pieces, and the head that a fine-tune brings."""

    linear: nn.Linear | None = None

    def evaluator(self, model: Model, live: LiveModel, *, batch: int | None = None) -> Evaluator:
        """A meter of what the head says about what the live model reads."""
        assert isinstance(self.reference, Dataset)
        assert self.linear is not None
        there = next(live.module.parameters()).device
        head = self.linear.to(there)
        return Evaluator(live, TensorBatches(self.reference), Classified(live, head), batch or BATCH)
