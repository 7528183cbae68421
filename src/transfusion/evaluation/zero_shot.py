"""Zero-shot classification: the class whose prompts are most similar to the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transfusion.evaluation.batches import Batch, Scorer
from transfusion.evaluation.class_prompts import Classes
from transfusion.evaluation.features import IMAGE, TEXT, features, fingerprint, text_parameters, unit_length
from transfusion.evaluation.text_batches import TextTokenizer, Tokens
from transfusion.running.live_model import LiveModel


@dataclass(frozen=True)
class ZeroShotScorer(Scorer):
    """Scores images by their similarity to the mean embedding of every class's prompts."""

    live: LiveModel
    dtype: torch.dtype
    label: str
    named: Classes
    tokenizer: TextTokenizer
    prompts: Sequence[Tokens]
    """Class by class, template by template."""
    chunk: int = 64
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def question(self) -> str:  # type: ignore[override]
        count = len(self.named.templates)
        return f"zero-shot class of every image, {count} prompt{'s' * (count != 1)} a class"

    @property
    def classes(self) -> int:  # type: ignore[override]
        return len(self.named.names)

    def ready(self) -> None:
        """Encode the prompts, unless the text tower is unchanged since the last time."""
        key = fingerprint(self.live)
        if key is None or key not in self._kept:
            self._kept.clear()
            self._kept[key or ""] = self._computed(gradients=False)

    def answer(self, batch: Batch, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """Return one row for every image."""
        seen = features(self.live, IMAGE, batch.inputs, self.dtype, self.label, gradients=gradients)
        with torch.set_grad_enabled(gradients):
            scale = self.live.module.get_parameter("logit_scale").exp()
            logits = scale * unit_length(seen) @ self.embeddings(gradients=gradients).T
        return logits, batch.targets.to(logits.device)

    def embeddings(self, *, gradients: bool = False) -> Tensor:
        """Return the embeddings (classes, width) of the classes; for gradients, computed anew."""
        if gradients and any(one.requires_grad for one in text_parameters(self.live).values()):
            return self._computed(gradients=True)
        if gradients or not self._kept:
            self.ready()
        return next(iter(self._kept.values()))

    def _computed(self, *, gradients: bool) -> Tensor:
        parts = []
        for start in range(0, len(self.prompts), self.chunk):
            inputs = self.tokenizer.inputs(self.prompts[start : start + self.chunk])
            parts.append(
                unit_length(features(self.live, TEXT, inputs, self.dtype, self.label, gradients=gradients))
            )
        single = torch.cat(parts)
        return unit_length(single.reshape(self.classes, -1, single.shape[-1]).mean(1))
