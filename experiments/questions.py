"""What is asked of CLIPs beside zero-shot classes: those under a frozen head, and those of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.data.dataset import Dataset
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.inputs import tensor_batches
from transfusion.evaluation.scorers import Scorer, ZeroShotScorer
from transfusion.evaluation.task import EvaluationData
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.runtime.optional_libraries import require_library

BATCH = 250


@dataclass(frozen=True)
class Captioned(Scorer):
    """Which caption is nearest to an image; the captions' embeddings stay as they are: a frozen head."""

    captions: Tensor
    """One embedding of unit length for every class."""

    def logits(self, inputs: Mapping[str, Tensor], *, gradients: bool) -> Tensor:
        """As the live model sees images at this moment."""
        module: Any = self.live.module
        with torch.set_grad_enabled(gradients):
            seen = module.encode_image(inputs["pixel_values"].to(self.captions.device))
            scale: Tensor = module.logit_scale.exp()
            return scale * nn.functional.normalize(seen, dim=-1) @ self.captions.T


def frozen(evaluator: Evaluator) -> Evaluator:
    """The same zero-shot question with the head that the captions make now, however the towers change."""
    asked = evaluator.scorer
    assert isinstance(asked, ZeroShotScorer)
    captions = asked.embeddings().detach()
    scorer = Captioned(asked.live, asked.label, "nearest caption", asked.classes, captions)
    return replace(evaluator, scorer=scorer)


@dataclass(frozen=True)
class Classified(Scorer):
    """What a linear head says about the embedding of a text."""

    head: nn.Linear

    def logits(self, inputs: Mapping[str, Tensor], *, gradients: bool) -> Tensor:
        """As the live model reads at this moment."""
        module: Any = self.live.module
        with torch.set_grad_enabled(gradients):
            read: Tensor = self.head(module.encode_text(inputs["input_ids"].to(self.head.weight.device)))
            return read


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
        question = "class of a text by a linear head"
        scorer = Classified(live, self.reference.label, question, head.out_features, head)
        return Evaluator(tensor_batches(self.reference), scorer, batch or BATCH)
