"""Training: a student learns to answer like the fine-tune of A, and to keep the answers of B.

One step draws inputs, asks the fine-tune and the student, and descends with Adam. The state is kept in a file
at every check, and the steps after that are the same bit for bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from transfusion.architecture.naming import Naming
from transfusion.errors import ArchitectureError
from transfusion.model.model import Model
from transfusion.running.probes.inputs import run_model
from transfusion.running.probes.pairs import RunningPair
from transfusion.running.probes.probed_model import batched, vocabulary
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.transport.refinement.answers import (
    CLASSES,
    VECTORS,
    KeptAnswers,
    Outputs,
    OutputTargets,
    problem_of,
    with_similarities,
)
from transfusion.transport.refinement.inputs import (
    BLENDED,
    CORRUPTED,
    OWN,
    SYNTHETIC,
    Inputs,
    RefinementInputs,
)
from transfusion.transport.refinement.settings import RefinementRecord, RefinementSettings

BATCH = 64
"""The number of inputs of a step that the fine-tune answers; B answers half as many."""
TOKEN_BATCH = 16
"""The same for models that answer at every token of a text."""
RATE_SHARE = 1 / 7
"""The highest learning rate, as a share of the root mean square of the fine-tune's own change."""
SLOWEST, FASTEST = 1e-6, 1e-3
"""The bounds of the learning rate."""
ADAPTER_RATE = 1e-3
"""The learning rate of the factors of an adapter."""
WARM_UP = 0.15
"""The share of the steps in which the learning rate rises."""
CLIP = 1.0
"""The largest norm of a gradient."""
CHECKS = 12
"""How often the answers to held-out inputs are checked."""
PATIENCE = 6
"""The number of checks without an improvement after which a training ends."""
UNSURE = 1.0
"""Inverted inputs are those of whose class A is not sure: its log-likelihood is below minus this number."""
OTHER_WEIGHT = 0.3
"""The weight of that in the inversion."""
ADVERSARIAL_SHARE = 0.5
"""The share of the fine-tune's continuous inputs that are adversarial to the student; of B's, all are."""
BACK = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The shares of the way from B that are tried in the end."""
GAIN_KEPT, OWN_GAIN_KEPT = 0.85, 0.95
"""The share of the gain on held-out inputs that must be left after going back towards B: on synthetic ones,
which are not those of the task, and on the user's own."""


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
        change = math.sqrt(squares / max(count, 1))
        return min(FASTEST, max(SLOWEST, RATE_SHARE * change))


class Agreement(NamedTuple):
    """How near a student is to the fine-tune on held-out inputs."""

    share: float
    """The share of equal answers, or a cosine."""
    divergence: float
    """The loss."""


