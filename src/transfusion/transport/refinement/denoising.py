"""Denoisers of images and videos: the fine-tune is asked, then an adapter on B learns.

One base is in memory at a time. The fine-tune makes latents and says what it predicts of them when they are
noised, and how far it has changed that. Where B predicts much the same as A, the moved adapter on B learns to
change B's answers as much. Where it does not, the adapter learns the fine-tune's answers, and to keep B's on
latents that B makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.errors import MismatchError, listing
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.probes.noised import Denoiser
from transfusion.runtime.engines import release_memory, require_device
from transfusion.runtime.processes import processes
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.transport.adapters.in_place import (
    AdapterInPlace,
    adapter_in,
    at_rest,
    with_adapter_in_place,
)
from transfusion.transport.adapters.moved_adapter import MovedAdapter
from transfusion.transport.output import Output
from transfusion.transport.refinement.denoised import TOGETHER, AskedDenoiser, Noised, ask_denoiser
from transfusion.transport.refinement.inputs import FRESH, SYNTHETIC
from transfusion.transport.refinement.language import chosen_start, once
from transfusion.transport.refinement.lessons import Agreement
from transfusion.transport.refinement.room import inputs_in_a_pass
from transfusion.transport.refinement.settings import (
    BASE,
    CHANGE,
    STARTS_FROM_B,
    RefinementRecord,
    RefinementSettings,
)
from transfusion.transport.refinement.training import ADAPTER_RATE, Training

BATCH = 8
"""The latents of a step, for each process; of B's, half as many."""
ALIKE = 0.5
"""The cosine of B's answers and A's from which on the fine-tune's change is learned, and not its answers."""
OF_B = 7_000_000
"""The seeds of what is drawn of B's latents."""


