"""Training: choose a start, fit its head, find the rate, take the steps, and go back towards B."""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.errors import UselessResultError
from transfusion.running.probes.probed_model import batched
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.transport.refinement.answers import CLASSES, VECTORS
from transfusion.transport.refinement.descent import Parameters, copied, find_rate, put, train
from transfusion.transport.refinement.head import features_of, fitted, head_of
from transfusion.transport.refinement.inputs import SYNTHETIC
from transfusion.transport.refinement.settings import BASE, MOVED, RefinementRecord
from transfusion.transport.refinement.teaching import Agreement, Teaching

ADAPTER_RATE = 1e-3
"""The learning rate that is expected to be best for the factors of an adapter."""
SCALES = tuple(2.0**power for power in range(-3, 7))
"""The numbers by which a start's logits are multiplied before starts are compared."""
HEAD, FITTED = 600_000, 512
"""The number of the first step whose inputs the head is fitted to, and the number of inputs."""
LEARNED = 0.98
"""The agreement with the fine-tune from which on nothing is left to learn."""
ATTEMPTS = (
    ("", 1.0, 1.0, False),
    ("at an eighth of the learning rate", 1 / 8, 1.0, False),
    ("and keeps less of B", 1.0, 1 / 10, False),
    ("from B", 1.0, 1.0, True),
)
"""What is tried in turn while nothing improves: what is said of it, the shares of the learning rate and of
the weight of B's answers, and whether B is the start.
"""
BACK = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The shares of the way from B at which the student may end."""
GAIN_KEPT, OWN_GAIN_KEPT = 0.85, 0.95
"""The share of the gain on held-out inputs that must be left after going back towards B: on synthetic ones,
which are not those of the task, and on the user's own."""


