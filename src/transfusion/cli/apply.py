"""The verb ``apply``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli.console import Messages, results_apart, show
from transfusion.cli.option_checks import given
from transfusion.cli.options import (
    ArchitectureFile,
    BaseArgument,
    Config,
    Force,
    Json,
    Output,
    Quiet,
    writing,
)

if TYPE_CHECKING:
    from transfusion.runtime.resources import Resources


@given(resources=writing)
def apply(
    pi: Annotated[str, typer.Argument(metavar="PI", show_default=False, help="The file of π.")],
    a: BaseArgument,
    output: Output,
    resources: Resources,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    config: Config = None,
    architecture: ArchitectureFile = None,
) -> None:
    """Write π(A): the same function as A, its units in B's order."""
    from transfusion.transport.applied_model import apply as run

    with results_apart():
        run(
            pi,
            a,
            config=config,
            output=output,
            force=force,
            resources=resources,
            progress=Messages(quiet=quiet),
        )
    show({"written": str(output)}, as_json, f"π(A) written to {output}")
