"""The verb ``demo``, and its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from transfusion.cli.console import Messages, out, print_json
from transfusion.cli.options import Force, Json, Quiet
from transfusion.cli.search_options import Seed

TITLES = {
    "onto_b": {
        "digits": "A's fine-tune moved onto an independent B",
        "text": "A's sentiment LoRA moved onto an independent B",
    },
    "onto_successor": {"digits": "The same onto a successor of A whose units are shuffled"},
}
SILENT = 0.05
"""Smaller gains in points have no colour."""


def demo(
    seed: Seed = 0,
    text: Annotated[
        bool, typer.Option("--text", help="A sentiment LoRA between text encoders, in place of digits.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(show_default=False, help="Keep the models and results in this folder.")
    ] = None,
    report: Annotated[
        Path, typer.Option(help="Where the report goes; one of an earlier demo is replaced.")
    ] = Path("transfusion-demo/report.html"),
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Train two small models on real data, fine-tune one, and move that onto the other."""
    messages = Messages(quiet=quiet)
    with messages.bar(text="loading libraries"):
        from transfusion.runtime.run_record import COMMAND
        from transfusion_demo import run

    command = COMMAND.get()
    COMMAND.set(None)  # the steps of the demo were not typed
    result = run(
        seed=seed, keep=keep, force=force, report=report, on_text=text, command=command, progress=messages
    )
    if as_json:
        print_json(result)
    else:
        out.print(tables(result))
    if place := result.get("report"):
        messages.note(f"report: {place}")
        if open_it:
            typer.launch(Path(place).resolve().as_uri())


def tables(result: dict[str, Any]) -> RenderableType:
    """Scores of all models, their gains over the base, and how much of the gap to the ceiling they close."""
    parts: list[RenderableType] = []
    for key, titles in TITLES.items():
        if key in result:
            parts += ["", _table(titles[result["demo"]], result[key])]
    return Group(*parts, "", Text(_below(result), style="dim"))


def _table(title: str, metadata: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("")
    for column in ("task", "gain", "of the gap", "support", "gain"):
        table.add_column(column, justify="right")
    for row in metadata["models"]:
        gain, share = row["gain"], row["share"]
        last = row["model"] == metadata["ceiling"]
        if last:
            table.add_section()
        table.add_row(
            row["name"],
            f"{100 * row['task']['value']:.1f}",
            _signed(gain and gain["task"]),
            Text("100%" if last else "") if share is None else _signed(100 * share, "%", 0),
            f"{100 * row['support']['value']:.1f}",
            _signed(gain and gain["support"]),
            style="dim" if gain is None else "italic" if last else "",
        )
    return table


def _signed(value: float | None, unit: str = "", digits: int = 1) -> Text:
    """A gain in its colour, with its sign."""
    if value is None:
        return Text("")
    style = "green" if value > SILENT else "red" if value < -SILENT else "dim"
    return Text(f"{value:+.{digits}f}{unit}", style=style)


def _below(result: dict[str, Any]) -> str:
    """What the numbers are."""
    task, support = result["onto_b"]["task"], result["onto_b"]["support"]
    lines = [
        f"Accuracy in %, gains in points over the first row. Task: {task['data']}, {task['question']}",
        f"Support, which the base could do before: {support['data']}, {support['question']}",
        f"Of the gap: the share of the gap to the ceiling closed without data. Seed {result['seed']}.",
    ]
    if "proof" in result:
        lines.append(
            "The shuffled successor computes the same as before: largest difference"
            f" {result['proof']:.1g} in float64."
        )
    return "\n".join(lines)
