"""Do what was asked for: train, move, measure, keep and show."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import documents, results, running
from experiments.barriers import Lesson, barriers, cifar10, digits
from experiments.full import FULL
from experiments.pairs.data import say
from experiments.pictures import draw_strengths
from experiments.recipes import PAIR, RECIPES, Kind, Recipe, recipe
from experiments.settings import Scale
from experiments.small import SMALL
from transfusion.cli.console import out
from transfusion.files.publishing import publish_file
from transfusion.report import views
from transfusion.report.figures import draw_barriers
from transfusion.runtime.run_record import RunRecord

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
WORK = {
    Kind.IMAGES: running.images,
    Kind.TEXTS: running.texts,
    Kind.SHOTS: running.few_shots,
    Kind.STRENGTHS: running.strengths,
}


def run(chosen: Recipe, scale: Scale, asked: argparse.Namespace, command: str) -> dict[str, Any]:
    """Do it, keep it, show it."""
    record = RunRecord(f"experiments {chosen.name}", command)
    if asked.methods:
        chosen = replace(chosen, methods=tuple(asked.methods), ours=())
    if chosen.kind is Kind.BARRIER:
        return run_barrier(chosen, scale, asked, record)
    found = WORK[chosen.kind](scale, chosen.tasks, chosen.rows, asked.seeds, asked.device)
    metadata = record.of(results.result_of(chosen, scale, asked.seeds, found))
    draw = partial(draw_strengths, metadata) if chosen.kind is Kind.STRENGTHS else None
    keep(metadata, chosen, scale, asked, draw)
    show(metadata)
    return metadata


def run_barrier(chosen: Recipe, scale: Scale, asked: argparse.Namespace, record: RunRecord) -> dict[str, Any]:
    """Measure the barrier between models of its own; the record holds the fields of the `barrier` verb."""
    lesson: Lesson = digits() if asked.digits else cifar10(scale.lmc)
    found = barriers(lesson, scale.lmc, chosen.rows, (asked.pair[0], asked.pair[1]), asked.device)
    named = dict(zip("ab", (f"{lesson.name}, seed {seed}" for seed in asked.pair), strict=True))
    metadata = record.of(results.result_of(chosen, scale, 1, found.metadata() | named))
    keep(metadata, chosen, scale, asked, partial(draw_barriers, metadata["found"]))
    show(metadata)
    return metadata


def keep(
    metadata: dict[str, Any],
    chosen: Recipe,
    scale: Scale,
    asked: argparse.Namespace,
    draw: Callable[[Path, str], None] | None,
) -> None:
    """Write the result, and the figure if there is one.

    What is not the recipe as it stands is kept only where a place is named for it.
    """
    own = bool(asked.methods or asked.digits or tuple(asked.pair) != PAIR)
    if asked.output or not own:
        results.save(metadata, asked.output or results.place_of(chosen.name, scale.name))
    if draw is not None and (asked.figure or asked.output or not own):
        place = figure_of(chosen, scale, asked)
        publish_file(place, lambda staged: draw(staged, place.suffix[1:]), force=True)
        say(f"written: {place}")


def figure_of(chosen: Recipe, scale: Scale, asked: argparse.Namespace) -> Path:
    """Where the figure goes: among the documents' pictures, or beside the result of the full scale."""
    if asked.figure:
        return Path(asked.figure)
    if scale is SMALL and asked.output is None:
        return PICTURES / f"experiment-{chosen.name}.png"
    return (asked.output or results.place_of(chosen.name, scale.name)).with_suffix(".png")


def show(metadata: dict[str, Any]) -> None:
    """On the terminal."""
    chosen = recipe(metadata["recipe"])
    if chosen.kind is Kind.BARRIER:
        out.print(views.barrier(metadata["found"]))
    elif chosen.kind is Kind.STRENGTHS:
        out.print(results.curves_view(metadata))
    else:
        out.print(results.view(metadata))


def plan(chosen: Recipe, scale: Scale, seeds: int) -> list[str]:
    """What would be trained, moved and measured."""
    lines = [f"{chosen.name} ({scale.name}): {chosen.title}", f"  {chosen.kind}"]
    if chosen.kind is Kind.BARRIER:
        lines.append(f"  train    {scale.lmc.about}")
        lines.append(f"  align    A and B by {', '.join(chosen.rows)}")
        lines.append(f"  measure  {scale.lmc.points} points of α on {scale.lmc.images} test images")
        return lines
    tasks = scale.tasks
    lines.append(f"  bases    {scale.bases.about()}")
    for name in chosen.tasks:
        task, schedule = tasks[name], tasks[name].schedule
        lines.append(
            f"  tune A   {name}: {task.name} ({task.about}); {schedule.steps} steps of {schedule.batch}, rate"
            f" {schedule.rate:g}"
        )
    lines.append(f"  move     by {', '.join(chosen.rows)}")
    if chosen.kind is Kind.TEXTS:
        lines.append("  measure  on every task, under A's fine-tuned head")
    elif chosen.kind is Kind.SHOTS:
        lines.append("  measure  on every task")
    else:
        lines.append(f"  measure  on every task; support: {scale.support_about}")
    if chosen.kind is Kind.STRENGTHS:
        lines.append(f"  α        {', '.join(f'{alpha:g}' for alpha in scale.alphas)}")
    if chosen.kind is Kind.SHOTS:
        lines.append(f"  learn    one α for every layer from {scale.shots} examples of every class")
    lines.append(f"  seeds    {seeds}")
    return lines


def work(asked: argparse.Namespace, given: list[str]) -> None:
    """Carry out the recipes that were asked for, or tell what they would do."""
    torch.set_num_threads(asked.threads)
    scale = SMALL if asked.small else FULL
    names = [] if asked.name is None else list(RECIPES) if asked.name == "all" else [asked.name]
    for chosen in [recipe(name) for name in names]:
        if asked.dry_run:
            out.print("\n".join(plan(chosen, scale, asked.seeds)), markup=False)
            continue
        say(f"{chosen.title}, {scale.name}")
        run(chosen, scale, asked, shlex.join(["python", "-m", "experiments", *given]))
    if asked.write_docs:
        say(f"written: {documents.write()}")