class Training:
    """One refinement, from its starts to the trained student."""

    def __init__(self, teaching: Teaching, progress: Progress = SILENT, began: float | None = None) -> None:
        """``began`` is when the time of the refinement began, on the monotonic clock."""
        self.teaching, self.progress = teaching, progress
        self.began = time.monotonic() if began is None else began
        self.of_starts: dict[str, dict[str, Agreement]] = {}
        """How near each start is to the fine-tune, on the inputs that decide."""

    # ── before the first step ────────────────────────────────────────────────────────────────

    def choose(self, starts: Mapping[str, nn.Module]) -> str:
        """Return the name of the start that answers held-out inputs most like the fine-tune.

        Its logits may first be multiplied by one number: maps shrink them more than they confuse them.
        """
        found: dict[str, float] = {}
        with phase("comparing starts with the fine-tune", len(starts)) as advance:
            for name, module in starts.items():
                self.of_starts[name] = {
                    kind: self.teaching.measure(module, kind) for kind in self.teaching.judges
                }
                found[name] = self._divergence_at_best_scale(name, module)
                advance("starts compared with the fine-tune")
        return min(found, key=lambda name: found[name])

    def _divergence_at_best_scale(self, start: str, student: nn.Module) -> float:
        teaching, targets = self.teaching, self.teaching.targets
        if targets.kind == VECTORS:
            return fmean(one.divergence for one in self.of_starts[start].values())
        rows: list[list[float]] = []  # a divergence for every scale
        for kind in teaching.judges:
            given = list(batched(teaching.held_out[kind], teaching.batch))
            for some, wanted in zip(given, teaching.wanted_of(kind, given), strict=True):
                found = teaching.answers(student, some)
                scaled = ({name: scale * found[name] for name in targets.names} for scale in SCALES)
                rows.append([float(targets.loss(wanted, one)) for one in scaled])
        return min(fmean(column) for column in zip(*rows, strict=True))

    def fit_head(self, student: nn.Module, carried: Collection[str]) -> None:
        """Fit the head that the fine-tune brought, if it has one and chooses among classes."""
        teaching = self.teaching
        name, some = teaching.targets.names[0], teaching.inputs.draw_plain(0, 2)
        if teaching.targets.kind != CLASSES or teaching.wanted(some)[name].ndim != 2:
            return
        naming = Naming(teaching.b.family, live=True)
        head = head_of(student, lambda: teaching.answers(student, some)[name], naming, carried)
        if head is None:
            return
        features, wanted = [], []
        rounds = math.ceil(FITTED / teaching.batch)
        with phase("fitting the head", rounds) as advance:
            for step in range(rounds):
                inputs = teaching.inputs.draw(HEAD + step, teaching.batch)[-1]
                features.append(features_of(head, partial(teaching.answers, student, inputs)))
                wanted.append(teaching.wanted(inputs)[name])
                advance("inputs to fit the head")
            weight, bias = fitted(
                head,
                torch.cat(features),
                torch.cat(wanted),
                lambda found, wanted: float(teaching.targets.loss({name: wanted}, {name: found})),
            )
        head.weight.data.copy_(weight)
        head.bias.data.copy_(bias)

    def _decided(self, find: Callable[[], tuple[float, float]]) -> tuple[float, int]:
        """Return the learning rate and the number of steps, as an interrupted run decided or by a trial."""
        settings, file = self.teaching.settings, self.teaching.file("decided.json")
        if file is not None and file.exists():
            rate, steps = json.loads(file.read_text())
            return rate, steps
        (rate, seconds), steps = find(), settings.steps
        if settings.time is not None:
            left = settings.time - (time.monotonic() - self.began)
            steps = max(1, min(steps, int(left / seconds)))
        if file is not None:
            file.write_text(json.dumps([rate, steps]))
        return rate, steps

    # ── the steps ────────────────────────────────────────────────────────────────────────────

    def train(
        self, student: nn.Module, start: str, expected: float, *, insists: bool = False
    ) -> RefinementRecord:
        """Train the trainable parameters of a student, and leave it in the best state.

        ``expected`` is a learning rate to begin the search with. Answers that are no nearer to the
        fine-tune's than those of B are refused, unless the user ``insists``.
        """
        teaching = self.teaching
        with phase("comparing the start with the fine-tune"):
            before = {kind: teaching.measure(student, kind) for kind in teaching.held_out}
            kept = teaching.kept_answers(student)
        trained = {name: one for name, one in student.named_parameters() if one.requires_grad}

        def divergence() -> float:
            return teaching.measure(student, teaching.checked).divergence

        keep, loss = teaching.settings.keep, partial(teaching.loss, student, kept)
        apart, most = before[teaching.checked].divergence, teaching.settings.steps
        rate, steps = self._decided(
            partial(find_rate, trained, partial(loss, keep=keep), divergence, apart, expected, most)
        )
        best_step = 0
        for attempt, (change, share_of_rate, share_of_keep, from_b) in enumerate(ATTEMPTS):
            if from_b and start != MOVED:
                continue
            if change:
                self.progress.warn(
                    f"the answers came no nearer to the fine-tune's: the refinement starts again {change}"
                )
            first = copied(trained) if from_b else {}  # a training in vain leaves its start
            if from_b:
                put(trained, {**first, **self._values_of_b(trained)})
            best_step = train(
                trained,
                partial(loss, keep=share_of_keep * keep),
                divergence,
                apart,
                rate=share_of_rate * rate,
                steps=steps,
                file=teaching.file(f"state-{attempt}.pt"),
                progress=self.progress,
            )
            if best_step or before[teaching.checked].share > LEARNED:
                break
            if from_b:
                put(trained, first)
        with phase("comparing the result with the fine-tune"):
            share = self._go_back(student, trained, before) if keep and best_step else 1.0
            after = {kind: teaching.measure(student, kind) for kind in teaching.held_out}
        self._require_nearer(after, insists=insists)
        return RefinementRecord(
            replace(teaching.settings, steps=steps, time=None),
            start,
            teaching.inputs.about,
            "cosine" if teaching.targets.kind == VECTORS else "answers",
            {kind: round(one.share, 4) for kind, one in before.items()},
            {kind: round(one.share, 4) for kind, one in after.items()},
            (_mean_divergence(before), _mean_divergence(after)),
            round(kept.agreement(teaching.translation(teaching.held_out[SYNTHETIC])), 4),
            best_step,
            share,
        )

    def _require_nearer(self, after: Mapping[str, Agreement], *, insists: bool) -> None:
        """Refuse answers that are no nearer to the fine-tune's than those of B."""
        if BASE not in self.of_starts:
            return
        kinds = self.teaching.judges
        ours, base = ([found[kind] for kind in kinds] for found in (after, self.of_starts[BASE]))
        pairs = zip(ours, base, strict=True)
        if any(one.share > other.share or one.divergence < other.divergence for one, other in pairs):
            return
        shares = (fmean(one.share for one in several) for several in (ours, base))
        text = (
            "the refinement brought nothing: agreement with the fine-tune is {:.0%}, and {:.0%} for B".format(
                *shares
            )
        )
        if not insists:
            raise UselessResultError(
                f"nothing was written: {text}",
                hint="`calibrate` takes unlabelled inputs of the task; `force_unrelated` writes nevertheless",
            )
        self.progress.warn(text)

    # ── back towards B ───────────────────────────────────────────────────────────────────────

    def _go_back(self, student: nn.Module, trained: Parameters, before: Mapping[str, Agreement]) -> float:
        """Go back towards B while most of the gain on held-out inputs is left; return the share of the way.

        On the straight line between two models, what the first one could do comes back sooner than what the
        second one has learned gets lost. The student stays at least as near to the fine-tune as its start.
        """
        teaching = self.teaching
        ends = {
            name: (base, trained[name].detach().clone()) for name, base in self._values_of_b(trained).items()
        }
        if not ends:
            return 1.0

        def at(share: float) -> float:
            for name, (base, best) in ends.items():
                torch.lerp(base, best, share, out=trained[name].data)
            return teaching.divergence(student)

        nothing, everything = at(0.0), at(1.0)
        start = fmean(before[kind].divergence for kind in teaching.judges)
        left = OWN_GAIN_KEPT if teaching.inputs.own is not None else GAIN_KEPT
        enough = min(start, nothing - left * (nothing - everything))
        share = BACK[bisect_left(BACK, True, key=lambda share: share == 1 or at(share) <= enough)]
        at(share)
        return share

    def _values_of_b(self, trained: Parameters) -> dict[str, Tensor]:
        """Return B's values of the trained parameters; parameters that B lacks are skipped."""
        naming = Naming(self.teaching.b.family, live=True)
        own = {naming.canonical(name): one.data for name, one in self.teaching.of_b.named_parameters()}
        found: dict[str, Tensor] = {}
        for name, parameter in trained.items():
            base = own.get(naming.canonical(name))
            if "lora_B" in name or "lora_embedding_B" in name:
                found[name] = torch.zeros_like(parameter)
            elif base is not None and base.shape == parameter.shape:
                found[name] = base
        return found


def _mean_divergence(found: Mapping[str, Agreement]) -> float:
    return round(fmean(one.divergence for one in found.values()), 6)
