"""Starts: B + α·π(τ) or B, whichever answers more like the fine-tune; and the head that it brought."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from statistics import fmean

import torch
from torch import nn

from transfusion.architecture.naming import Naming
from transfusion.running.probes.probed_model import batched
from transfusion.runtime.progress import phase
from transfusion.transport.refinement.answers import CLASSES, VECTORS
from transfusion.transport.refinement.head import features_of, fitted, head_of
from transfusion.transport.refinement.lessons import Agreement
from transfusion.transport.refinement.teaching import Teaching

SCALES = tuple(2.0**power for power in range(-3, 7))
"""The numbers by which a start's logits are multiplied before starts are compared."""
HEAD, FITTED = 600_000, 512
"""The number of the first step whose inputs the head is fitted to, and the number of inputs."""


def choose_start(
    teaching: Teaching, starts: Mapping[str, nn.Module]
) -> tuple[str, dict[str, dict[str, Agreement]]]:
    """Return the name of the start that answers held-out inputs most like the fine-tune, and how near each
    is on the inputs that decide.

    Its logits may first be multiplied by one number: maps shrink them more than they confuse them.
    """
    found: dict[str, float] = {}
    agreements: dict[str, dict[str, Agreement]] = {}
    with phase("comparing starts with the fine-tune", len(starts)) as advance:
        for name, module in starts.items():
            agreements[name] = {kind: teaching.measure(module, kind) for kind in teaching.judges}
            found[name] = _divergence_at_best_scale(teaching, agreements[name], module)
            advance("starts compared with the fine-tune")
    return min(found, key=lambda name: found[name]), agreements


def _divergence_at_best_scale(
    teaching: Teaching, agreements: Mapping[str, Agreement], student: nn.Module
) -> float:
    targets = teaching.targets
    if targets.kind == VECTORS:
        return fmean(one.divergence for one in agreements.values())
    rows: list[list[float]] = []  # a divergence for every scale
    for kind in teaching.judges:
        given = list(batched(teaching.held_out[kind], teaching.batch))
        for some, wanted in zip(given, teaching.wanted_of(kind, given), strict=True):
            found = teaching.answers(student, some)
            scaled = ({name: scale * found[name] for name in targets.names} for scale in SCALES)
            rows.append([float(targets.loss(wanted, one)) for one in scaled])
    return min(fmean(column) for column in zip(*rows, strict=True))


def fit_head(teaching: Teaching, student: nn.Module, carried: Collection[str]) -> None:
    """Fit the head that the fine-tune brought, if it has one and chooses among classes."""
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
