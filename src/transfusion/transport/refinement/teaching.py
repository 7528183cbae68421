"""What a student is taught: the inputs, what the fine-tune answers, and what B is to keep."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional

from transfusion.architecture.naming import Naming
from transfusion.errors import ArchitectureError
from transfusion.model.model import Model
from transfusion.running.probes.images import has_natural, natural_kind
from transfusion.running.probes.inputs import run_model
from transfusion.running.probes.pairs import RunningPair
from transfusion.running.probes.probed_model import batched, vocabulary
from transfusion.runtime.optional_libraries import install_hint
from transfusion.runtime.progress import warn
from transfusion.transport.refinement.answers import (
    CLASSES,
    VECTORS,
    KeptAnswers,
    Outputs,
    OutputTargets,
    problem_of,
    with_similarities,
)
from transfusion.transport.refinement.descent import rate_for
from transfusion.transport.refinement.inputs import (
    BLENDED,
    CORRUPTED,
    IMAGES,
    OWN,
    SYNTHETIC,
    Inputs,
    RefinementInputs,
    texts_of_a_step,
)
from transfusion.transport.refinement.lessons import Agreement, values_in
from transfusion.transport.refinement.settings import OF_IMAGES, RefinementSettings

BATCH = 64
"""The number of images or sounds of a step that the fine-tune answers; B answers half as many."""
CACHED = 1 << 24
"""The most numbers of the fine-tune's answers to held-out inputs that are kept in memory."""
UNSURE = 1.0
"""Inverted inputs are those of whose class A is not sure: its log-likelihood is below minus this number."""
OTHER_WEIGHT = 0.3
"""The weight of that in the inversion."""
ADVERSARIAL_SHARE = 0.5
"""The share of the fine-tune's continuous inputs that are adversarial to the student; of B's, all are."""


@dataclass(frozen=True)
class Teacher:
    """The fine-tune of A that a student learns from, beside A itself."""

    pair: RunningPair
    of_a: nn.Module
    tuned: Model
    """The fine-tune; A, if the fine-tune is an adapter."""
    module: nn.Module
    """The fine-tune's module."""

    @property
    def a(self) -> Model:
        return self.pair.a

    def expected(self, outputs: Outputs) -> Outputs:
        """Rewrite outputs of the fine-tune as those that a student should have."""
        return self.pair.outputs(self.tuned.architecture, outputs)

    def run(self, model: Model, module: nn.Module, inputs: Inputs, *, gradients: bool = False) -> Outputs:
        """Return the outputs of any of the models, on the tokens that A and B share."""
        outputs = run_model(module, model.family, inputs, double=False, gradients=gradients)
        return with_similarities(self.pair.shared(outputs))

    @property
    def rate(self) -> float:
        """The learning rate for whole models, from how far the fine-tune moved the weights of A."""
        naming = Naming(self.a.family, live=True)
        own = {naming.canonical(name): one for name, one in self.of_a.named_parameters()}
        squares, count = 0.0, 0
        for name, parameter in self.module.named_parameters():
            other = own.get(naming.canonical(name))
            if other is not None and other.ndim >= 2 and other.shape == parameter.shape:
                squares += float((parameter - other).square().sum())
                count += other.numel()
        return rate_for(math.sqrt(squares / max(count, 1)))


