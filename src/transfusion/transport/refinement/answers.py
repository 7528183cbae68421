"""Answers: how far a student's outputs are from a teacher's and from B's, and on how many inputs they agree.

Logits are compared as distributions. Other outputs are vectors, which are compared by their distance. If a
model has logits, its vectors are not compared: B may compute the same answers from other vectors.

A student of B's own class is compared with B by its outputs. A student with other heads is compared by the
features that B's outputs, or B's heads, are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from transfusion.architecture.naming import Naming
from transfusion.model.model import Model
from transfusion.running.activations import on_module_calls
from transfusion.running.probes.inputs import run_model

Outputs = Mapping[str, Tensor]
PAIRED = (("image_features", "text_features"), ("image_embeds", "text_embeds"))
"""Embeddings of two towers, which are compared with each other."""
CLASSES, LABELS, VECTORS = "classes", "labels", "vectors"
"""What outputs are: logits of which one is chosen, logits that are independent of each other, or vectors."""


@dataclass(frozen=True)
class OutputTargets:
    """The outputs to compare, by name, and what they are."""

    kind: str
    names: tuple[str, ...]

    @classmethod
    def between(cls, teacher: Outputs, student: Outputs, problem: str | None = None) -> OutputTargets:
        """Choose the outputs that both have in one shape; ``problem`` is the model's kind of task."""
        both = [
            name
            for name, value in teacher.items()
            if value.ndim >= 2 and name in student and value.shape == student[name].shape
        ]
        logits = [name for name in both if "logits" in name]
        several = [name for name in logits if teacher[name].shape[-1] > 1]
        if several:
            return cls(LABELS if problem == "multi_label_classification" else CLASSES, tuple(several))
        floats = [name for name in both if teacher[name].is_floating_point()]
        return cls(VECTORS, tuple(logits or floats))

    def loss(self, teacher: Outputs, student: Outputs, mask: Tensor | None = None) -> Tensor:
        """Return the mean divergence of all compared outputs; 0 if they are equal."""
        return torch.stack([self._loss(teacher[name], student[name], mask) for name in self.names]).mean()

    def _loss(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
        if self.kind == CLASSES:  # KL(teacher ‖ student); masked tokens do not count
            expected, found = (one.float().log_softmax(-1) for one in (teacher, student))
            each = functional.kl_div(found, expected, log_target=True, reduction="none").sum(-1)
            if mask is None or mask.shape != each.shape:
                return each.mean()
            mask = mask.to(each.device)
            return (each * mask).sum() / mask.sum().clamp(min=1)
        if self.kind == LABELS:
            likely, binary = teacher.float().sigmoid(), functional.binary_cross_entropy_with_logits
            return binary(student.float(), likely) - binary(teacher.float(), likely)
        spread = (teacher - teacher.mean(0, keepdim=True)).square().mean()  # over the inputs
        return (student - teacher).square().mean() / spread.clamp(min=1e-12)

    def agreement(self, teacher: Outputs, student: Outputs) -> float:
        """Return the share of inputs with the same answer; for vectors, the cosine around their mean."""
        return fmean(self._agreement(teacher[name], student[name]) for name in self.names)

    def _agreement(self, teacher: Tensor, student: Tensor) -> float:
        if self.kind == CLASSES:
            return float((teacher.argmax(-1) == student.argmax(-1)).float().mean())
        if self.kind == LABELS:
            return float(((teacher > 0) == (student > 0)).float().mean())
        centre = teacher.mean(0, keepdim=True)
        return float(
            functional.cosine_similarity((teacher - centre).flatten(), (student - centre).flatten(), 0)
        )


def with_similarities(outputs: Outputs) -> dict[str, Tensor]:
    """Add the similarities of two towers' embeddings, for models that do not return them as logits."""
    found = dict(outputs)
    for image, text in PAIRED:
        if image in outputs and text in outputs and "logits_per_image" not in outputs:
            one, other = (functional.normalize(outputs[name], dim=-1) for name in (image, text))
            scale = outputs.get("logit_scale", torch.tensor(100.0))
            found["logits_per_image"] = scale * one @ other.T  # (images, texts)
            found["logits_per_text"] = found["logits_per_image"].T
    return found


def problem_of(module: nn.Module) -> str | None:
    """Return the kind of task that a module's configuration names."""
    return getattr(getattr(module, "config", None), "problem_type", None)


class KeptAnswers:
    """The outputs or features of B that a student is to keep."""

    def __init__(
        self,
        b: Model,
        of_b: nn.Module,
        student: nn.Module,
        inputs: Mapping[str, Tensor],
        shared: Callable[[Outputs], Outputs],
        *,
        same_class: bool,
    ) -> None:
        """``same_class`` says that both have the same heads; ``inputs`` are some to look for features.

        ``shared`` leaves of logits those of the tokens that both have.
        """
        self.b, self.of_b, self.student, self.shared = b, of_b, student, shared
        self.features = None if same_class else _feature_modules(b, of_b, student, inputs)
        before = self._run(of_b, inputs)
        self.targets = OutputTargets.between(before, before, problem_of(of_b))

    def loss(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return how far the student is from B, with gradients."""
        of_b, found = (self._run(one, inputs, gradients=True) for one in (self.of_b, self.student))
        return self.targets.loss(of_b, found)

    def agreement(self, inputs: Mapping[str, Tensor]) -> float:
        """Return the agreement between the student and B."""
        return self.targets.agreement(self._run(self.of_b, inputs), self._run(self.student, inputs))

    def _run(self, module: nn.Module, inputs: Mapping[str, Tensor], *, gradients: bool = False) -> Outputs:
        def run() -> Outputs:
            return run_model(module, self.b.family, inputs, double=False, gradients=gradients)

        if self.features is None:
            return with_similarities(self.shared(run()))
        found: dict[str, Tensor] = {}

        def keep(name: str, given: list[Tensor], output: Any) -> None:
            found[name] = _first_tensor(output)

        modules = _by_name(module, self.b)
        with on_module_calls({name: modules[name] for name in self.features}, keep):
            run()
        return found


def _by_name(module: nn.Module, b: Model) -> dict[str, nn.Module]:
    naming = Naming(b.family, live=True)
    return {naming.canonical(name): part for name, part in module.named_modules() if name}


def _feature_modules(
    b: Model, module: nn.Module, student: nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Return the modules of both whose outputs are outputs of B, or inputs of B's heads."""
    theirs = _by_name(student, b)
    heads = {name.rpartition(".")[0] for name in b.architecture.task_heads}
    made: list[tuple[str, Tensor]] = []  # alive, so that no other tensor gets their place in memory
    wanted: list[Tensor] = []

    def keep(name: str, given: list[Tensor], output: Any) -> None:
        if name in heads:
            wanted.extend(given[:1])
        elif name in theirs and (first := _first_tensor(output)) is not None:
            made.append((name, first))

    with on_module_calls(_by_name(module, b), keep):
        outputs = run_model(module, b.family, inputs, double=False)
    wanted += [one for one in outputs.values() if one.ndim >= 2]
    last = {one.untyped_storage().data_ptr(): name for name, one in made}
    places = [one.untyped_storage().data_ptr() for one in wanted]
    found = tuple(dict.fromkeys(last[place] for place in places if place in last))
    return found or tuple(last.values())[-1:]


def _first_tensor(output: Any) -> Any:
    """Return the tensor that a module put out, or the first of several; None, if there is none."""
    several = output.values() if isinstance(output, Mapping) else output
    several = several if isinstance(output, Mapping | tuple) else (output,)
    return next((one for one in several if isinstance(one, Tensor)), None)
