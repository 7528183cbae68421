"""The verb ``demo``, and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from transfusion.cli.console import Messages, out, print_json
from transfusion.report.views import gain, score
from transfusion.runtime.progress import BARS, SILENT, Progress
from transfusion.runtime.run_record import COMMAND
from transfusion.runtime.settings import setting, verb
from transfusion.runtime.tables import columns

TITLES = {
    "onto_b": {
        "digits": "A's fine-tune moved onto an independent B",
        "text": "A's sentiment LoRA moved onto an independent B",
    },
    "onto_successor": {"digits": "The same onto a successor of A whose units are shuffled"},
}


@dataclass(frozen=True)
class DemoSettings:
    """The settings of the verb ``demo``."""

    _: KW_ONLY
    text: bool = setting(False, "A sentiment LoRA between text encoders, in place of digits.", kind=bool)
    seed: int = setting(0, "The seed of everything that is drawn at random.", kind=int, least=0, shown=True)
    keep: Path | None = setting(None, "Keep the models and results in this folder.", kind=Path)
    report: Path = setting(
        Path("transfusion-demo/report.html"),
        "Where the report goes; one of an earlier demo is replaced.",
        kind=Path,
        shown=True,
    )
    open_it: bool = setting(False, "Open the report in a browser.", kind=bool, flag="--open")
    force: bool = setting(False, "Replace an existing output.", kind=bool)
    progress: Progress = setting(SILENT, "Follows the run.", shown=BARS, typed=False)


@verb(DemoSettings)
def demo(settings: DemoSettings) -> dict[str, Any]:
    """Run the demo; return its tables and the place of its report."""
    with settings.progress.bar(text="loading libraries"):
        from transfusion_demo import run

    command = COMMAND.get()
    COMMAND.set(None)  # the steps of the demo were not typed
    return run(
        seed=settings.seed,
        keep=settings.keep,
        force=settings.force,
        report=settings.report,
        on_text=settings.text,
        command=command,
        progress=settings.progress,
    )


def show_demo(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print the tables and where the report is."""
    if as_json:
        print_json(result)
    else:
        out.print(tables(result))
    if place := result.get("report"):
        Messages(quiet=values["quiet"]).note(f"report: {place}")
        if values["open_it"]:
            typer.launch(Path(place).resolve().as_uri())


def tables(result: dict[str, Any]) -> RenderableType:
    """Scores of all models, their gains over the base, and how much of the gap to the ceiling they close."""
    parts: list[RenderableType] = []
    for key, titles in TITLES.items():
        if key in result:
            parts += ["", _table(titles[result["demo"]], result[key])]
    task, support = result["onto_b"]["task"], result["onto_b"]["support"]
    lines = [
        f"Accuracy in %, gains in points over the first row. Task: {task['data']}, {task['question']}",
        f"Support, which the base could do before: {support['data']}, {support['question']}",
        f"Of the gap: the share of the gap to the ceiling closed without data. Seed {result['seed']}.",
    ]
    if "proof" in result:
        difference = f"largest difference {result['proof']:.1g} in float64"
        lines.append(f"The shuffled successor computes the same as before: {difference}.")
    return Group(*parts, "", Text("\n".join(lines), style="dim"))


def _table(title: str, metadata: dict[str, Any]) -> Table:
    table = columns("", "task", "gain", "of the gap", "support", "gain", framed=True)
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for row in metadata["models"]:
        last, share = row["model"] == metadata["ceiling"], row["share"]
        task, support = (
            gain(row["gain"][part], "accuracy") if row["gain"] else Text("") for part in ("task", "support")
        )
        closed = Text("100%" if last else "")
        if share is not None:
            closed = gain(100 * share, "accuracy", 0).append("%")
        if last:
            table.add_section()
        scores = [score(row[part]["value"], "accuracy") for part in ("task", "support")]
        style = "dim" if row["gain"] is None else "italic" if last else ""
        table.add_row(row["name"], scores[0], task, closed, scores[1], support, style=style)
    return table
