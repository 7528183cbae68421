"""The verbs that choose α by examples: sweep, and fewshot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli import data_options
from transfusion.cli.alpha_runs import AlphaRun, as_alphas, choices, publish, require_places, tell
from transfusion.cli.console import Messages, command
from transfusion.cli.data_options import BatchOption, Precision, Support
from transfusion.cli.grouped_options import given
from transfusion.cli.options import (
    ArchitectureFile,
    CalibrateOption,
    Config,
    Force,
    Json,
    NewTokensOption,
    Quiet,
    TrustBase,
    Vias,
)
from transfusion.cli.shared import AlignChoices, as_dtype

if TYPE_CHECKING:
    from transfusion.evaluation.evaluation_data import EvaluationData

_TEST = "The test"
Finetuned = Annotated[str, typer.Argument(show_default=False, help="A model, or a PEFT adapter.")]
BaseOption = Annotated[
    str, typer.Option("--base", show_default=False, help="A: the base that was fine-tuned.")
]
OntoOption = Annotated[str, typer.Option("--onto", show_default=False, help="B: the base to move it onto.")]
Naive = Annotated[bool, typer.Option("--naive/--no-naive", help="Also B + α·τ, with nothing moved.")]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        show_default=False,
        help="Where to write: a figure (.png, .svg, .pdf) or .json; may be given several times.",
    ),
]


@given(task=data_options.task, support=data_options.support, choices=choices)
def sweep(
    finetuned: Finetuned,
    base: BaseOption,
    onto: OntoOption,
    task: EvaluationData,
    support: Support,
    choices: AlignChoices,
    via: Vias = None,
    alphas: Annotated[
        str | None,
        typer.Option(
            show_default="12 values from 0.01 to 2, 1 among them",
            help="first:last:count, or values with commas between them.",
        ),
    ] = None,
    naive: Naive = True,
    output: Files = None,
    batch: BatchOption = None,
    calibrate: CalibrateOption = None,
    new_tokens: NewTokensOption = "refuse",
    config: Config = None,
    architecture: ArchitectureFile = None,
    dtype: Precision = "float32",
    trust_base: TrustBase = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Measure B + α·π(τ) and B + α·τ for many α, without writing any model, and draw the gains over B."""
    import torch

    from transfusion.cli.barrier import require_suffix
    from transfusion.cli.gain_tables import of_sweep
    from transfusion.evaluation.alpha_sweep import ALPHAS
    from transfusion.evaluation.alpha_sweep import sweep as measure
    from transfusion.runtime.run_record import RunRecord

    record, messages = RunRecord("sweep", command()), Messages(quiet=quiet, verbose=False)
    values = as_alphas(alphas, ALPHAS)
    for file in output or ():
        require_suffix(file)
    require_places(
        output or [],
        (finetuned, base, onto, *data_options.sources(task, support), *(via or ())),
        force=force,
    )
    job = AlphaRun((finetuned, base, onto), config=config, jobs=choices.jobs, messages=messages)
    ways = job.alignments(via or [], choices, calibrate)
    with messages.points(len(values) * (len(ways) + naive)) as step:
        found = measure(
            job.tuned,
            base=job.bases[0],
            onto=job.bases[1],
            data=task,
            support=support.beside(task),
            via=ways,
            alphas=values,
            naive=naive,
            batch=batch,
            dtype=as_dtype(dtype) or torch.float32,
            device=choices.device,
            trust_base=trust_base,
            new_tokens=new_tokens,
            on_point=lambda name, point: step(f"{name} · α = {point.alpha:.3g} · {point.task_gain:+.3g}"),
        )
    for note in found.notes:
        messages.note(f"note: {note}")
    result = record.of(found.metadata())
    for file in output or ():
        publish(file, result, "draw_sweep", force=force)
    tell(result, of_sweep(result), output or [], as_json)


@given(task=data_options.task, choices=choices)
def fewshot(
    finetuned: Finetuned,
    base: BaseOption,
    onto: OntoOption,
    task: EvaluationData,
    choices: AlignChoices,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", show_default=False, help="The α file of π(τ), for 'transport --alpha'."
        ),
    ],
    test: Annotated[
        str | None,
        typer.Option(
            show_default="what was not drawn",
            help="Examples to measure on; what was drawn for training is left out.",
            rich_help_panel=_TEST,
        ),
    ] = None,
    via: Annotated[
        str | None, typer.Option(show_default=False, help="A file of π; without it, align first.")
    ] = None,
    shots: Annotated[int, typer.Option(min=1, help="Examples of every class; of texts, all texts.")] = 10,
    epochs: Annotated[int, typer.Option(min=1, help="How often all of them are looked at.")] = 40,
    rate: Annotated[float, typer.Option(help="How far Adam moves the coefficients at a time.")] = 0.05,
    start: Annotated[float, typer.Option(min=0, help="Where the coefficients begin.")] = 1.0,
    naive: Naive = True,
    naive_output: Annotated[
        Path | None, typer.Option(show_default=False, help="The α file of τ as it is.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            show_default=False,
            help="Everything that was measured, as .json, or drawn (.png, .svg, .pdf); may be given several"
            " times.",
        ),
    ] = None,
    test_split: Annotated[
        str | None,
        typer.Option(show_default="as --split", help="As --split, of the test.", rich_help_panel=_TEST),
    ] = None,
    batch: BatchOption = None,
    calibrate: CalibrateOption = None,
    new_tokens: NewTokensOption = "refuse",
    config: Config = None,
    architecture: ArchitectureFile = None,
    dtype: Precision = "float32",
    trust_base: TrustBase = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Learn one α for every layer from a few examples of every class, for 'transport --alpha'."""
    import torch

    from transfusion.cli.barrier import require_suffix
    from transfusion.cli.gain_tables import of_fewshot
    from transfusion.evaluation.fewshot_alpha import fewshot as learn
    from transfusion.runtime.run_record import RunRecord

    record, messages = RunRecord("fewshot", command()), Messages(quiet=quiet, verbose=False)
    if naive_output is not None and not naive:
        raise typer.BadParameter("--naive-output needs what --no-naive leaves out")
    for file in results or ():
        require_suffix(file)
    places = [output, *([naive_output] if naive_output else []), *(results or [])]
    require_places(places, (finetuned, base, onto, *data_options.sources(task), test, via), force=force)
    measured = replace(task, reference=test or task.reference, split=test_split or task.split)
    job = AlphaRun((finetuned, base, onto), config=config, jobs=choices.jobs, messages=messages)
    ways = job.alignments([via] if via else [], choices, calibrate)
    with messages.points((epochs + 1) * (1 + naive)) as step:
        found = learn(
            job.tuned,
            base=job.bases[0],
            onto=job.bases[1],
            data=task,
            test=measured,
            via=ways[0],
            shots=shots,
            epochs=epochs,
            rate=rate,
            start=start,
            naive=naive,
            seed=choices.seed,
            batch=batch,
            dtype=as_dtype(dtype) or torch.float32,
            device=choices.device,
            trust_base=trust_base,
            new_tokens=new_tokens,
            on_epoch=lambda name, epoch, loss: step(f"{name} · epoch {epoch} · loss {loss:.4g}"),
        )
    for note in found.notes:
        messages.note(f"note: {note}")
    result = record.of(found.metadata())
    learned = {output: found.moved}
    if naive_output is not None and found.naive is not None:
        learned[naive_output] = found.naive
    for place, curve in learned.items():
        publish(place, curve.learned.coefficients, force=force)
    for file in results or ():
        publish(file, result, "draw_fewshot", force=force)
    tell(result, of_fewshot(result), places, as_json)