class Refinement:
    """The fine-tune of A as the teacher, B to be kept, and the inputs that both answer."""

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
            drawn_for, teacher.module, 2 * settings.seed, self._file("of-a"), vocabulary(teacher.of_a)
        )
        self._invert(self.inputs, teacher.of_a)
        if settings.calibrate is not None:
            self.inputs.read_own(Path(settings.calibrate))
        self.inputs_of_b = RefinementInputs(b, of_b, 2 * settings.seed + 1, self._file("of-b"))
        self._invert(self.inputs_of_b, None)
        self.held_out = self.inputs.held_out()
        own = OWN in self.held_out
        self.judges = (OWN,) if own else tuple(one for one in (SYNTHETIC, CORRUPTED) if one in self.held_out)
        """The kinds of held-out inputs that starts and ways back are judged by."""
        self.checked = OWN if own else BLENDED if BLENDED in self.held_out else SYNTHETIC
        """The kind that the steps are judged by."""
        self.targets = self._targets(student)
        sample = self.wanted(self.inputs.draw_plain(0, 2))
        by_token = any(sample[name].ndim == 3 for name in self.targets.names)
        self.batch = min(BATCH, TOKEN_BATCH) if by_token else BATCH

    def _file(self, name: str) -> Path | None:
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
            classes = (choices * logits.shape[-1]).long()
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
        parts = [
            (self.wanted(some), self.answers(student, some))
            for some in batched(self.held_out[kind], self.batch)
        ]
        return Agreement(
            fmean(self.targets.agreement(*part) for part in parts),
            fmean(float(self.targets.loss(*part)) for part in parts),
        )

    def divergence(self, student: nn.Module) -> float:
        """Return how far a student is from the fine-tune, by the kinds of inputs that decide."""
        return fmean(self.measure(student, kind).divergence for kind in self.judges)

    def loss(self, student: nn.Module, kept: KeptAnswers, step: int) -> Tensor:
        """Return the loss of one step: the distance from the fine-tune, and the weighted loss of B."""

        def distance(inputs: Inputs) -> Tensor:
            found = self.answers(student, inputs, gradients=True)
            wanted = self.wanted(inputs, gradients=True)
            return self.targets.loss(wanted, found, inputs.get("attention_mask"))

        made, *own = self.inputs.draw(step, self.batch)
        drawn = [self.inputs.made_adversarial(made, distance, step, ADVERSARIAL_SHARE), *own]
        total = torch.stack([distance(inputs) for inputs in drawn]).mean()
        if self.settings.keep:
            inputs = self.inputs_of_b.draw_plain(step, self.batch // 2)
            inputs = self.inputs_of_b.made_adversarial(inputs, kept.loss, step)
            total = total + self.settings.keep * kept.loss(inputs)
        return total

    # ── training ─────────────────────────────────────────────────────────────────────────────

    def choose(self, starts: Mapping[str, nn.Module]) -> str:
        """Return the name of the start whose answers to held-out inputs are nearest to the fine-tune's."""
        found: dict[str, float] = {}
        with phase("comparing starts with the fine-tune", len(starts)) as advance:
            for name, module in starts.items():
                found[name] = self.divergence(module)
                advance("starts compared with the fine-tune")
        return min(found, key=lambda name: found[name])

    def train(
        self, student: nn.Module, start: str, rate: float, progress: Progress = SILENT
    ) -> RefinementRecord:
        """Train the trainable parameters of a student, and leave it in the best state."""
        with phase("comparing the start with the fine-tune"):
            before = {kind: self.measure(student, kind) for kind in self.held_out}
            some = self.inputs_of_b.draw_plain(0, 2)
            shared = self.teacher.pair.shared
            kept = KeptAnswers(self.b, self.of_b, student, some, shared, same_class=self.same_class)
        trained = {name: one for name, one in student.named_parameters() if one.requires_grad}
        best_step = train(
            trained,
            lambda step: self.loss(student, kept, step),
            lambda: self.measure(student, self.checked).divergence,
            before[self.checked].divergence,
            rate=rate,
            steps=self.settings.steps,
            file=self._file("state.pt"),
            progress=progress,
        )
        with phase("comparing the result with the fine-tune"):
            share = self._go_back(student, trained, before) if self.settings.keep and best_step else 1.0
            after = {kind: self.measure(student, kind) for kind in self.held_out}
        return RefinementRecord(
            self.settings,
            start,
            self.inputs.about,
            "cosine" if self.targets.kind == VECTORS else "answers",
            {kind: round(one.share, 4) for kind, one in before.items()},
            {kind: round(one.share, 4) for kind, one in after.items()},
            (_mean_divergence(before), _mean_divergence(after)),
            round(kept.agreement(self.translation(self.held_out[SYNTHETIC])), 4),
            best_step,
            share,
        )

    def _go_back(
        self, student: nn.Module, trained: Mapping[str, nn.Parameter], before: Mapping[str, Agreement]
    ) -> float:
        """Go back towards B while most of the gain on held-out inputs is left; return the share of the way.

        On the straight line between two models, what the first one could do comes back sooner than what the
        second one has learned gets lost. The student stays at least as near to the fine-tune as its start.
        """
        ends = {
            name: (base, trained[name].detach().clone()) for name, base in self._values_of_b(trained).items()
        }
        if not ends:
            return 1.0

        def at(share: float) -> float:
            for name, (base, best) in ends.items():
                torch.lerp(base, best, share, out=trained[name].data)
            return self.divergence(student)

        nothing, everything = at(0.0), at(1.0)
        start = fmean(before[kind].divergence for kind in self.judges)
        left = OWN_GAIN_KEPT if self.inputs.own is not None else GAIN_KEPT
        enough = min(start, nothing - left * (nothing - everything))
        share = next((share for share in BACK if at(share) <= enough), 1.0)
        at(share)
        return share

    def _values_of_b(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return B's values of the trained parameters; parameters that B lacks are skipped."""
        naming = Naming(self.b.family, live=True)
        own = {naming.canonical(name): one.data for name, one in self.of_b.named_parameters()}
        found: dict[str, Tensor] = {}
        for name, parameter in trained.items():
            base = own.get(naming.canonical(name))
            if "lora_B" in name or "lora_embedding_B" in name:
                found[name] = torch.zeros_like(parameter)
            elif base is not None and base.shape == parameter.shape:
                found[name] = base
        return found


def train(
    parameters: Mapping[str, nn.Parameter],
    loss: Callable[[int], Tensor],
    divergence: Callable[[], float],
    best_value: float,
    *,
    rate: float,
    steps: int,
    file: Path | None = None,
    progress: Progress = SILENT,
) -> int:
    """Descend on ``loss(step)``, leave the parameters where the divergence was least; return that step.

    ``best_value`` is the divergence before the first step. Training resumes from the state in ``file``.
    """
    optimizer = torch.optim.Adam(parameters.values(), lr=rate)
    step = best_step = checks_since = 0
    best = {name: one.detach().clone() for name, one in parameters.items()}
    if file is not None and file.exists():
        state: dict[str, Any] = torch.load(file, weights_only=True)
        step, best_step, best_value, checks_since = state["progress"]
        best = state["best"]
        optimizer.load_state_dict(state["optimizer"])
        _put(parameters, state["now"])
        progress.note(f"note: refinement goes on from step {step}")
    with progress.bar(steps, "refining") as advance:
        while step < steps and checks_since < PATIENCE:
            for group in optimizer.param_groups:
                group["lr"] = rate * _share_of_rate((step + 1) / (steps + 1))
            value = loss(step)
            optimizer.zero_grad()
            torch.autograd.backward(value)
            nn.utils.clip_grad_norm_(parameters.values(), CLIP)
            optimizer.step()
            step += 1
            advance(f"refining, loss {float(value.detach()):.3f}", step, steps)
            if step % max(1, steps // CHECKS) and step < steps:
                continue
            checks_since += 1
            if (found := divergence()) < best_value:
                best_value, best_step, checks_since = found, step, 0
                _put(best, parameters)
            if file is not None:
                now = {name: one.detach() for name, one in parameters.items()}
                state = {"now": now, "best": best, "optimizer": optimizer.state_dict()}
                state["progress"] = step, best_step, best_value, checks_since
                staged = file.with_suffix(".new")
                torch.save(state, staged)
                os.replace(staged, file)
    _put(parameters, best)
    return best_step


def _put(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.data.copy_(values[name].data)


def _share_of_rate(done: float) -> float:
    """Return the learning rate when this share of the steps is done: it rises, then falls, along cosines."""
    part = done / WARM_UP if done < WARM_UP else (1 - done) / (1 - WARM_UP)
    return (1 - math.cos(math.pi * part)) / 2


def _mean_divergence(found: Mapping[str, Agreement]) -> float:
    return round(fmean(one.divergence for one in found.values()), 6)
