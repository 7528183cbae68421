"""The paper's tables and figures: python -m experiments NAME [--small]

python -m experiments --list                  all recipes
python -m experiments table-1 --small         the recipe on small models that are taught here
python -m experiments table-1 --device cuda   the paper's own bases and datasets, from the hub
python -m experiments all --small             every recipe
python -m experiments table-1 --dry-run       what would be trained, moved and measured
python -m experiments --write-docs            docs/experiments.md from the kept results
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import documents, results, running
from experiments.barriers import Lesson, barriers, cifar10, digits
from experiments.full import FULL
from experiments.pairs.training import say
from experiments.pictures import draw_strengths
from experiments.recipes import RECIPES, Kind, Recipe, recipe
from experiments.settings import Scale
from experiments.small import SMALL
from transfusion.checkpoint.publishing import publish_file
from transfusion.cli import views
from transfusion.cli.console import out, print_error
from transfusion.errors import SettingError, TransfusionError
from transfusion.evaluation.interpolation import curves_metadata
from transfusion.reporting.charts.result_figures import draw_barriers
from transfusion.runtime.run_record import RunRecord

PAIR = (1, 2)
"""The barrier's seeds, if nobody says otherwise."""
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
WORK = {
    Kind.IMAGES: running.images,
    Kind.TEXTS: running.texts,
    Kind.SHOTS: running.few_shots,
    Kind.STRENGTHS: running.strengths,
}


def parsed(arguments: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        "python -m experiments", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="a recipe, or all")
    parser.add_argument("--list", action="store_true", help="show the recipes")
    parser.add_argument("--small", action="store_true", help="small models, taught here")
    parser.add_argument("--seeds", type=int, default=1, help="how many times, each from its own seed")
    parser.add_argument(
        "--methods", nargs="+", help="instead of the recipe's; the barrier: NAME[:RESIDUAL[:SHORTCUTS]]"
    )
    parser.add_argument("--device", default="cpu", help="where models learn, are aligned and measured")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    parser.add_argument("--pair", type=int, nargs=2, default=PAIR, help="the barrier's two seeds")
    parser.add_argument("--digits", action="store_true", help="the barrier on scikit-learn's digits")
    parser.add_argument("-o", "--output", type=Path, help="where the result goes (experiments/results)")
    parser.add_argument("--figure", type=Path, help="where the figure goes (docs/pictures, if small)")
    parser.add_argument("--write-docs", action="store_true", help="write docs/experiments.md anew")
    return parser.parse_args(arguments)


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
    curves = barriers(lesson, scale.lmc, chosen.rows, (asked.pair[0], asked.pair[1]), asked.device)
    named = dict(zip("ab", (f"{lesson.name}, seed {seed}" for seed in asked.pair), strict=True))
    metadata = record.of(results.result_of(chosen, scale, 1, curves_metadata(curves) | named))
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


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    given = sys.argv[1:] if arguments is None else arguments
    asked = parsed(given)
    torch.set_num_threads(asked.threads)
    scale = SMALL if asked.small else FULL
    try:
        if asked.list or not (asked.name or asked.write_docs):
            for one in RECIPES.values():
                out.print(f"{one.name:9} {one.title}: {one.kind}", markup=False)
            return 0
        if asked.seeds < 1:
            raise SettingError(f"seeds = {asked.seeds}: nothing would be done", hint="give 1 or more")
        names = [] if asked.name is None else list(RECIPES) if asked.name == "all" else [asked.name]
        for chosen in [recipe(name) for name in names]:
            if asked.dry_run:
                out.print("\n".join(plan(chosen, scale, asked.seeds)), markup=False)
                continue
            say(f"{chosen.title}, {scale.name}")
            run(chosen, scale, asked, shlex.join(["python", "-m", "experiments", *given]))
        if asked.write_docs:
            say(f"written: {documents.write()}")
    except TransfusionError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
