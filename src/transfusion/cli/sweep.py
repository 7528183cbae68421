"""The verb ``sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli import data_options
from transfusion.cli.console import Messages, show_result
from transfusion.cli.data_options import BatchOption, Naive, Support
from transfusion.cli.option_checks import given
from transfusion.cli.options import (
    AdapterBase,
    ArchitectureFile,
    Config,
    Dtype,
    Figures,
    Finetuned,
    Force,
    Json,
    NewTokensOption,
    OntoOption,
    Quiet,
    TrustBase,
    Vias,
    VocabularyShare,
    measuring,
)
from transfusion.cli.search_options import CalibrateOption, Seed, aligning

if TYPE_CHECKING:
    from transfusion.evaluation.task import EvaluationData
    from transfusion.runtime.resources import Resources

MOST = 1000
"""The largest count in first:last:count."""


@given(task=data_options.task, support=data_options.support, aligning=aligning, resources=measuring)
def sweep(
    *,
    finetuned: Finetuned,
    onto: OntoOption,
    task: EvaluationData,
    support: Support,
    resources: Resources,
    base: AdapterBase = None,
    via: Vias = None,
    alphas: Annotated[
        str | None,
        typer.Option(
            show_default="12 values from 0.01 to 2, 1 among them",
            help="The values of α: first:last:count, or numbers with commas between them.",
        ),
    ] = None,
    aligning: dict[str, Any],
    naive: Naive = True,
    output: Figures = None,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
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
    """Measure B + α·π(τ) and B + α·τ for many α, without writing any model, and draw the gains over B."""
    from transfusion.cli import views
    from transfusion.evaluation.sweep import ALPHAS
    from transfusion.evaluation.sweep import sweep as run

    found = run(
        finetuned,
        base=base,
        onto=onto,
        data=task,
        support=support.beside(task),
        via=via,
        alphas=as_alphas(alphas, ALPHAS),
        naive=naive,
        batch=batch,
        dtype=dtype,
        trust_base=trust_base,
        new_tokens=new_tokens,
        vocabulary_share=vocabulary_share,
        calibrate=calibrate,
        seed=seed,
        config=config,
        output=output,
        force=force,
        resources=resources,
        progress=Messages(quiet=quiet),
        **aligning,
    )
    result = {"written": [str(file) for file in output or ()], **found.record}
    show_result(result, views.sweep(result), output or [], as_json)


def as_alphas(text: str | None, usual: Sequence[float]) -> list[float]:
    """Return first:last:count in equal steps, or numbers with commas between them."""
    if text is None:
        return list(usual)
    try:
        if ":" not in text:
            return [float(word) for word in text.split(",") if word.strip()]
        first, last, count = text.split(":")
        low, high, steps = float(first), float(last), int(count)
        if not 2 <= steps <= MOST:
            raise ValueError
        return [round(low + (high - low) * step / (steps - 1), 6) for step in range(steps)]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r}: first:last:count with a count from 2 to {MOST}, or values with commas, were expected"
        ) from error
