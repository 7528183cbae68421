"""The verb ``fewshot``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli import data_options
from transfusion.cli.console import Messages, show_result
from transfusion.cli.data_options import BatchOption, Naive
from transfusion.cli.option_checks import given
from transfusion.cli.options import (
    AdapterBase,
    ArchitectureFile,
    Config,
    Dtype,
    Finetuned,
    Force,
    Json,
    NewTokensOption,
    OntoOption,
    Quiet,
    TrustBase,
    Via,
    VocabularyShare,
    measuring,
)
from transfusion.cli.search_options import CalibrateOption, Seed, aligning

if TYPE_CHECKING:
    from transfusion.evaluation.task import EvaluationData
    from transfusion.runtime.resources import Resources

_TEST = "Test"
_LEARNING = "Learning"


@given(task=data_options.task, aligning=aligning, resources=measuring)
def fewshot(
    *,
    finetuned: Finetuned,
    onto: OntoOption,
    task: EvaluationData,
    resources: Resources,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", show_default=False, help="The file of α for π(τ), for 'transport --alpha'."
        ),
    ],
    base: AdapterBase = None,
    via: Via = None,
    aligning: dict[str, Any],
    shots: Annotated[
        int, typer.Option(min=1, help="The number of examples of every class; of texts, of all texts.")
    ] = 10,
    naive: Naive = True,
    naive_output: Annotated[
        Path | None, typer.Option(show_default=False, help="The file of α for τ as it is.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            show_default=False,
            help="A file for all that was measured: a figure (.png, .svg, .pdf) or .json; may be given"
            " several times.",
        ),
    ] = None,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    test: Annotated[
        str | None,
        typer.Option(
            show_default="the examples that were not drawn",
            help="Examples to measure on; those that were drawn for training are left out.",
            rich_help_panel=_TEST,
        ),
    ] = None,
    test_split: Annotated[
        str | None,
        typer.Option(show_default="as --split", help="As --split, of the test.", rich_help_panel=_TEST),
    ] = None,
    epochs: Annotated[
        int, typer.Option(min=1, help="The number of passes over the examples.", rich_help_panel=_LEARNING)
    ] = 40,
    rate: Annotated[float, typer.Option(help="The step size of Adam.", rich_help_panel=_LEARNING)] = 0.05,
    start: Annotated[
        float,
        typer.Option(min=0, help="The first value of every coefficient.", rich_help_panel=_LEARNING),
    ] = 1.0,
    seed: Seed = 0,
    calibrate: CalibrateOption = None,
    batch: BatchOption = None,
    new_tokens: NewTokensOption = "refuse",
    vocabulary_share: VocabularyShare = None,
    config: Config = None,
    architecture: ArchitectureFile = None,
    dtype: Dtype = "float32",
    trust_base: TrustBase = False,
) -> None:
    """Learn one α for every layer from a few examples of every class, for 'transport --alpha'."""
    from transfusion.cli import views
    from transfusion.evaluation.fewshot import fewshot as run

    found = run(
        finetuned,
        base=base,
        onto=onto,
        data=task,
        test=replace(task, reference=test or task.reference, split=test_split or task.split),
        via=via,
        shots=shots,
        epochs=epochs,
        rate=rate,
        start=start,
        naive=naive,
        seed=seed,
        batch=batch,
        dtype=dtype,
        trust_base=trust_base,
        new_tokens=new_tokens,
        vocabulary_share=vocabulary_share,
        calibrate=calibrate,
        config=config,
        output=output,
        naive_output=naive_output,
        results=results,
        force=force,
        resources=resources,
        progress=Messages(quiet=quiet),
        **aligning,
    )
    files = [output, *([naive_output] if naive_output else []), *(results or [])]
    result = {"written": [str(file) for file in files], **found.record}
    show_result(result, views.fewshot(result), files, as_json)