class Teaching:
    """The fine-tune of A as the teacher, B to be kept, and the inputs that both answer at every step."""

    saves, pace = True, ""

    def __init__(
        self,
        teacher: Teacher,
        b: Model,
        of_b: nn.Module,
        student: nn.Module,
        settings: RefinementSettings,
        *,
        same_class: bool = True,
        kept: Path | None = None,
    ) -> None:
        """``student`` is one that may be trained, for the outputs that it has.

        ``same_class`` says that it has the heads of B, and no others. ``kept`` is a file name for the state
        and the inputs of an interrupted run, which goes on with them.
        """
        self.teacher, self.b, self.of_b, self.settings = teacher, b, of_b, settings
        self.same_class, self.kept = same_class, kept
        for module in (teacher.module, teacher.of_a, of_b):
            module.eval().requires_grad_(False)
        self.translation = teacher.pair.inputs(teacher.of_a, of_b)
        drawn_for = teacher.a if teacher.a.family.draws_inputs else teacher.tuned
        self.inputs = RefinementInputs(
            drawn_for, teacher.module, 2 * settings.seed, self.file("of-a"), vocabulary(teacher.of_a)
        )
        if self.inputs.continuous == IMAGES and settings.steps is None:
            self.settings = replace(settings, steps=OF_IMAGES)
        kind = natural_kind(self.inputs.subject)
        if kind is not None and not has_natural(kind):
            warn(f"synthetic images show shapes alone; for {kind}, {install_hint('images')}")
        self._invert(self.inputs, teacher.of_a)
        if settings.calibrate is not None:
            self.inputs.read_own(Path(settings.calibrate))
        self.inputs_of_b = RefinementInputs(b, of_b, 2 * settings.seed + 1, self.file("of-b"))
        self._invert(self.inputs_of_b, None)
        self.held_out = self.inputs.held_out()
        self._known: dict[str, list[Outputs]] = {}
        self._kept: KeptAnswers | None = None
        own = OWN in self.held_out
        self.judges = (OWN,) if own else tuple(one for one in (SYNTHETIC, CORRUPTED) if one in self.held_out)
        """The kinds of held-out inputs that starts and ways back are judged by."""
        self.checked = OWN if own else BLENDED if BLENDED in self.held_out else SYNTHETIC
        """The kind that the steps are judged by."""
        self.targets = self._targets(student)
        sample = self.wanted(self.inputs.draw_plain(0, 2))
        by_token = any(sample[name].ndim == 3 for name in self.targets.names)
        texts = self.inputs.continuous is None
        self.batch = texts_of_a_step(self.inputs.subject.length) if by_token or texts else BATCH

    def file(self, name: str) -> Path | None:
        return self.kept and self.kept.with_name(f"{self.kept.name}-{name}")

    def _invert(self, inputs: RefinementInputs, other: nn.Module | None) -> None:
        """Add inputs of whose class a model is sure, and the other one is not."""

        def run(module: nn.Module, given: Inputs, *, gradients: bool = False) -> Outputs:
            return self.teacher.run(inputs.model, module, given, gradients=gradients)

        some = inputs.draw_plain(0, 2)
        sample, beside = run(inputs.module, some), {} if other is None else run(other, some)
        targets = OutputTargets.between(sample, sample)
        name = next((name for name in targets.names if sample[name].ndim == 2), None)
        if targets.kind != CLASSES or name is None:
            return
        comparable = name in beside and beside[name].shape == sample[name].shape

        def loss(given: Inputs, choices: Tensor) -> Tensor:
            logits = run(inputs.module, given, gradients=True)[name]  # (inputs, classes)
            classes = (choices * logits.shape[-1]).long().to(logits.device)
            value = functional.cross_entropy(logits, classes)
            if other is not None and comparable:
                likely = run(other, given, gradients=True)[name].log_softmax(-1)
                chosen = likely.gather(1, classes[:, None])
                value = value + OTHER_WEIGHT * (chosen + UNSURE).relu().mean()
            return value

        inputs.invert(loss)

    def _targets(self, student: nn.Module) -> OutputTargets:
        some = self.inputs.draw_plain(0, 2)
        outputs = self.wanted(some)
        if not self.translation.same_places:
            outputs = {name: one for name, one in outputs.items() if one.ndim == 2}
        found = OutputTargets.between(outputs, self.answers(student, some), problem_of(self.teacher.module))
        if not found.names:
            raise ArchitectureError(
                f"{self.teacher.tuned.label}: the model has no outputs that could be compared with those of"
                f" {self.b.label}",
                hint="leave out `refine`",
            )
        return found

    # ── answers ──────────────────────────────────────────────────────────────────────────────

    def wanted(self, inputs: Inputs, *, gradients: bool = False) -> Outputs:
        """Return the fine-tune's outputs; vectors in B's basis."""
        teacher = self.teacher
        return teacher.expected(teacher.run(teacher.tuned, teacher.module, inputs, gradients=gradients))

    def answers(self, student: nn.Module, inputs: Inputs, *, gradients: bool = False) -> Outputs:
        """Return a student's outputs on inputs of the fine-tune."""
        return self.teacher.run(self.b, student, self.translation(inputs), gradients=gradients)

    def measure(self, student: nn.Module, kind: str) -> Agreement:
        """Compare a student with the fine-tune on held-out inputs."""
        given = list(batched(self.held_out[kind], self.batch))
        parts = [
            (wanted, self.answers(student, some))
            for some, wanted in zip(given, self.wanted_of(kind, given), strict=True)
        ]
        return Agreement(
            fmean(self.targets.agreement(*part) for part in parts),
            fmean(float(self.targets.loss(*part)) for part in parts),
        )

    def wanted_of(self, kind: str, given: list[Inputs]) -> Iterable[Outputs]:
        """Return the fine-tune's answers to held-out inputs; small ones are asked for once."""
        if kind not in self._known:
            first = self.wanted(given[0])
            size = sum(first[name].numel() for name in self.targets.names) * len(given)
            if size > CACHED:
                return (self.wanted(some) for some in given)
            self._known[kind] = [first, *(self.wanted(some) for some in given[1:])]
        return self._known[kind]

    def _kept_answers(self, student: nn.Module) -> KeptAnswers:
        """Return the answers of B that a student is to keep."""
        if self._kept is None or self._kept.student is not student:
            some, shared = self.inputs_of_b.draw_plain(0, 2), self.teacher.pair.shared
            self._kept = KeptAnswers(self.b, self.of_b, student, some, shared, same_class=self.same_class)
        return self._kept

    def agreement_with_b(self, student: nn.Module) -> float:
        """Return the agreement between a student and B on synthetic inputs."""
        return self._kept_answers(student).agreement(self.translation(self.held_out[SYNTHETIC]))

    def values_of_b(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return B's values of the trained parameters; parameters that B lacks are skipped."""
        naming = Naming(self.b.family, live=True)
        own = {naming.canonical(name): one.data for name, one in self.of_b.named_parameters()}
        return values_in(own, naming, trained)

    # ── for the training ─────────────────────────────────────────────────────────────────────

    @property
    def kinds(self) -> Collection[str]:
        """All kinds of held-out inputs."""
        return self.held_out

    @property
    def about(self) -> Sequence[str]:
        """Descriptions of the inputs."""
        return self.inputs.about

    @property
    def measures(self) -> str:
        """What agreement means."""
        return "cosine" if self.targets.kind == VECTORS else "answers"

    def add_gradients(self, student: nn.Module, step: int, keep: float) -> float:
        """Add the gradients of one step: of the distance from the fine-tune, and the weighted one from B."""
        total = self.loss(student, step, keep)
        torch.autograd.backward(total)
        return float(total.detach())

    def loss(self, student: nn.Module, step: int, keep: float) -> Tensor:
        """Return the loss of one step: the distance from the fine-tune, and the weighted loss of B."""

        def distance(inputs: Inputs) -> Tensor:
            found = self.answers(student, inputs, gradients=True)
            wanted = self.wanted(inputs, gradients=True)
            return self.targets.loss(wanted, found, inputs.get("attention_mask"))

        made, *own = self.inputs.draw(step, self.batch)
        drawn = [self.inputs.made_adversarial(made, distance, step, ADVERSARIAL_SHARE), *own]
        total = torch.stack([distance(inputs) for inputs in drawn]).mean()
        if keep:
            kept = self._kept_answers(student)
            inputs = self.inputs_of_b.draw_plain(step, self.batch // 2)
            inputs = self.inputs_of_b.made_adversarial(inputs, kept.loss, step)
            total = total + keep * kept.loss(inputs)
        return total
