"""The verb ``evaluate``: models measured on a task and a support, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli import data_options
from transfusion.cli.console import Messages, command, out, print_json
from transfusion.cli.data_options import BatchOption, Precision, Support
from transfusion.cli.grouped_options import given
from transfusion.cli.options import ArchitectureFile, Device, Force, Jobs, Json, Quiet

if TYPE_CHECKING:
    from transfusion.evaluation.evaluation_data import EvaluationData

Models = Annotated[list[str], typer.Argument(show_default=False, help="Folders or hub ids of models.")]
Against = Annotated[
    str | None, typer.Option(show_default=False, help="B: the model that gains are relative to.")
]
ResultFile = Annotated[
    Path | None, typer.Option("--output", "-o", show_default=False, help="Where to write: .json.")
]


@given(task=data_options.task, support=data_options.support)
def evaluate(
    models: Models,
    task: EvaluationData,
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

    from transfusion.checkpoint.publishing import publish_file, write_json
    from transfusion.cli import views
    from transfusion.cli.alpha_runs import places_of, use_threads
    from transfusion.cli.shared import as_dtype, require_json
    from transfusion.evaluation.model_comparison import evaluate as measure
    from transfusion.runtime.run_record import RunRecord

    read = (*models, against, *data_options.sources(task, support))
    require_json(output, places_of(*read), force=force)
    use_threads(jobs)
    record, messages = RunRecord("evaluate", command()), Messages(quiet=quiet, verbose=False)
    with messages.examples() as step:
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
        messages.note(f"note: {note}")
    result: dict[str, Any] = record.of(found.metadata())
    if output is not None:
        publish_file(output, lambda staged: write_json(staged, result), force=force)
    if as_json:
        print_json(result)
        return
    out.print(views.evaluation(result))
    if output is not None:
        out.print(f"written to {output}", markup=False)
