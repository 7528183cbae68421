"""The verb ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transfusion.cli.console import Messages, show
from transfusion.cli.options import ArchitectureFile, Force, Json, Quiet


def report(
    run: Annotated[
        Path,
        typer.Argument(
            show_default=False,
            help="A folder or a LoRA file that transport or merge wrote, or any folder with results.",
        ),
    ],
    results: Annotated[
        list[Path] | None,
        typer.Argument(show_default=False, metavar="[RESULT.json]...", help="Results from elsewhere."),
    ] = None,
    via: Annotated[
        str | None, typer.Option(show_default="where the run had it", help="The file of π.")
    ] = None,
    ceiling: Annotated[
        str | None,
        typer.Option(show_default=False, help="B fine-tuned itself: how much of the gap was closed."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the page.")] = Path(
        "report.html"
    ),
    architecture: ArchitectureFile = None,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write a run as one self-contained HTML page: advice, layers, heads, curves, scores and time."""
    with Messages(quiet=quiet).bar(text="drawing the page"):
        from transfusion.report.page import report as make

        page = make(run, results or (), via=via, ceiling=ceiling, output=output, force=force)
    info = {
        "written": str(output),
        "title": page.hero.title,
        "sections": [section.id for section in page.sections],
        "missing": [command.text for command in page.missing],
        "notes": list(page.notes),
    }
    names = ", ".join(section.name for section in page.sections)
    show(info, as_json, f"written to {output}: {names}")
