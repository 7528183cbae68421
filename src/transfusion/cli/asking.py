"""The flags that say what models are measured on, the same for every verb that measures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli.options import PRECISE, one_of

if TYPE_CHECKING:
    from transfusion.evaluation import Data

_DATA = "The data"
_WHERE = (
    "a folder of images, a CSV, JSONL or parquet file, a folder or hub id of datasets, or a .safetensors or"
    " .npz with inputs by name and labels."
)
DataOption = Annotated[
    str, typer.Option("--data", show_default=False, help=f"The task: {_WHERE}", rich_help_panel=_DATA)
]
SupportOption = Annotated[
    str | None,
    typer.Option(
        "--support",
        show_default=False,
        help="What the base could do before, which is to be kept; the same kinds of data.",
        rich_help_panel=_DATA,
    ),
]
SplitOption = Annotated[
    str | None,
    typer.Option("--split", show_default=False, help="Which split of the data.", rich_help_panel=_DATA),
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text",
        show_default=False,
        help="The column with the text; two for pairs, with a comma between them.",
        rich_help_panel=_DATA,
    ),
]
LabelOption = Annotated[
    str | None,
    typer.Option("--label", show_default=False, help="The column with the label.", rich_help_panel=_DATA),
]
ClassesOption = Annotated[
    str | None,
    typer.Option(
        "--classes",
        show_default=False,
        help="Names of the classes for zero-shot: a file, or the name of a list that ships with the package.",
        rich_help_panel=_DATA,
    ),
]
SupportClasses = Annotated[
    str | None,
    typer.Option(
        "--support-classes",
        show_default=False,
        help="The same for --support.",
        rich_help_panel=_DATA,
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        show_default=False,
        help="A model whose head is borrowed, or a file with a linear head.",
        rich_help_panel=_DATA,
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option("--metric", show_default="as the question asks", help="The headline.", rich_help_panel=_DATA),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit", min=1, show_default="all", help="Only the first so many examples.", rich_help_panel=_DATA
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch", min=1, show_default="as many as fit", help="Examples at a time.", rich_help_panel=_DATA
    ),
]
ComputedIn = Annotated[
    str,
    typer.Option("--dtype", help=f"Compute in {' or '.join(PRECISE)}.", callback=one_of(PRECISE)),
]


def as_data(
    reference: str,
    *,
    split: str | None = None,
    text: str | None = None,
    label: str | None = None,
    classes: str | None = None,
    head: str | None = None,
    metric: str | None = None,
    limit: int | None = None,
) -> Data:
    """What the flags ask for."""
    from transfusion.evaluation import Data

    columns = tuple(column.strip() for column in (text or "").split(",") if column.strip())
    return Data(
        reference,
        split=split,
        text=columns,
        label=label,
        classes=classes,
        head=head,
        metric=metric,
        limit=limit,
    )


def existing(*references: str | None) -> list[str]:
    """Those among some references that are places on this machine, which no output may overwrite."""
    return [one for one in references if one is not None and Path(one).exists()]
