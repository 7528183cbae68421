"""Results: kept as JSON with the command and the machine, and shown with the paper's numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.table import Table as View

from experiments.recipes import EXPERTS, ZERO, Cell, Kind, Recipe, recipe
from experiments.running import EXPERT
from experiments.settings import Scale
from transfusion.errors import DataError
from transfusion.files.publishing import publish_file, write_json

FOLDER = Path(__file__).parent / "results"
ABSENT = "–"
SAID = {
    ZERO: "B, zero-shot",
    "naive": "B + τ",
    "ot": "B + π(τ), optimal transport",
    "git-rebasin": "B + π(τ), Git Re-Basin",
    "transfusion": "B + π(τ), TransFusion",
}
"""Rows in the paper's words."""


def said(row: str, kind: Kind) -> str:
    """What a row is called."""
    if row == ZERO and kind is Kind.TEXTS:
        return "B, under A's head"
    words = SAID.get(row, row)
    return words.replace("B + ", "B + α·") if kind is Kind.SHOTS else words


def place_of(name: str, scale: str) -> Path:
    """Where a result is kept."""
    return FOLDER / f"{name}-{scale}.json"


def save(metadata: dict[str, Any], place: Path) -> None:
    """Write a result; an older one is replaced."""
    place.parent.mkdir(parents=True, exist_ok=True)
    publish_file(place, lambda staged: write_json(staged, metadata), force=True)


def load(name: str, scale: str) -> dict[str, Any]:
    """A result that was kept."""
    place = place_of(name, scale)
    if not place.exists():
        raise DataError(f"{place}: not there", hint=f"python -m experiments {name} --{scale} makes it")
    metadata: dict[str, Any] = json.loads(place.read_text())
    return metadata


def result_of(chosen: Recipe, scale: Scale, seeds: int, found: dict[str, Any]) -> dict[str, Any]:
    """A result with what it is about."""
    tasks = scale.tasks
    visual = chosen.kind in (Kind.IMAGES, Kind.STRENGTHS)
    return {
        "recipe": chosen.name,
        "scale": scale.name,
        "bases": scale.lmc.about if chosen.kind is Kind.BARRIER else scale.bases.about(),
        "support": scale.support_about if visual else None,
        "seeds": seeds,
        "tasks": {
            name: {
                "here": tasks[name].name,
                "about": tasks[name].about,
                "tuning": vars(tasks[name].schedule),
            }
            for name in chosen.tasks
            if name in tasks
        },
        "found": found,
    }


# ── tables ───────────────────────────────────────────────────────────────────────────────────


def spread(values: Iterable[float], *, signed: bool) -> str:
    """The mean, and with several values how far they scatter."""
    known = list(values)
    number = f"{mean(known):+.2f}" if signed else f"{mean(known):.2f}"
    number = number.replace("-", "−")
    return number if len(known) == 1 else f"{number} ± {stdev(known):.2f}"


def printed(cell: Cell | None, *, signed: bool) -> str:
    """What the paper prints, task and support."""
    if cell is None:
        return ABSENT
    return " / ".join(spread([value], signed=signed) for value in cell if value is not None)


def measured(by_seed: list[dict[str, dict[str, float]]], row: str) -> str:
    """What was found here, task and support; gains for everything that is moved."""
    absolute = row in (ZERO, EXPERT)
    kinds = [what if absolute else f"{what} gain" for what in ("task", "support")]
    values = [[found[row][kind] for found in by_seed if kind in found[row]] for kind in kinds]
    return " / ".join(spread(some, signed=not absolute) for some in values if some)


def grid(metadata: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads of columns, and rows: for every task a column of the paper and one of ours."""
    chosen = recipe(metadata["recipe"])
    assert chosen.table is not None
    heads = [""]
    for name in chosen.tasks:
        heads += [f"{name}\n(paper)", f"{metadata['tasks'][name]['here']}\n(here)"]
    rows = []
    for row in (EXPERT, ZERO, *chosen.rows):
        cells = []
        for task in chosen.tasks:
            by_seed = metadata["found"][task]
            if row not in by_seed[0]:
                break
            known = EXPERTS.get(task, ABSENT) if row == EXPERT else None
            cells.append(known or printed(chosen.table.cell(row, task), signed=row != ZERO))
            cells.append(measured(by_seed, row))
        if cells:
            rows.append([said(row, chosen.kind), *cells])
    return heads, rows


def view(metadata: dict[str, Any]) -> View:
    """A table for the terminal."""
    chosen = recipe(metadata["recipe"])
    seeds = metadata["seeds"]
    what = "task / support" if chosen.kind is Kind.IMAGES else "task"
    table = View(
        title=f"{chosen.title} — {what}; B in percent, all else in points over B",
        caption=f"here: {metadata['bases']}; {seeds} seed{'s' * (seeds > 1)}",
    )
    heads, rows = grid(metadata)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def curves_view(metadata: dict[str, Any]) -> View:
    """The figure of α in numbers: task and support for some α."""
    table = View(title="Points over B: task / support, mean over seeds", caption=f"here: {metadata['bases']}")
    table.add_column("")
    first = next(iter(metadata["found"].values()))[0]["curves"]
    alphas = [point["alpha"] for point in next(iter(first.values()))]
    for alpha in alphas:
        table.add_column(f"α = {alpha:g}", justify="right")
    for task, by_seed in metadata["found"].items():
        for method in by_seed[0]["curves"]:
            cells = []
            for number in range(len(alphas)):
                points = [found["curves"][method][number] for found in by_seed]
                cells.append(
                    " / ".join(
                        f"{mean(point[f'{what} gain'] for point in points):+.1f}"
                        for what in ("task", "support")
                    ).replace("-", "−")
                )
            table.add_row(f"{task}: {method}", *cells)
    return table
