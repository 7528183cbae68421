"""Training: a student learns to answer like the fine-tune of A, and to keep the answers of B.

The state of a training (parameters, Adam's moments, the best parameters so far) can be saved and loaded
again, and the steps after that are the same bit for bit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.errors import ArchitectureError
from transfusion.files.publishing import write_tensors
from transfusion.model.model import Model
from transfusion.running.probes.inputs import run_model
from transfusion.running.probes.pairs import InputTranslation
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.runtime.engines import fitting_threads
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.transport.refinement.answers import (
    KeptFeatures,
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
    Prepared,
    RefinementInputs,
    batches,
    invert_inputs,
    own_inputs,
)
from transfusion.transport.refinement.settings import RefinementRecord, RefinementSettings

WARM_UP = 0.15
"""The share of the steps in which the learning rate rises."""
CLIP = 1.0
"""The largest norm of a gradient."""
PATIENCE = 6
"""The number of checks without an improvement after which a training is settled."""
_NOW, _BEST, _FIRST, _SECOND = "now/", "best/", "first/", "second/"


@dataclass
class TrainingState:
    """Trainable parameters on their way."""

    parameters: Mapping[str, nn.Parameter]
    rate: float
    steps: int
    best_value: float
    """The smallest divergence on held-out inputs."""
    best_step: int = 0
    step: int = 0
    checks_since: int = 0
    """The number of checks since the best one."""
    best: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.best = self._copied()
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=self.rate)

    @property
    def settled(self) -> bool:
        """Whether further steps have stopped to help."""
        return self.checks_since >= PATIENCE

    def descend(self, loss: Tensor) -> None:
        """Take one step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * _share_of_rate((self.step + 1) / (self.steps + 1))
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
        self.optimizer.step()
        self.step += 1

    def check(self, value: float) -> None:
        """Compare a held-out divergence with the best one, and remember the better state."""
        if value < self.best_value:
            self.best_value, self.best_step, self.best = value, self.step, self._copied()
            self.checks_since = 0
        else:
            self.checks_since += 1

    def restore(self) -> None:
        """Go back to the best parameters."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.best[name])

    def _copied(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.parameters.items()}

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def save(self, file: Path) -> None:
        """Write everything that the next step depends on."""
        moments = {name: self.optimizer.state[one] for name, one in self.parameters.items()}
        tensors = {
            **{_NOW + name: one.detach() for name, one in self.parameters.items()},
            **{_BEST + name: one for name, one in self.best.items()},
            **{_FIRST + name: one["exp_avg"] for name, one in moments.items() if one},
            **{_SECOND + name: one["exp_avg_sq"] for name, one in moments.items() if one},
        }
        numbers = {
            "step": self.step,
            "best_step": self.best_step,
            "best_value": self.best_value,
            "checks_since": self.checks_since,
        }
        staged = file.with_suffix(".new")
        held = {name: one.cpu().contiguous() for name, one in tensors.items()}
        write_tensors(staged, held, {"state": json.dumps(numbers)})
        os.replace(staged, file)

    def load(self, file: Path) -> bool:
        """Go on from a file that `save` has written; return whether there is one."""
        if not file.exists():
            return False
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            numbers = json.loads((opened.metadata() or {})["state"])
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[_NOW + name])
            self.best[name].copy_(tensors[_BEST + name])
            if _FIRST + name in tensors:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(numbers["step"])),
                    "exp_avg": tensors[_FIRST + name].to(parameter),
                    "exp_avg_sq": tensors[_SECOND + name].to(parameter),
                }
        self.step, self.best_step = numbers["step"], numbers["best_step"]
        self.best_value, self.checks_since = numbers["best_value"], numbers["checks_since"]
        return True


def _share_of_rate(done: float) -> float:
    """Return the learning rate when this share of the steps is done: it rises, then falls, along cosines."""
    part = done / WARM_UP if done < WARM_UP else (1 - done) / (1 - WARM_UP)
    return (1 - math.cos(math.pi * part)) / 2


BATCH = 64
"""The number of inputs of a step that the fine-tune answers."""
TOKEN_BATCH = 16
"""The same for models that answer at every token of a text."""
RATE_SHARE = 1 / 7
"""The highest learning rate, as a share of the root mean square of the fine-tune's own change."""
SLOWEST, FASTEST = 1e-6, 1e-3
"""The bounds of the learning rate."""
ADAPTER_RATE = 1e-3
"""The learning rate of the factors of an adapter."""
CHECKS = 12
"""How often the answers to held-out inputs are checked."""
OWN_INPUTS = 4096
"""The most inputs of the user that are read."""
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


