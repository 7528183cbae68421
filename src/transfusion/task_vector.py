"""Task vectors: what a fine-tune changed, tensor by tensor, read when asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transfusion.errors import MismatchError, listing
from transfusion.model import Model

RELATED = 0.5
"""Below this cosine between its weights and the base's, a model is not a fine-tune of that base."""


@dataclass(frozen=True)
class TaskVector:
    """τ = A_ft − A, as far as both have the same tensors."""

    finetuned: Model
    base: Model

    @classmethod
    def between(cls, finetuned: Model, base: Model, *, trust_base: bool = False) -> TaskVector:
        """The difference of a fine-tune and its base; a fine-tune of another base is refused."""
        vector = cls(finetuned, base)
        vector._require_one_architecture()
        if not trust_base:
            vector._require_descent()
        return vector

    def covers(self, name: str) -> bool:
        """Whether base and fine-tune both have this tensor, in one shape."""
        return (
            name in self.base.architecture.tensors
            and name in self.finetuned.architecture.tensors
            and self.base.info(name).shape == self.finetuned.info(name).shape
        )

    def difference(self, name: str) -> Tensor:
        """τ of one tensor, in float32 at least, whatever the storage type."""
        return working(self.finetuned.read(name)) - working(self.base.read(name))

    def _require_one_architecture(self) -> None:
        tuned, base = self.finetuned, self.base
        if tuned.family.name != base.family.name:
            raise MismatchError(
                f"{tuned.label} is a {tuned.family.name} and its base {base.label} a {base.family.name}",
                hint="give the base that was fine-tuned as --base",
            )
        for name in tuned.architecture.trunk:
            if name not in base.architecture.tensors:
                raise MismatchError(
                    f"{tuned.label} has {name}, which its base {base.label} does not have",
                    hint="give the base that was fine-tuned as --base",
                )
            if (now := tuned.info(name).shape) != (was := base.info(name).shape):
                resized = "vocab" in tuned.architecture.tensors[name].names()
                raise MismatchError(
                    f"{name} has shape {now} in {tuned.label} and {was} in its base {base.label}",
                    hint="the fine-tune resized its vocabulary; remove the added tokens first"
                    if resized
                    else "give the base that was fine-tuned as --base",
                )

    def _require_descent(self) -> None:
        """A fine-tune stays close to its base; look at a few large matrices."""
        matrices = [
            name
            for name, layout in self.base.architecture.trunk.items()
            if len(layout.items) > 1 and self.covers(name)
        ]
        sample = matrices[:: max(1, len(matrices) // 8)]
        cosines = {
            name: float(
                torch.cosine_similarity(
                    working(self.finetuned.read(name)).flatten(),
                    working(self.base.read(name)).flatten(),
                    dim=0,
                )
            )
            for name in sample
        }
        far = [f"{name} ({cosine:.2f})" for name, cosine in cosines.items() if cosine < RELATED]
        if len(far) > len(sample) / 2:
            raise MismatchError(
                f"{self.finetuned.label} does not look like a fine-tune of {self.base.label}: the cosine"
                f" of their weights is below {RELATED} in {listing(far, 3)}",
                hint="give the base that was fine-tuned as --base, or --trust-base if you are sure",
            )


def working(tensor: Tensor) -> Tensor:
    """The tensor in the type that arithmetic is done in."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()
