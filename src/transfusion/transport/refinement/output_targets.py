"""Targets: how far a student's outputs are from a teacher's, and on how many inputs both agree.

Logits are compared as distributions. Other outputs are vectors, which are compared by their distance. If a
model has logits, its vectors are not compared: B may compute the same answers from other vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

Outputs = Mapping[str, Tensor]
PAIRED = (("image_features", "text_features"), ("image_embeds", "text_embeds"))
"""Embeddings of two towers, which are compared with each other."""
MULTI_LABEL = "multi_label_classification"


@dataclass(frozen=True)
class OutputTargets:
    """The outputs to compare, by name, and how."""

    distributions: tuple[str, ...] = ()
    """Logits of which one is chosen."""
    choices: tuple[str, ...] = ()
    """Logits that are independent of each other."""
    vectors: tuple[str, ...] = ()

    @classmethod
    def between(cls, teacher: Outputs, student: Outputs, problem: str | None = None) -> OutputTargets:
        """Choose the outputs that both have in one shape; ``problem`` is the model's kind of task."""
        both = [
            name for name, value in teacher.items() if name in student and value.shape == student[name].shape
        ]
        logits = [name for name in both if "logits" in name and teacher[name].ndim >= 2]
        single = [name for name in logits if teacher[name].shape[-1] == 1]
        several = tuple(name for name in logits if name not in single)
        if several and problem == MULTI_LABEL:
            return cls(choices=several)
        if several:
            return cls(distributions=several)
        vectors = [name for name in both if teacher[name].ndim >= 2 and teacher[name].is_floating_point()]
        return cls(vectors=tuple(single or vectors))

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.distributions, *self.choices, *self.vectors)

    def loss(self, teacher: Outputs, student: Outputs, mask: Tensor | None = None) -> Tensor:
        """Return the mean divergence of all compared outputs; 0 if they are equal."""
        parts = [_divergence(teacher[name], student[name], mask) for name in self.distributions]
        parts += [_binary_divergence(teacher[name], student[name]) for name in self.choices]
        parts += [_distance(teacher[name], student[name]) for name in self.vectors]
        return torch.stack(parts).mean()

    def agreement(self, teacher: Outputs, student: Outputs) -> float:
        """Return the share of inputs with the same answer; for vectors, the cosine around their mean."""
        shares = [
            float((teacher[name].argmax(-1) == student[name].argmax(-1)).float().mean())
            for name in self.distributions
        ]
        shares += [
            float(((teacher[name] > 0) == (student[name] > 0)).float().mean()) for name in self.choices
        ]
        shares += [_centred_cosine(teacher[name], student[name]) for name in self.vectors]
        return fmean(shares)


def with_similarities(outputs: Outputs) -> dict[str, Tensor]:
    """Add the similarities of two towers' embeddings, for models that do not return them as logits."""
    found = dict(outputs)
    for image, text in PAIRED:
        if image in outputs and text in outputs and "logits_per_image" not in outputs:
            one, other = (nn.functional.normalize(outputs[name], dim=-1) for name in (image, text))
            scale = outputs.get("logit_scale", torch.tensor(100.0))
            found["logits_per_image"] = scale * one @ other.T
            found["logits_per_text"] = found["logits_per_image"].T
    return found


def _divergence(teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean Kullback–Leibler divergence over the last dimension; masked tokens do not count."""
    expected, found = (one.float().log_softmax(-1) for one in (teacher, student))
    each = nn.functional.kl_div(found, expected, log_target=True, reduction="none").sum(-1)
    if mask is None or mask.shape != each.shape:
        return each.mean()
    return (each * mask).sum() / mask.sum().clamp(min=1)


def _binary_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    expected = teacher.float().sigmoid()
    binary = nn.functional.binary_cross_entropy_with_logits
    return binary(student.float(), expected) - binary(teacher.float(), expected)


def _distance(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the squared distance as a share of the spread of the teacher's vectors over the inputs."""
    spread = (teacher - teacher.mean(0, keepdim=True)).square().mean()
    return (student - teacher).square().mean() / spread.clamp(min=1e-12)


def _centred_cosine(teacher: Tensor, student: Tensor) -> float:
    centre = teacher.mean(0, keepdim=True)
    return float(
        nn.functional.cosine_similarity((teacher - centre).flatten(), (student - centre).flatten(), 0)
    )