class Agreement(NamedTuple):
    """How near a student is to the fine-tune on held-out inputs."""

    share: float
    """The share of equal answers, or a cosine."""
    divergence: float
    """The loss."""


@dataclass(frozen=True)
class Teacher:
    """The fine-tune of A that a student learns from, beside A itself."""

    a: Model
    of_a: nn.Module
    tuned: Model
    """The fine-tune; A, if the fine-tune is an adapter."""
    module: nn.Module
    """The fine-tune's module."""
    expected: Callable[[Outputs], Outputs]
    """Rewrites outputs of the fine-tune as those that a student should have."""
    translation: Callable[[nn.Module, nn.Module], InputTranslation]
    """Returns what rewrites inputs of A as inputs of B."""


@dataclass
class Refiner:
    """The fine-tune of A as the teacher, B to be kept, and the inputs that both answer."""

    teacher: Teacher
    b: Model
    of_b: nn.Module
    settings: RefinementSettings = field(default_factory=RefinementSettings)
    same_class: bool = True
    """Whether a student has the heads of B, and no others."""
    progress: Progress = SILENT
    kept: Path | None = None
    """A path beside which prepared inputs are kept, for a run that goes on after an interruption."""
    translation: InputTranslation = field(init=False)
    """Rewrites inputs of the fine-tune as inputs of a student."""
    _example: nn.Module | None = field(default=None, init=False)
    """A student, for the outputs that it has."""

    def __post_init__(self) -> None:
        for module in (self.teacher.module, self.teacher.of_a, self.of_b):
            module.eval().requires_grad_(False)
        self.translation = self.teacher.translation(self.teacher.of_a, self.of_b)

    def fitting_threads(self, most: int) -> int:
        """Return how many threads answer a batch of random inputs fastest."""
        inputs = ProbedModel(self.teacher.tuned, self.teacher.module).template(TOKEN_BATCH)
        return fitting_threads(lambda: self._run(self.teacher.tuned, self.teacher.module, inputs), most)

    def choose(self, starts: Mapping[str, nn.Module]) -> str:
        """Return the name of the start whose answers to held-out inputs are nearest to the fine-tune's."""
        self._example = next(iter(starts.values()))
        found: dict[str, float] = {}
        with phase("comparing starts with the fine-tune", len(starts)) as advance:
            for name, module in starts.items():
                found[name] = self._divergence(module, *self._judges)
                advance("starts compared with the fine-tune")
        return min(found, key=lambda name: found[name])

    def refine(
        self, student: nn.Module, start: str, checkpoint: Path | None = None, *, rate: float | None = None
    ) -> RefinementRecord:
        """Train the trainable parameters of a student, and leave it in the best state.

        ``checkpoint`` is a file for the state at every check, from which an interrupted run goes on.
        ``rate`` is the highest learning rate; without it, the one for whole models.
        """
        with phase("comparing the start with the fine-tune"):
            before = self._measure_all(student)
            kept = self._kept(student)
        trained = {name: one for name, one in student.named_parameters() if one.requires_grad}
        checked = OWN if OWN in before else BLENDED
        state = TrainingState(trained, rate or self.rate, self.settings.steps, before[checked].divergence)
        if checkpoint is not None and state.load(checkpoint):
            self.progress.note(f"note: refinement goes on from step {state.step}")
        every = max(1, state.steps // CHECKS)
        with self.progress.bar(state.steps, "refining") as advance:
            while state.step < state.steps and not state.settled:
                loss = self._loss(student, kept, state.step)
                state.descend(loss)
                advance(f"refining, loss {float(loss.detach()):.3f}", state.step, state.steps)
                if state.step % every == 0 or state.step == state.steps:
                    state.check(self._divergence(student, checked))
                    if checkpoint is not None:
                        state.save(checkpoint)
        state.restore()
        gained = self.settings.keep and state.best_step
        with phase("comparing the result with the fine-tune"):
            share = self._go_back(student, state, before) if gained else 1.0
            after = self._measure_all(student)
        return RefinementRecord(
            self.settings,
            start,
            self.inputs.about,
            "cosine" if self.targets.vectors else "answers",
            {kind: round(one.share, 4) for kind, one in before.items()},
            {kind: round(one.share, 4) for kind, one in after.items()},
            (_mean_divergence(before), _mean_divergence(after)),
            round(kept.agreement(self.translation(self.held_out[SYNTHETIC])), 4),
            state.best_step,
            share,
        )

    def _go_back(self, student: nn.Module, state: TrainingState, before: Mapping[str, Agreement]) -> float:
        """Go back towards B while most of the gain on held-out inputs is left; return the share of the way.

        On the straight line between two models, what the first one could do comes back sooner than what the
        second one has learned gets lost. The student stays at least as near to the fine-tune as its start.
        """
        if not (ends := self._bases(state)):
            return 1.0

        def at(share: float) -> float:
            for name, base in ends.items():
                torch.lerp(base, state.best[name], share, out=state.parameters[name].data)
            return self._divergence(student, *self._judges)

        nothing, everything = at(0.0), at(1.0)
        start = fmean(before[kind].divergence for kind in self._judges)
        left = OWN_GAIN_KEPT if self.inputs.own is not None else GAIN_KEPT
        enough = min(start, nothing - left * (nothing - everything))
        share = next((share for share in BACK if at(share) <= enough), 1.0)
        at(share)
        return share

    def _bases(self, state: TrainingState) -> dict[str, Tensor]:
        """Return the values of trained parameters that make the student B; without those that only it has."""
        naming = Naming(self.b.family, live=True)
        own = {naming.canonical(name): one.data for name, one in self.of_b.named_parameters()}
        bases: dict[str, Tensor] = {}
        for name, parameter in state.parameters.items():
            base = own.get(naming.canonical(name))
            if "lora_B" in name or "lora_embedding_B" in name:
                bases[name] = torch.zeros_like(parameter)
            elif base is not None and not base.is_meta and base.shape == parameter.shape:
                bases[name] = base
        return bases

    @cached_property
    def rate(self) -> float:
        """The learning rate, from how far the fine-tune moved the weights of A."""
        naming = Naming(self.teacher.a.family, live=True)
        own = {naming.canonical(name): one for name, one in self.teacher.of_a.named_parameters()}
        squares, count = 0.0, 0
        for name, parameter in self.teacher.module.named_parameters():
            other = own.get(naming.canonical(name))
            if other is not None and other.ndim >= 2 and other.shape == parameter.shape:
                squares += float((parameter - other).square().sum())
                count += other.numel()
        change = math.sqrt(squares / max(count, 1))
        return min(FASTEST, max(SLOWEST, RATE_SHARE * change))

    # ── inputs ───────────────────────────────────────────────────────────────────────────────

    @cached_property
    def inputs(self) -> RefinementInputs:
        """The inputs that the fine-tune answers."""
        plain = RefinementInputs(
            self.teacher.tuned, self.teacher.module, 2 * self.settings.seed, self._prepared("of-a")
        )
        inverted = self._inverted(plain, self.teacher.module, self.teacher.of_a)
        if self.settings.calibrate is None:
            return plain.extended(inverted)
        path = Path(self.settings.calibrate)
        return plain.extended(
            inverted, *own_inputs(path, self.teacher.tuned, self.teacher.module, OWN_INPUTS, 0)
        )

    @cached_property
    def inputs_of_b(self) -> RefinementInputs:
        """The inputs that B answers."""
        plain = RefinementInputs(self.b, self.of_b, 2 * self.settings.seed + 1, self._prepared("of-b"))
        return plain.extended(self._inverted(plain, self.of_b, None))

    def _prepared(self, name: str) -> Prepared:
        return Prepared(self.kept and self.kept.with_stem(f"{self.kept.stem}-{name}"))

    @cached_property
    def held_out(self) -> dict[str, Inputs]:
        return self.inputs.held_out()

    @property
    def _judges(self) -> tuple[str, ...]:
        """The kinds of held-out inputs that starts and ways back are judged by."""
        return (OWN,) if OWN in self.held_out else (SYNTHETIC, CORRUPTED)

    def _inverted(self, inputs: RefinementInputs, model: nn.Module, other: nn.Module | None) -> Inputs | None:
        """Return inputs of whose class a model is sure, and the other one is not."""
        run = partial(self._run, inputs.model)
        sample = run(model, inputs.draw_plain(0, 2))
        beside = {} if other is None else run(other, inputs.draw_plain(0, 2))
        names = OutputTargets.between(sample, sample).distributions
        name = next((name for name in names if sample[name].ndim == 2), None)
        if name is None:
            return None
        comparable = name in beside and beside[name].shape == sample[name].shape

        def loss(given: Inputs, choices: Tensor) -> Tensor:
            logits = run(model, given, gradients=True)[name]
            classes = (choices * logits.shape[-1]).long()
            value = nn.functional.cross_entropy(logits, classes)
            if other is not None and comparable:
                likely = run(other, given, gradients=True)[name].log_softmax(-1)
                chosen = likely.gather(1, classes[:, None])
                value = value + OTHER_WEIGHT * (chosen + UNSURE).relu().mean()
            return value

        return inputs.prepared.inputs("inverted", lambda: invert_inputs(inputs, loss))

    # ── outputs ──────────────────────────────────────────────────────────────────────────────

    def _run(
        self, model: Model, module: nn.Module, inputs: Inputs, *, gradients: bool = False
    ) -> dict[str, Tensor]:
        outputs = run_model(module, model.family, inputs, double=False, gradients=gradients)
        if self.teacher.a.vocabulary is not None:
            outputs = self.teacher.a.vocabulary.shared_logits(outputs)
        return with_similarities(outputs)

    def wanted(self, inputs: Inputs, *, gradients: bool = False) -> Outputs:
        """Return the fine-tune's outputs; vectors in B's basis."""
        return self.teacher.expected(
            self._run(self.teacher.tuned, self.teacher.module, inputs, gradients=gradients)
        )

    def answers(self, student: nn.Module, inputs: Inputs, *, gradients: bool = False) -> Outputs:
        """Return a student's outputs on inputs of the fine-tune."""
        return self._run(self.b, student, self.translation(inputs), gradients=gradients)

    @cached_property
    def batch(self) -> int:
        """The number of inputs of a step that the fine-tune answers; B answers half as many."""
        outputs = self.wanted(self.inputs.draw_plain(0, 2))
        by_token = any(outputs[name].ndim == 3 for name in self.targets.names)
        return min(BATCH, TOKEN_BATCH) if by_token else BATCH

    @cached_property
    def targets(self) -> OutputTargets:
        inputs = self.inputs.draw_plain(0, 2)
        outputs = self.wanted(inputs)
        theirs = outputs if self._example is None else self.answers(self._example, inputs)
        if not self.translation.same_places:
            outputs = {name: one for name, one in outputs.items() if one.ndim == 2}
        found = OutputTargets.between(outputs, theirs, problem_of(self.teacher.module))
        if not found.names:
            raise ArchitectureError(
                f"{self.teacher.tuned.label}: the model has no outputs that could be compared with those of"
                f" {self.b.label}",
                hint="leave out `refine`",
            )
        return found

    def _kept(self, student: nn.Module) -> KeptFeatures:
        example = self.inputs_of_b.draw_plain(0, 2)
        return KeptFeatures(self.b, self.of_b, student, example, same_class=self.same_class)

    def _loss(self, student: nn.Module, kept: KeptFeatures, step: int) -> Tensor:
        def distance(inputs: Inputs) -> Tensor:
            found = self.answers(student, inputs, gradients=True)
            wanted = self.wanted(inputs, gradients=True)
            return self.targets.loss(wanted, found, inputs.get("attention_mask"))

        def lost(inputs: Inputs) -> Tensor:
            return kept.loss(inputs, kept.of_b(inputs, gradients=True))

        made, *own = self.inputs.draw(step, self.batch)
        drawn = [self.inputs.made_adversarial(made, distance, step, ADVERSARIAL_SHARE), *own]
        total = torch.stack([distance(inputs) for inputs in drawn]).mean()
        if self.settings.keep:
            inputs = self.inputs_of_b.draw_plain(step, self.batch // 2)
            inputs = self.inputs_of_b.made_adversarial(inputs, lost, step)
            total = total + self.settings.keep * lost(inputs)
        return total

    def measure(self, student: nn.Module, inputs: Inputs) -> Agreement:
        """Compare a student with the fine-tune."""
        parts = [(self.wanted(some), self.answers(student, some)) for some in batches(inputs, self.batch)]
        return Agreement(
            fmean(self.targets.agreement(*part) for part in parts),
            fmean(float(self.targets.loss(*part)) for part in parts),
        )

    def _divergence(self, student: nn.Module, *kinds: str) -> float:
        return fmean(self.measure(student, self.held_out[kind]).divergence for kind in kinds)

    def _measure_all(self, student: nn.Module) -> dict[str, Agreement]:
        return {kind: self.measure(student, inputs) for kind, inputs in self.held_out.items()}


def _mean_divergence(found: Mapping[str, Agreement]) -> float:
    return round(fmean(one.divergence for one in found.values()), 6)
