"""The verb ``evaluate``: models measured on a task and a support, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli import asking
from transfusion.cli.asking import BatchOption, Precision, Support
from transfusion.cli.console import Talk, command, out, print_json
from transfusion.cli.given import given
from transfusion.cli.options import ArchitectureFile, Device, Force, Jobs, Json, Quiet

if TYPE_CHECKING:
    from transfusion.evaluation import Data

Models = Annotated[list[str], typer.Argument(show_default=False, help="Folders or hub ids of models.")]
Against = Annotated[
    str | None, typer.Option(show_default=False, help="B: the model that gains are relative to.")
]
ResultFile = Annotated[
    Path | None, typer.Option("--output", "-o", show_default=False, help="Where to write: .json.")
]


@given(task=asking.task, support=asking.support)
def evaluate(
    models: Models,
    task: Data,
    support: Support,
    against: Against = None,
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
    from transfusion.cli.scaled import places_of, use_threads
    from transfusion.cli.work import as_dtype, require_json
    from transfusion.evaluation import evaluate as measure
    from transfusion.record import Record
    from transfusion.writer import publish_file, write_json

    read = (*models, against, *asking.sources(task, support))
    require_json(output, places_of(*read), force=force)
    use_threads(jobs)
    record, talk = Record("evaluate", command()), Talk(quiet=quiet, verbose=False)
    with talk.examples() as step:
        found = measure(
            models,
            data=task,
            support=support.beside(task),
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
        out.print(f"written to {output}", markup=False)
