"""The verb ``barrier``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli.console import Messages, show_result
from transfusion.cli.data_options import BatchOption, examples
from transfusion.cli.option_checks import given, one_of, within
from transfusion.cli.options import (
    ArchitectureFile,
    BaseArgument,
    Dtype,
    Force,
    Jobs,
    Json,
    NewBaseArgument,
    Quiet,
    Vias,
)

if TYPE_CHECKING:
    from transfusion.evaluation.task import EvaluationData

SHORTCUTS = ("interpolated", "plain", "rounded")


@given(data=examples)
def barrier(
    a: BaseArgument,
    b: NewBaseArgument,
    data: EvaluationData,
    via: Vias = None,
    vanilla: Annotated[
        bool, typer.Option("--vanilla/--no-vanilla", help="Also measure between A and B as they are.")
    ] = True,
    points: Annotated[
        int, typer.Option(min=2, help="The number of values of α, ends included.", callback=within(1, 10_001))
    ] = 11,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            show_default=False,
            help="The file to write: a figure (.png, .svg, .pdf) or .json.",
        ),
    ] = None,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    shortcuts: Annotated[
        str | None,
        typer.Option(
            "--shortcuts",
            help="What residual connections carry between π(A) and B, where the stream's maps differ:"
            f" {', '.join(SHORTCUTS)}.",
            callback=one_of(SHORTCUTS),
            show_default="interpolated, or as π asks",
        ),
    ] = None,
    batch: BatchOption = None,
    dtype: Dtype = "float32",
    architecture: ArchitectureFile = None,
    jobs: Jobs = None,
) -> None:
    """Measure the loss of (1 − α)·π(A) + α·B for α from 0 to 1, and draw it."""
    from transfusion.cli import views
    from transfusion.evaluation.barrier import barriers
    from transfusion.runtime.resources import Resources

    found = barriers(
        a,
        b,
        data=data,
        via=via,
        vanilla=vanilla,
        points=points,
        shortcuts=shortcuts,
        batch=batch,
        dtype=dtype,
        output=output,
        force=force,
        resources=Resources(jobs=jobs),
        progress=Messages(quiet=quiet),
    )
    written = {} if output is None else {"written": str(output)}
    show_result({**written, **found.record}, views.barrier(found.record), [output], as_json)
