"""The verb ``evaluate``: models measured on a task and a support, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli.console import Talk, command, err, out, print_json
from transfusion.cli.options import PRECISE, ArchitectureFile, Device, Force, Jobs, Json, Quiet, one_of

if TYPE_CHECKING:
    from transfusion.evaluation import Data

METRICS = ("accuracy", "f1", "matthews", "loss", "perplexity")
_EXAMPLES = "The examples"
_SUPPORT = "The support"

Models = Annotated[list[str], typer.Argument(show_default=False, help="Folders or hub ids of models.")]
TaskData = Annotated[
    str,
    typer.Option(
        "--data",
        show_default=False,
        help="The task: a folder of images, one sub-folder a class; a .csv, .tsv, .jsonl, .parquet or .txt; a"
        " folder of datasets; a .safetensors or .npz; or a hub id (org/name:config@revision).",
    ),
]
SupportData = Annotated[
    str | None,
    typer.Option(
        "--support", show_default=False, help="What the base could do before.", rich_help_panel=_SUPPORT
    ),
]
Against = Annotated[
    str | None, typer.Option(show_default=False, help="B: the model that gains are relative to.")
]
ClassesOption = Annotated[
    str | None,
    typer.Option(
        "--classes",
        show_default=False,
        help="Class names and templates: a file of JSON, or eurosat, dtd, gtsrb, svhn, imagenet-r.",
        rich_help_panel=_EXAMPLES,
    ),
]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        show_default=False,
        help='Instead of the file\'s templates, such as "a photo of a {}."; may be given several times.',
        rich_help_panel=_EXAMPLES,
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        show_default=False,
        help="Borrow a head: of a fine-tuned model, or a linear one in a .safetensors (weight, bias).",
        rich_help_panel=_EXAMPLES,
    ),
]
SplitOption = Annotated[
    str | None, typer.Option("--split", show_default=False, help="Which split.", rich_help_panel=_EXAMPLES)
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text",
        show_default="by name",
        help="The column of texts; two for pairs: one,other.",
        rich_help_panel=_EXAMPLES,
    ),
]
ImageOption = Annotated[
    str | None,
    typer.Option("--image", show_default="by name", help="The column of images.", rich_help_panel=_EXAMPLES),
]
LabelOption = Annotated[
    str | None,
    typer.Option("--label", show_default="by name", help="The column of classes.", rich_help_panel=_EXAMPLES),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        show_default="accuracy, the task's, or loss",
        help=f"The headline of the task: {', '.join(METRICS)}.",
        callback=one_of(METRICS),
        rich_help_panel=_EXAMPLES,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="all",
        help="Only so many examples: the first, of images as many of every class.",
        rich_help_panel=_EXAMPLES,
    ),
]
Truncate = Annotated[
    bool,
    typer.Option(
        "--truncate", help="Cut texts that are longer than the model takes.", rich_help_panel=_EXAMPLES
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, show_default="what fits", help="How many examples at a time."),
]
SupportClasses = Annotated[
    str | None,
    typer.Option(show_default=False, help="As --classes, of the support.", rich_help_panel=_SUPPORT),
]
SupportSplit = Annotated[
    str | None,
    typer.Option(show_default=False, help="As --split, of the support.", rich_help_panel=_SUPPORT),
]
SupportHead = Annotated[
    str | None, typer.Option(show_default=False, help="As --head, of the support.", rich_help_panel=_SUPPORT)
]
ResultFile = Annotated[
    Path | None, typer.Option("--output", "-o", show_default=False, help="Where to write: .json.")
]
Precision = Annotated[
    str, typer.Option("--dtype", help=f"Compute in {' or '.join(PRECISE)}.", callback=one_of(PRECISE))
]


def task_data(
    reference: str,
    *,
    split: str | None,
    text: str | None,
    image: str | None,
    label: str | None,
    classes: str | None,
    template: list[str] | None,
    limit: int | None,
    head: str | None,
    metric: str | None,
    truncate: bool,
) -> Data:
    """The task as the flags describe it."""
    from transfusion.evaluation import Data

    columns = tuple(one.strip() for one in text.split(",")) if text else ()
    return Data(
        reference,
        split=split,
        text=columns,
        image=image,
        label=label,
        classes=classes,
        templates=tuple(template or ()),
        limit=limit,
        head=head,
        metric=metric,
        truncate=truncate,
    )


def support_data(
    reference: str | None,
    *,
    split: str | None,
    classes: str | None,
    template: list[str] | None,
    limit: int | None,
    head: str | None,
    truncate: bool,
) -> Data | None:
    """The support as the flags describe it; its columns are known by their names."""
    from transfusion.evaluation import Data

    if reference is None:
        if split or classes or head:
            raise typer.BadParameter("--support-… goes with --support")
        return None
    return Data(
        reference,
        split=split,
        classes=classes,
        templates=tuple(template or ()),
        limit=limit,
        head=head,
        truncate=truncate,
    )


def require_json(output: Path | None, force: bool) -> None:
    """Refuse, before any work is done, a place that the result cannot go to."""
    from transfusion.errors import OutputError
    from transfusion.writer import require_writable

    if output is None:
        return
    if output.suffix != ".json":
        raise OutputError(f"{output}: not a file of JSON", hint="end the name in .json")
    require_writable(output, force=force, inputs=[], folder=False)


def evaluate(
    models: Models,
    data: TaskData,
    support: SupportData = None,
    against: Against = None,
    classes: ClassesOption = None,
    template: Templates = None,
    head: HeadOption = None,
    split: SplitOption = None,
    text: TextOption = None,
    image: ImageOption = None,
    label: LabelOption = None,
    metric: MetricOption = None,
    limit: Limit = None,
    truncate: Truncate = False,
    support_classes: SupportClasses = None,
    support_split: SupportSplit = None,
    support_head: SupportHead = None,
    batch: BatchOption = None,
    dtype: Precision = "float32",
    device: Device = "cpu",
    jobs: Jobs = None,
    output: ResultFile = None,
    architecture: ArchitectureFile = None,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Measure models on a task, and on what the base could do before; gains are relative to --against."""
    import torch

    from transfusion.cli import views
    from transfusion.cli.work import as_dtype
    from transfusion.evaluation import evaluate as measure
    from transfusion.record import Record
    from transfusion.writer import publish_file, write_json

    require_json(output, force)
    if jobs:
        torch.set_num_threads(jobs)
    record, talk = Record("evaluate", command()), Talk(quiet=quiet, verbose=False)
    task = task_data(
        data,
        split=split,
        text=text,
        image=image,
        label=label,
        classes=classes,
        template=template,
        limit=limit,
        head=head,
        metric=metric,
        truncate=truncate,
    )
    kept = support_data(
        support,
        split=support_split,
        classes=support_classes,
        template=template,
        limit=limit,
        head=support_head,
        truncate=truncate,
    )
    with talk.examples() as step:
        found = measure(
            models,
            data=task,
            support=kept,
            against=against,
            batch=batch,
            dtype=as_dtype(dtype) or torch.float32,
            device=device,
            on_examples=step,
        )
    for note in found.notes:
        talk.note(f"note: {note}")
    result: dict[str, Any] = record.of(found.story())
    if output is not None:
        publish_file(output, lambda staged: write_json(staged, result), force=force)
    if as_json:
        print_json(result)
        return
    out.print(views.evaluation(result))
    if output is not None:
        err.print(f"written to {output}", markup=False)
