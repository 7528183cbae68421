"""Answers: how far a student's outputs are from a teacher's and from B's, and on how many inputs they agree.

Logits are compared as distributions. Other outputs are vectors, which are compared by their distance. If a
model has logits, its vectors are not compared: B may compute the same answers from other vectors.

A student of B's own class is compared with B by its outputs. A student with other heads is compared by the
features that B's outputs, or B's heads, are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.model.model import Model
from transfusion.running.activations import on_module_calls
from transfusion.running.probes.inputs import run_model

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


class KeptFeatures:
    """The outputs or features of B that a student is to keep."""

    def __init__(
        self,
        b: Model,
        module: nn.Module,
        student: nn.Module,
        inputs: Mapping[str, Tensor],
        *,
        same_class: bool,
    ) -> None:
        """``same_class`` says that both have the same heads; ``inputs`` are some to look for features."""
        self.family, self.module, self.student = b.family, module, student
        self.same_class = same_class
        self.features: tuple[str, ...] = () if same_class else _feature_modules(b, module, student, inputs)
        before = self.of_b(inputs)
        self.targets = OutputTargets.between(before, before, problem_of(module))

    def of_b(self, inputs: Mapping[str, Tensor], *, gradients: bool = False) -> Outputs:
        """Return what B computes."""
        return self._run(self.module, inputs, gradients=gradients)

    def loss(self, inputs: Mapping[str, Tensor], of_b: Outputs) -> Tensor:
        """Return how far the student is from B, with gradients."""
        return self.targets.loss(of_b, self._run(self.student, inputs, gradients=True))

    def agreement(self, inputs: Mapping[str, Tensor]) -> float:
        """Return the agreement between the student and B."""
        return self.targets.agreement(self.of_b(inputs), self._run(self.student, inputs, gradients=False))

    def _run(self, module: nn.Module, inputs: Mapping[str, Tensor], *, gradients: bool) -> Outputs:
        if self.same_class:
            outputs = run_model(module, self.family, inputs, double=False, gradients=gradients)
            return with_similarities(outputs)
        with _recorded(_by_name(module, Naming(self.family, live=True)), self.features) as found:
            run_model(module, self.family, inputs, double=False, gradients=gradients)
        return found


def problem_of(module: nn.Module) -> str | None:
    """Return the kind of task that a module's configuration names."""
    return getattr(getattr(module, "config", None), "problem_type", None)


def _by_name(module: nn.Module, naming: Naming) -> dict[str, nn.Module]:
    return {naming.canonical(name): part for name, part in module.named_modules() if name}


@contextmanager
def _recorded(modules: Mapping[str, nn.Module], names: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    """Within the block, record the outputs of these modules."""
    found: dict[str, Tensor] = {}

    def keep(name: str, given: list[Tensor], output: Any) -> None:
        found[name] = _first_tensor(output)

    with on_module_calls({name: modules[name] for name in names}, keep):
        yield found


def _feature_modules(
    b: Model, module: nn.Module, student: nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Return the modules of both whose outputs are outputs of B, or inputs of B's heads."""
    naming = Naming(b.family, live=True)
    ours, theirs = _by_name(module, naming), _by_name(student, naming)
    heads = {name.rpartition(".")[0] for name in b.architecture.heads}
    made: dict[int, str] = {}
    wanted: list[Tensor] = []
    alive: list[Tensor] = []  # so that no other tensor gets their place in memory

    def keep(name: str, given: list[Tensor], output: Any) -> None:
        if name in heads:
            wanted.extend(given[:1])
        elif name in theirs and isinstance(first := _first_tensor(output, None), Tensor):
            alive.append(first)
            made[_place(first)] = name

    with on_module_calls(ours, keep):
        outputs = run_model(module, b.family, inputs, double=False)
    wanted += [one for one in outputs.values() if one.ndim >= 2]
    places = [_place(one) for one in wanted]
    found = tuple(dict.fromkeys(made[place] for place in places if place in made))
    return found or tuple(made.values())[-1:]


def _first_tensor(output: Any, *missing: Any) -> Any:
    """Return the tensor that a module put out, or the first of several."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return next((one for one in values if isinstance(one, Tensor)), *missing)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
