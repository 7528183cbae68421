"""The verb ``evaluate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli import data_options
from transfusion.cli.console import Messages, show_result
from transfusion.cli.data_options import BatchOption, Support
from transfusion.cli.option_checks import given
from transfusion.cli.options import ArchitectureFile, Dtype, Force, Json, Quiet, Result, TrustBase, measuring

if TYPE_CHECKING:
    from transfusion.evaluation.task import EvaluationData
    from transfusion.runtime.resources import Resources


@given(task=data_options.task, support=data_options.support, resources=measuring)
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(show_default=False, help="Models or PEFT adapters: folders, files or hub ids."),
    ],
    task: EvaluationData,
    support: Support,
    resources: Resources,
    against: Annotated[
        str | None,
        typer.Option(metavar="B", show_default=False, help="B: the model that gains are relative to."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="BASE",
            show_default="as their configuration says",
            help="The base of the adapters, which are folded into it in memory: A for an adapter trained on"
            " A, B for one that was moved onto B.",
        ),
    ] = None,
    output: Result = None,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    batch: BatchOption = None,
    dtype: Dtype = "float32",
    trust_base: TrustBase = False,
    architecture: ArchitectureFile = None,
) -> None:
    """Measure models and adapters on a task, and on a support: what the base could do before."""
    from transfusion.cli import views
    from transfusion.evaluation.evaluate import evaluate as run

    found = run(
        models,
        data=task,
        support=support.beside(task),
        against=against,
        base=base,
        trust_base=trust_base,
        batch=batch,
        dtype=dtype,
        output=output,
        force=force,
        resources=resources,
        progress=Messages(quiet=quiet),
    )
    show_result(found.record, views.evaluation(found.record), [output], as_json)