class DenoisingLessons:
    """What is to be predicted of noised latents, and what B predicts of its own, to be kept."""

    pace = ""
    checked, judges, kinds = SYNTHETIC, (SYNTHETIC,), (SYNTHETIC,)

    def __init__(
        self,
        of_a: AskedDenoiser,
        of_b: AskedDenoiser,
        b: Model,
        student: nn.Module,
        settings: RefinementSettings,
        kept: Path | None = None,
    ) -> None:
        """``kept`` is a file name for the state of an interrupted run."""
        self.of_a, self.of_b, self.settings, self._kept = of_a, of_b, settings, kept
        self.student = Denoiser(b, student)
        self.batch = settings.batch or BATCH
        self.measures = "cosine" if of_a.held_out.origins is None else CHANGE
        self._together: int | None = None

    @property
    def about(self) -> Sequence[str]:
        """Descriptions of the inputs."""
        return list(self.of_a.about["inputs"])

    @property
    def saves(self) -> bool:
        """Whether this process writes the state of the training."""
        return processes().is_main

    def file(self, name: str) -> Path | None:
        """Return a file for what an interrupted run keeps."""
        return self._kept and self._kept.with_name(f"{self._kept.name}-{name}")

    def values_of_b(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the values of trained parameters with which B stays as it is."""
        return _adapter_of(self.student.module).values_of_b(trained)

    def measure(self, student: nn.Module, kind: str) -> Agreement:
        """Compare a student with the fine-tune on held-out latents."""
        return self._measured(self.of_a.held_out)

    def agreement_with_b(self, student: nn.Module) -> float:
        """Return the agreement between a student and B, on latents that B makes."""
        return self._measured(self.of_b.held_out).share

    def add_gradients(self, student: nn.Module, step: int, keep: float) -> float:
        """Add the gradients of one step's loss, in which B's answers weigh ``keep``; return the loss."""
        every, total = processes(), 0.0
        count = self.batch * every.count
        parts = [(self.of_a, 0, count, 1.0), *([(self.of_b, OF_B, max(1, count // 2), keep)] if keep else [])]
        for asked, seed, number, weight in parts:
            generator = torch.Generator().manual_seed(seed + FRESH * self.settings.seed + step)
            items = torch.randint(len(asked.learned.times), (number,), generator=generator)
            own = torch.tensor(every.share_of(items.tolist()), dtype=torch.int64)
            for some in torch.split(own, self._in_a_pass()) if len(own) else ():
                predicted = self.student.run(asked.learned.inputs(self.student, some), gradients=True)
                apart = _squares(predicted, asked.learned, some) * (weight / number)
                torch.autograd.backward(apart)
                total += float(apart.detach())
        every.sum_gradients([one for one in student.parameters() if one.requires_grad])
        return every.summed([total])[0]

    def _in_a_pass(self) -> int:
        if self._together is None:
            learned = self.of_a.learned
            one = learned.inputs(self.student, torch.zeros(1, dtype=torch.int64))
            found = inputs_in_a_pass(self.student.module, lambda: self.student.run(one, gradients=True))
            self._together = processes().agreed(found)
        return self._together

    def _measured(self, asked: Noised) -> Agreement:
        """Return the cosine around the mean of the wanted answers, and the squared distance from these."""
        sums, count = [0.0] * 4, len(asked.times)
        for some in processes().share_of(torch.split(torch.arange(count), TOGETHER)):
            predicted = self.student.run(asked.inputs(self.student, some)).cpu()
            around = asked.around(some)
            found, wanted = predicted - around, asked.answers[some].float() - around
            products = [
                float((one * other).sum())
                for one, other in ((found, wanted), (found, found), (wanted, wanted))
            ]
            more = [*products, float(_squares(predicted, asked, some))]
            sums = [one + other for one, other in zip(sums, more, strict=True)]
        both, ours, theirs, apart = processes().summed(sums)
        return Agreement(both / max(1e-12, (ours * theirs) ** 0.5), apart / count)


def _squares(predicted: Tensor, asked: Noised, items: Tensor) -> Tensor:
    """Return the squared distances from the wanted answers, as shares of these answers' spread, summed."""
    wanted = asked.answers[items].float().to(predicted.device)
    return (predicted - wanted).square().flatten(1).mean(1).sum() / asked.spread


def ask_about_latents(
    model: Model,
    about: Mapping[str, Any],
    *,
    seed: int,
    device: str = "cpu",
    moved: MovedAdapter | None = None,
) -> AskedDenoiser:
    """Let a model make latents and ask what it predicts of them; with an adapter that was moved onto it."""
    with phase("building the model that is asked"):
        module = build(model, _kind_of(model))
        module = (module if moved is None else with_adapter_in_place(module, moved)).to(device)
    asked = ask_denoiser(Denoiser(model, module), about, seed=seed)
    del module
    release_memory()
    return asked


def learned_denoiser(
    output: Output,
    b: Model,
    of_a: Callable[[], AskedDenoiser],
    settings: RefinementSettings,
    *,
    kept: Path | None = None,
    insists: bool = False,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> tuple[dict[str, Tensor], RefinementRecord]:
    """Train a moved adapter to denoise like a fine-tune that was asked; return its tensors and the record.

    ``kept`` is a file name for what an interrupted run goes on with.
    """
    began = time.monotonic()
    if (device := processes().device(device)) != "cpu":
        require_device(device)
    moved = output.moved_adapter
    assert moved is not None
    asked = once(kept and kept.with_name(f"{kept.name}-of-a.safetensors"), of_a, AskedDenoiser.load)
    of_b = once(
        kept and kept.with_name(f"{kept.name}-of-b.safetensors"),
        lambda: ask_about_latents(b, {}, seed=2 * settings.seed + 1, device=device),
        AskedDenoiser.load,
    )
    _require_same_sizes(asked, of_b, b)
    with phase("building the student"):
        student = with_adapter_in_place(build(b, _kind_of(b)), moved).to(device)
    trained = {name: one for name, one in student.named_parameters() if one.requires_grad}
    asked, is_change = _lessons_of(asked, Denoiser(b, student))
    if is_change:
        settings = replace(settings, keep=0.0)  # what is learned has B's own answers in it
    lessons = DenoisingLessons(asked, of_b, b, student, settings, kept)
    start, near = chosen_start(lessons, student, trained)
    if start == BASE:
        progress.warn(STARTS_FROM_B)
    record = Training(lessons, near, progress, began=began).train(
        student, start, ADAPTER_RATE, insists=insists
    )
    return _adapter_of(student).tensors, record


def _lessons_of(asked: AskedDenoiser, student: Denoiser) -> tuple[AskedDenoiser, bool]:
    """Return what a student is to answer, and whether that is B's own answer with the fine-tune's change.

    It is where B denoises much as A does: the change is small beside all in which A and B differ, and an
    adapter that learned A's answers would learn these differences instead. Else it is the fine-tune's answer.
    """
    own, both, ours, theirs = [], 0.0, 0.0, 0.0
    groups = asked.learned, asked.held_out
    with phase("asking B about the same latents"), at_rest(_adapter_of(student.module)):
        for one in groups:
            items = torch.split(torch.arange(len(one.times)), TOGETHER)
            own.append(torch.cat([student.run(one.inputs(student, some)).cpu() for some in items]))
            of_a = one.answers.float() - one.changes.float()
            x, y = own[-1] - own[-1].mean(0), of_a - of_a.mean(0)
            both, ours, theirs = (
                both + float((x * y).sum()),
                ours + float(x.square().sum()),
                theirs + float(y.square().sum()),
            )
    cosine = both / max(1e-12, (ours * theirs) ** 0.5)
    is_change = cosine >= ALIKE
    if is_change:
        learned, held_out = (
            replace(one, answers=of_b + one.changes.float(), origins=of_b)
            for one, of_b in zip(groups, own, strict=True)
        )
        asked = replace(asked, learned=learned, held_out=held_out)
    what = "what the fine-tune changes" if is_change else "the fine-tune's answers"
    learns = f"{what}, as B's answers and A's have the cosine {cosine:.2f}"
    return replace(asked, about={**asked.about, "inputs": [*asked.about["inputs"], learns]}), is_change


def _adapter_of(student: nn.Module) -> AdapterInPlace:
    found = adapter_in(student)
    assert found is not None
    return found


def _kind_of(model: Model) -> torch.dtype:
    """Return the type to compute in: that of the weights, but gradients need more range than float16 has."""
    kinds = (model.info(name).dtype for name in model.architecture.tensors)
    kind = reduce(torch.promote_types, kinds)
    return torch.float32 if kind is torch.float16 else kind


def _require_same_sizes(of_a: AskedDenoiser, of_b: AskedDenoiser, b: Model) -> None:
    """Refuse latents and texts of other sizes than those of B."""

    def sizes(asked: AskedDenoiser) -> dict[str, list[int]]:
        one = asked.learned
        several = {"the latents": one.latents, "the answers": one.answers, **one.conditions}
        return {name: list(value.shape[1:]) for name, value in several.items()}

    theirs, ours = sizes(of_a), sizes(of_b)
    if theirs != ours:
        other = [
            f"{name} ({theirs.get(name, 'none')}, {ours.get(name, 'none')})"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name)
        ]
        raise MismatchError(
            f"{of_a.about['label']} was asked about inputs of other sizes than those of {b.label}:"
            f" {listing(other)}",
            hint="both must have the same latents and texts; ask the fine-tune again by `transfusion ask`",
        )
