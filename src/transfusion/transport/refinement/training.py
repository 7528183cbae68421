"""Training: find the rate, take the steps, and go back towards B."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
from torch import nn

from transfusion.errors import UselessResultError
from transfusion.runtime.processes import processes
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.transport.refinement.descent import Parameters, copied, find_rate, put, train
from transfusion.transport.refinement.inputs import OWN
from transfusion.transport.refinement.lessons import Agreement, Lessons
from transfusion.transport.refinement.settings import MOVED, RefinementRecord

ADAPTER_RATE = 1e-3
"""The learning rate that is expected to be best for the factors of an adapter."""
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
OF_STEPS = 0.5
"""The share of the time that is left for the steps, however long it took to ask the fine-tune."""
BACK = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The shares of the way from B at which the student may end."""
GAIN_KEPT, OWN_GAIN_KEPT = 0.85, 0.95
"""The share of the gain on held-out inputs that must be left after going back towards B: on synthetic ones,
which are not those of the task, and on the user's own."""


class Training:
    """One refinement, from its starts to the trained student."""

    def __init__(
        self,
        teaching: Lessons,
        of_b: Mapping[str, Agreement] | None = None,
        progress: Progress = SILENT,
        *,
        began: float,
    ) -> None:
        """``of_b`` is how near B is to the fine-tune on the inputs that decide, if B can be a start;
        ``began`` is when the time of the refinement began, on the monotonic clock.
        """
        self.teaching, self.of_b, self.progress, self.began = teaching, of_b, progress, began

    def _decided(self, find: Callable[[], tuple[float, float]]) -> tuple[float, int]:
        """Return the learning rate and the number of steps, as an interrupted run decided or by a trial."""
        settings, file = self.teaching.settings, self.teaching.file("decided.json")
        if file is not None and file.exists():
            rate, steps = json.loads(file.read_text())
            return rate, steps
        (rate, seconds), steps = find(), settings.most
        if settings.time is not None:
            left = max(settings.time - (time.monotonic() - self.began), OF_STEPS * settings.time)
            steps = max(1, min(steps, int(left / seconds)))
        rate, steps = processes().agreed((rate, steps))
        if file is not None and self.teaching.saves:
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
            before = {kind: teaching.measure(student, kind) for kind in teaching.kinds}
        trained = {name: one for name, one in student.named_parameters() if one.requires_grad}

        latest = before[teaching.checked]

        def divergence() -> float:
            nonlocal latest
            latest = teaching.measure(student, teaching.checked)
            return latest.divergence

        def about() -> str:
            form = "{:.0%}" if teaching.measures == "answers" else "{:.2f}"
            return ", ".join([f"agreement {form.format(latest.share)}", *filter(None, [teaching.pace])])

        keep, gradients = teaching.settings.keep, partial(teaching.add_gradients, student)
        apart, most = before[teaching.checked].divergence, teaching.settings.most
        rate, steps = self._decided(
            partial(find_rate, trained, partial(gradients, keep=keep), divergence, apart, expected, most)
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
                put(trained, {**first, **teaching.values_of_b(trained)})
            best_step = train(
                trained,
                partial(gradients, keep=share_of_keep * keep),
                divergence,
                apart,
                rate=share_of_rate * rate,
                steps=steps,
                file=teaching.file(f"state-{attempt}.pt"),
                saves=teaching.saves,
                about=about,
                progress=self.progress,
            )
            if best_step or before[teaching.checked].share > LEARNED:
                break
            if from_b:
                put(trained, first)
        with phase("comparing the result with the fine-tune"):
            share = self._go_back(student, trained, before) if keep and best_step else 1.0
            after = {kind: teaching.measure(student, kind) for kind in teaching.kinds}
        self._require_nearer(after, insists=insists)
        return RefinementRecord(
            replace(teaching.settings, steps=steps, time=None),
            start,
            teaching.about,
            teaching.measures,
            {kind: round(one.share, 4) for kind, one in before.items()},
            {kind: round(one.share, 4) for kind, one in after.items()},
            (_mean_divergence(before), _mean_divergence(after)),
            round(teaching.agreement_with_b(student), 4),
            best_step,
            share,
        )

    def _require_nearer(self, after: Mapping[str, Agreement], *, insists: bool) -> None:
        """Refuse answers that are no nearer to the fine-tune's than those of B."""
        if self.of_b is None:
            return
        kinds = self.teaching.judges
        ours, base = ([found[kind] for kind in kinds] for found in (after, self.of_b))
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
            name: (base, trained[name].detach().clone())
            for name, base in teaching.values_of_b(trained).items()
        }
        if not ends:
            return 1.0

        def at(share: float) -> float:
            for name, (base, best) in ends.items():
                torch.lerp(base, best, share, out=trained[name].data)
            return fmean(teaching.measure(student, kind).divergence for kind in teaching.judges)

        nothing, everything = at(0.0), at(1.0)
        start = fmean(before[kind].divergence for kind in teaching.judges)
        left = OWN_GAIN_KEPT if OWN in teaching.kinds else GAIN_KEPT
        enough = min(start, nothing - left * (nothing - everything))
        share = BACK[bisect_left(BACK, True, key=lambda share: share == 1 or at(share) <= enough)]
        at(share)
        return share


def _mean_divergence(found: Mapping[str, Agreement]) -> float:
    return round(fmean(one.divergence for one in found.values()), 6)
