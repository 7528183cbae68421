"""The verb ``merge``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli.console import Messages, results_apart
from transfusion.cli.option_checks import given, missing, one_of
from transfusion.cli.options import (
    Anyway,
    ArchitectureFile,
    Config,
    DryRun,
    Force,
    From,
    Json,
    MaybeBase,
    MaybeOnto,
    NewTokensOption,
    OtherPartsOption,
    Output,
    Quiet,
    StoredDtype,
    TrustBase,
    Verbose,
    Via,
    VocabularyShare,
    computing,
)
from transfusion.cli.search_options import CalibrateOption, Seed, aligning
from transfusion.cli.transport import show_output, show_rerun

if TYPE_CHECKING:
    from transfusion.runtime.resources import Resources

HOWS = ("sum", "mean", "ties", "dare")


@given(aligning=aligning, resources=computing)
def merge(
    *,
    context: typer.Context,
    output: Output,
    resources: Resources,
    finetuned: Annotated[
        list[str] | None,
        typer.Argument(show_default=False, help="The fine-tunes of A: models, or PEFT adapters."),
    ] = None,
    base: MaybeBase = None,
    onto: MaybeOnto = None,
    how: Annotated[
        str, typer.Option("--how", help=f"How to combine: {', '.join(HOWS)}.", callback=one_of(HOWS))
    ] = "sum",
    weights: Annotated[
        str | None, typer.Option(show_default="all alike", help="One for each fine-tune: 0.5,1,2.")
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(show_default="0.2", help="The share of each change that ties and dare keep."),
    ] = None,
    via: Via = None,
    alpha: Annotated[
        str | None,
        typer.Option(
            "--alpha",
            show_default="1; less where a functional π would do harm",
            help="How much of the combined change to add: a number, a file with one number per layer, or"
            " auto: as much as changes B's outputs on synthetic inputs the way the fine-tunes changed A's.",
        ),
    ] = None,
    aligning: dict[str, Any],
    head: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Keep the heads of this fine-tune, counted from 1."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=1, show_default="the sum of theirs", help="Of adapters: the rank of the result."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Of adapters: write the whole model, with them in it.")
    ] = False,
    repeat: From = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
    calibrate: CalibrateOption = None,
    config: Config = None,
    architecture: ArchitectureFile = None,
    new_tokens: NewTokensOption = "refuse",
    other_parts: OtherPartsOption = "refuse",
    vocabulary_share: VocabularyShare = None,
    anyway: Anyway = False,
    trust_base: TrustBase = False,
    dtype: StoredDtype = None,
) -> None:
    """Write B + α·(several fine-tunes of A, moved by one π and combined)."""
    from transfusion.transport.transport_run import merge as run

    common: dict[str, Any] = {"base": base, "onto": onto, "via": via, "output": output, "force": force}
    common |= {"dry_run": dry_run, "resources": resources}
    common |= {"progress": Messages(quiet=quiet, verbose=verbose)}
    if repeat is not None:
        show_rerun(context, repeat, finetuned or [], common, as_json)
        return
    if not finetuned or base is None or onto is None:
        raise missing({"FINETUNED…": finetuned, "--base": base, "--onto": onto})
    if head is not None and head > len(finetuned):
        raise typer.BadParameter(f"--head {head}: there are {len(finetuned)} fine-tunes")
    with results_apart():
        moved = run(
            finetuned,
            how=how,
            weights=_numbers(weights),
            density=density,
            head=None if head is None else head - 1,
            rank=rank,
            alpha=alpha,
            calibrate=calibrate,
            dtype=dtype,
            full=full,
            new_tokens=new_tokens,
            other_parts=other_parts,
            vocabulary_share=vocabulary_share,
            anyway=anyway,
            trust_base=trust_base,
            seed=seed,
            config=config,
            architecture=architecture,
            **common,
            **aligning,
        )
    show_output(moved, output, dry_run, as_json)


def _numbers(text: str | None) -> tuple[float, ...]:
    """Return numbers with commas between them."""
    try:
        return tuple(float(word) for word in (text or "").split(",") if word.strip())
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: numbers with commas between them were expected") from error
