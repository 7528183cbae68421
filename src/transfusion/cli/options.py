"""The arguments and flags that several verbs share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import typer

from transfusion.architecture import Inner, Residual
from transfusion.methods import METHODS, Start

SHORTCUTS = ("interpolated", "plain", "rounded")
DTYPES = ("float64", "float32", "float16", "bfloat16")


def one_of(known: Collection[str]) -> Callable[[str | None], str | None]:
    """A check that refuses a word which is not among the known ones, as wrong usage."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in known:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}")
        return value

    return check


def use_tables(file: Path | None) -> Path | None:
    """Register the tables of a file before the verb runs."""
    if file is not None:
        from transfusion.architectures import register

        register(file)
    return file


ModelArgument = Annotated[str, typer.Argument(show_default=False, help="A folder, a file or a hub id.")]
Output = Annotated[Path, typer.Option("--output", "-o", show_default=False, help="Where to write.")]
MaybeOutput = Annotated[
    Path | None,
    typer.Option("--output", "-o", show_default=False, help="With --propose: where to write the draft."),
]
Propose = Annotated[
    bool,
    typer.Option(
        "--propose", help="Draft a table for the model's class by trials, and certify it; or exit 3."
    ),
]
Vias = Annotated[
    list[str] | None,
    typer.Option("--via", show_default=False, help="A file of π; may be given several times to compare."),
]
Data = Annotated[
    Path,
    typer.Option(show_default=False, help="Examples: a .safetensors or .npz with inputs by name and labels."),
]
Figure = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", show_default=False, help="Where to write: a figure (.png, .svg, .pdf) or .json."
    ),
]
Treatment = Annotated[
    str | None,
    typer.Option(
        "--shortcuts",
        help=f"What turned residual connections carry on the way: {', '.join(SHORTCUTS)}.",
        callback=one_of(SHORTCUTS),
        show_default="interpolated, or as π asks",
    ),
]
Via = Annotated[str | None, typer.Option(show_default=False, help="A file of π; without it, align first.")]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help=f"One of {', '.join(METHODS)}.",
        callback=one_of(METHODS),
        show_default="transfusion",
    ),
]
ResidualOption = Annotated[
    Residual | None,
    typer.Option(
        help="The residual stream: every point its own map (the paper), one map, or none.",
        show_default="the method's: untied",
    ),
]
InnerOption = Annotated[
    Inner | None,
    typer.Option(
        help="Inside heads: q·k and v·o each their own map, or one for both (the paper).",
        show_default="the method's: free",
    ),
]
StartOption = Annotated[
    Start | None,
    typer.Option(
        help="First sweep: count axes not visited yet as they are (the paper), or leave them out.",
        show_default="the method's: settled",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(show_default=False, help="A config.json for weights that come without one."),
]
ArchitectureFile = Annotated[
    Path | None,
    typer.Option(
        "--architecture",
        show_default=False,
        help="A Python file with a table of your own.",
        callback=use_tables,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Compute in this type: {', '.join(DTYPES)}.",
        callback=one_of(DTYPES),
        show_default="float32",
    ),
]
StoredDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Store in this type: {', '.join(DTYPES)}.",
        callback=one_of(DTYPES),
        show_default="B's",
    ),
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")]
Seed = Annotated[int, typer.Option(min=0, help="For everything that is drawn at random.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Threads.", show_default="all cores")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only errors and results.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")]
