"""Learning from answers: a student of B learns what a fine-tune was asked before, and keeps what B said.

Neither the fine-tune nor A is in memory. A step draws some texts, which pass through the student a few at a
time; several processes share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from transfusion.model.model import Model
from transfusion.running.probes.inputs import run_model
from transfusion.runtime.processes import low_precision, processes
from transfusion.runtime.progress import Pace
from transfusion.transport.refinement.asked import GIVEN, Answers, Asked, Wanted
from transfusion.transport.refinement.inputs import (
    BLENDED,
    CORRUPTED,
    FRESH,
    OWN,
    SYNTHETIC,
    TOKENS,
    texts_of_a_step,
)
from transfusion.transport.refinement.lessons import Agreement
from transfusion.transport.refinement.room import inputs_in_a_pass
from transfusion.transport.refinement.settings import RefinementSettings

AT_ONCE = 1 << 22
"""The most logits that are compared at a time."""
OF_B = 7_000_000
"""The seeds of what is drawn of B's texts."""


class Distance(NamedTuple):
    """How far answers are from the wanted ones."""

    total: float
    """The sum of the divergences of all answers."""
    answers: int
    equal: int
    """The number of answers whose likeliest token is the wanted one."""
    tokens: int
    """The number of answers that are one token."""


def distance(logits: Tensor, ids: Tensor, wanted: Wanted, weight: float | None = None) -> Distance:
    """Compare logits (texts, places, vocabulary) with answers: KL(wanted ‖ found), where all tokens that are
    not among the likely ones count as one.

    With a ``weight``, add the gradients of the weighted sum. A few answers are compared at a time: all, in
    float32, would take several times the memory of the logits.
    """
    texts, places = wanted.known.nonzero(as_tuple=True)
    gradient = None if weight is None else torch.zeros_like(logits)
    total, equal, device, together = 0.0, 0, logits.device, max(1, AT_ONCE // logits.shape[-1])
    for text, place in zip(torch.split(texts, together), torch.split(places, together), strict=True):
        likely, shares, rest = (one[text, place].to(device) for one in wanted[:3])
        some = logits.detach()[text.to(device), place.to(device)].float()  # (answers, vocabulary)
        with torch.set_grad_enabled(gradient is not None):
            found = some.requires_grad_(gradient is not None)
            table = found if wanted.groups is None else _by_group(found, wanted.groups.to(device))
            each = table.gather(-1, likely) - table.logsumexp(-1, keepdim=True)  # (answers, likely)
            there = shares > -torch.inf
            left = (1 - each.exp().masked_fill(~there, 0).sum(-1)).clamp(min=1e-6).log()
            apart = (shares.exp() * (shares - each).masked_fill(~there, 0)).sum(-1) + rest.exp() * (
                rest - left
            )
            value = apart.sum()
        if gradient is not None and weight is not None:
            (slope,) = torch.autograd.grad(value, found)
            gradient[text.to(device), place.to(device)] = (weight * slope).to(gradient.dtype)
        total += float(value.detach())
        equal += int((table.detach().argmax(-1) == likely[:, 0]).sum())
    pieces = 0
    if wanted.spans is not None and wanted.of_spans is not None:
        pieces = len(wanted.spans)
        for span, share in zip(wanted.spans.tolist(), wanted.of_spans.tolist(), strict=True):
            total += _of_piece(logits, ids, span, share, weight, gradient)
    if gradient is not None:
        torch.autograd.backward(logits, gradient)
    return Distance(total, len(texts) + pieces, equal, len(texts))


def _by_group(logits: Tensor, groups: Tensor) -> Tensor:
    """Return the log-probabilities of groups of tokens (answers, groups)."""
    empty = logits.new_zeros(len(logits), int(groups.max()) + 1)
    return empty.index_add(1, groups, logits.softmax(-1)).clamp(min=1e-12).log()


def _of_piece(
    logits: Tensor,
    ids: Tensor,
    span: Sequence[int],
    share: float,
    weight: float | None,
    gradient: Tensor | None,
) -> float:
    """Compare the probability of a piece of a text: KL between two chances that it follows, or does not."""
    text, first, stop = span
    places = slice(first - 1, stop - 1)
    with torch.set_grad_enabled(gradient is not None):
        found = logits.detach()[text, places].float().requires_grad_(gradient is not None)
        each = found.gather(-1, ids[text, first:stop, None])[:, 0] - found.logsumexp(-1)  # (tokens)
        whole = each.sum().clamp(max=-1e-4)
        known = min(share, -1e-4)
        other = math.log(-math.expm1(known))
        value = math.exp(known) * (known - whole) + math.exp(other) * (other - (-whole.expm1()).log())
    if gradient is not None and weight is not None:
        (slope,) = torch.autograd.grad(value, found)
        gradient[text, places] += (weight * slope).to(gradient.dtype)
    return float(value.detach())


class AskedLessons:
    """What the fine-tune answered, to be learned, and what B answered, to be kept."""

    measures, pace = "answers", ""

    def __init__(
        self,
        of_a: Asked,
        of_b: Asked,
        b: Model,
        settings: RefinementSettings,
        values_of_b: Callable[[Mapping[str, nn.Parameter]], dict[str, Tensor]],
        *,
        allowed: Tensor | None = None,
        kept: Path | None = None,
    ) -> None:
        """``values_of_b`` returns B's values of trained parameters; ``allowed`` are the tokens that all
        models have, if some have others; ``kept`` is a file name for the state of an interrupted run.
        """
        self.of_a, self.of_b, self.b, self.settings = of_a, of_b, b, settings
        self._values_of_b, self._allowed, self._kept = values_of_b, allowed, kept
        self._together: dict[int, int] = {}
        self._pace = Pace()
        longest = max(one.ids.shape[1] for one in of_a.learned.values())
        self.batch = texts_of_a_step(longest, settings.batch)
        """The texts of a step, for each process."""
        own = OWN in of_a.held_out
        self.judges: Sequence[str] = (
            (OWN,) if own else tuple(one for one in (SYNTHETIC, CORRUPTED) if one in of_a.held_out)
        )
        self.checked = OWN if own else BLENDED if BLENDED in of_a.held_out else SYNTHETIC

    # ── for the training ─────────────────────────────────────────────────────────────────────

    @property
    def kinds(self) -> Collection[str]:
        """All kinds of held-out texts."""
        return self.of_a.held_out

    @property
    def about(self) -> Sequence[str]:
        """Descriptions of the texts."""
        return list(self.of_a.about.get("inputs", ()))

    @property
    def saves(self) -> bool:
        """Whether this process writes the state of the training."""
        return processes().is_main

    def file(self, name: str) -> Path | None:
        """Return a file for what an interrupted run keeps."""
        return self._kept and self._kept.with_name(f"{self._kept.name}-{name}")

    def values_of_b(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return B's values of the trained parameters; parameters that B lacks are skipped."""
        return self._values_of_b(trained)

    def measure(self, student: nn.Module, kind: str) -> Agreement:
        """Compare a student with the fine-tune on held-out texts."""
        return self._measured(student, self.of_a.held_out[kind])

    def agreement_with_b(self, student: nn.Module) -> float:
        """Return the agreement between a student and B on texts that B wrote and read."""
        return self._measured(student, self.of_b.held_out[SYNTHETIC]).share

    def add_gradients(self, student: nn.Module, step: int, keep: float) -> float:
        """Add the gradients of one step's loss, in which B's answers weigh ``keep``; return the loss."""
        every, count = processes(), self.batch * processes().count
        generator = torch.Generator().manual_seed(FRESH * self.settings.seed + step)
        parts = [self._drawn(self.of_a, count, 1.0, generator)]
        if keep:
            generator = torch.Generator().manual_seed(OF_B + FRESH * self.settings.seed + step)
            parts.append(self._drawn(self.of_b, max(1, count // 2), keep, generator))
        total = 0.0
        for part in parts:
            for answers, texts, weight in part:
                self.pace = self._pace.after(len(texts) * answers.ids.shape[1])
                total += self._learned(student, answers, texts.tolist(), weight)
        every.sum_gradients([one for one in student.parameters() if one.requires_grad])
        return every.summed([total])[0]

    # ── texts ────────────────────────────────────────────────────────────────────────────────

    def _drawn(
        self, asked: Asked, count: int, weight: float, generator: torch.Generator
    ) -> list[tuple[Answers, Tensor, float]]:
        """Draw texts of every kind: half of them the user's own, if there are any; and what an answer of
        theirs weighs.
        """
        kinds = [kind for kind in asked.learned if kind != GIVEN]
        each = dict.fromkeys(kinds, -(-count // len(kinds)))
        if GIVEN in asked.learned:
            each = {kind: max(1, number // 2) for kind, number in each.items()} | {GIVEN: count // 2 or 1}
        drawn = []
        for kind, number in each.items():
            answers = asked.learned[kind]
            texts = torch.randint(len(answers.ids), (number,), generator=generator)
            drawn.append((answers, texts))
        total = sum(answers.count(texts) for answers, texts in drawn)
        return [(answers, texts, weight / max(1, total)) for answers, texts in drawn]

    def _learned(self, student: nn.Module, answers: Answers, texts: Sequence[int], weight: float) -> float:
        """Add the gradients of this process's share of some texts, a few at a time."""
        total = 0.0
        for some, counts in processes().passes(texts, self._texts_together(student, answers)):
            weighs = weight * counts
            total += weighs * self._distance(student, answers, torch.tensor(some), weighs).total
        return total

    def _texts_together(self, student: nn.Module, answers: Answers) -> int:
        length = answers.ids.shape[1]
        if length not in self._together:
            one = torch.zeros(1, dtype=torch.int64)
            found = inputs_in_a_pass(student, lambda: self._logits(student, answers, one, gradients=True))
            self._together[length] = processes().agreed(found)
        return self._together[length]

    def _measured(self, student: nn.Module, answers: Answers) -> Agreement:
        sums, batches = [0.0] * 4, torch.split(torch.arange(len(answers.ids)), 4)
        for (some,), counts in processes().passes(batches, 1):
            with torch.no_grad():
                found = self._distance(student, answers, some)
            sums = [a + counts * b for a, b in zip(sums, found, strict=True)]
        total, count, equal, tokens = processes().summed(sums)
        return Agreement(equal / max(1, tokens), total / max(1, count))

    def _distance(
        self, student: nn.Module, answers: Answers, texts: Tensor, weight: float | None = None
    ) -> Distance:
        logits = self._logits(student, answers, texts, gradients=weight is not None)
        return distance(logits, answers.ids[texts].long().to(logits.device), answers.of(texts), weight)

    def _logits(self, student: nn.Module, answers: Answers, texts: Tensor, *, gradients: bool) -> Tensor:
        """Return the student's logits (texts, tokens, vocabulary) over the tokens that all models have."""
        first = next(student.parameters())
        device, ids = first.device, answers.ids[texts].long().to(first.device)
        with low_precision(str(device), first.dtype):
            found = run_model(student, self.b.family, {TOKENS: ids}, double=False, gradients=gradients)
        logits = found["logits"][..., : self.of_a.about["tokens"]]
        if self._allowed is not None:
            out = torch.ones(logits.shape[-1], dtype=torch.bool, device=device)
            out[self._allowed.to(device)] = False
            logits = logits.masked_fill(out, -torch.inf)
        return logits
