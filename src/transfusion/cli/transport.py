"""The verbs that write something for B: transport, and merge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli.console import Messages, command
from transfusion.cli.options import (
    AddressOption,
    AlphaOfMerge,
    AlphaOption,
    ArchitectureFile,
    Base,
    CalibrateOption,
    Config,
    Device,
    DryRun,
    EngineOption,
    Force,
    From,
    HowOption,
    InnerOption,
    Jobs,
    Json,
    KeepSupport,
    MemoryOption,
    MethodOption,
    NewTokensOption,
    Onto,
    Output,
    Quiet,
    ResidualOption,
    Seed,
    StoredDtype,
    TrustBase,
    Verbose,
    Via,
)
from transfusion.cli.output_run import OutputRun, as_numbers, as_settings, refuse_beside_from
from transfusion.cli.shared import AlignChoices, calibrated, open_bases, open_finetune

if TYPE_CHECKING:
    from transfusion.transportation.adapters.adapter_output import AdapterOutput
    from transfusion.transportation.dense_transport import DenseTransport
    from transfusion.transportation.transport_plan import TransportPlan


def transport(
    context: typer.Context,
    output: Output,
    finetuned: Annotated[
        str | None, typer.Argument(show_default=False, help="A model, or a PEFT adapter.")
    ] = None,
    base: Base = None,
    onto: Onto = None,
    via: Via = None,
    alpha: AlphaOption = "1.0",
    keep_support: KeepSupport = None,
    full: Annotated[
        bool, typer.Option("--merge", help="Of an adapter: write the whole model, with the adapter in it.")
    ] = False,
    new_tokens: NewTokensOption = "refuse",
    repeat: From = None,
    method: MethodOption = None,
    residual: ResidualOption = None,
    inner: InnerOption = None,
    calibrate: CalibrateOption = None,
    config: Config = None,
    architecture: ArchitectureFile = None,
    dtype: StoredDtype = None,
    device: Device = "cpu",
    seed: Seed = 0,
    jobs: Jobs = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    memory: MemoryOption = None,
    trust_base: TrustBase = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write B + α·π(τ): the fine-tune of A, moved onto B. An adapter stays an adapter."""
    from transfusion.runtime.resources import Resources
    from transfusion.runtime.run_record import RunRecord
    from transfusion.transportation.output_record import OutputRecord

    record = RunRecord("transport")
    messages = Messages(quiet=quiet, verbose=verbose)
    moving = OutputRun(output, messages, dry_run, as_json, force, Resources(engine, jobs, address, memory))
    if repeat is not None:
        refuse_beside_from(context)
        moving.again(repeat, [finetuned] if finetuned else [], base, onto, via)
        return
    if finetuned is None or base is None or onto is None:
        raise typer.BadParameter("give FINETUNED, --base and --onto, or --from")
    tries = alpha == "auto" or keep_support is not None
    shown = calibrated(calibrate, method, via, tries, " and for --alpha auto and --keep-support")
    choices = AlignChoices(
        method, residual, inner, None, device, seed, jobs, shown, True, engine, address, memory
    )
    if via is not None:
        choices.refuse_beside_via()
    models = open_bases(base, onto, config, messages)
    tuned = open_finetune(finetuned, base, config, messages)
    settings = as_settings(
        via=via and str(Path(via).resolve()),
        new_tokens=new_tokens,
        full=full,
        config=config,
        architecture=architecture,
        calibrate=calibrate,
        keep_support=keep_support,
    )
    output_record = OutputRecord("transport", command=command(), settings=settings, record=record)

    def prepare(plan: TransportPlan) -> DenseTransport | AdapterOutput:
        return plan.transport(
            tuned,
            alpha=alpha,
            dtype=dtype,
            full=full,
            trust_base=trust_base or dry_run,
            new_tokens=new_tokens,
            keep_support=keep_support,
            calibrate=calibrate,
            output_record=output_record,
        )

    moving.go(models, (finetuned, base, onto), via, choices, prepare)


def merge(
    context: typer.Context,
    output: Output,
    finetuned: Annotated[
        list[str] | None, typer.Argument(show_default=False, help="Models, or PEFT adapters.")
    ] = None,
    base: Base = None,
    onto: Onto = None,
    how: HowOption = "sum",
    weights: Annotated[
        str | None, typer.Option(show_default="all alike", help="One for each fine-tune: 0.5,1,2.")
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(show_default="0.2", help="The share of each change that ties and dare keep."),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Keep the heads of this fine-tune, counted from 1."),
    ] = None,
    via: Via = None,
    alpha: AlphaOfMerge = "1.0",
    full: Annotated[
        bool, typer.Option("--full", help="Of adapters: write the whole model, with them in it.")
    ] = False,
    new_tokens: NewTokensOption = "refuse",
    rank: Annotated[
        int | None,
        typer.Option(min=1, show_default="the sum of theirs", help="Of adapters: the rank of the result."),
    ] = None,
    repeat: From = None,
    method: MethodOption = None,
    residual: ResidualOption = None,
    inner: InnerOption = None,
    calibrate: CalibrateOption = None,
    config: Config = None,
    architecture: ArchitectureFile = None,
    dtype: StoredDtype = None,
    device: Device = "cpu",
    seed: Seed = 0,
    jobs: Jobs = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    memory: MemoryOption = None,
    trust_base: TrustBase = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write B + α·(several fine-tunes of A, moved by one π and combined)."""
    from transfusion.runtime.resources import Resources
    from transfusion.runtime.run_record import RunRecord
    from transfusion.transportation.merge_rules import MergeRule
    from transfusion.transportation.output_record import OutputRecord

    record = RunRecord("merge")
    messages = Messages(quiet=quiet, verbose=verbose)
    moving = OutputRun(output, messages, dry_run, as_json, force, Resources(engine, jobs, address, memory))
    if repeat is not None:
        refuse_beside_from(context)
        moving.again(repeat, finetuned or [], base, onto, via)
        return
    if not finetuned or base is None or onto is None:
        raise typer.BadParameter("give FINETUNED…, --base and --onto, or --from")
    shown = calibrated(calibrate, method, via)
    choices = AlignChoices(
        method, residual, inner, None, device, seed, jobs, shown, True, engine, address, memory
    )
    if via is not None:
        choices.refuse_beside_via()
    models = open_bases(base, onto, config, messages)
    tuned = [open_finetune(one, base, config, messages) for one in finetuned]
    settings = as_settings(
        via=via and str(Path(via).resolve()),
        head=None if head is None else head - 1,
        full=full,
        rank=rank,
        new_tokens=new_tokens,
        config=config,
        architecture=architecture,
    )
    output_record = OutputRecord("merge", command=command(), settings=settings, record=record)

    def prepare(plan: TransportPlan) -> DenseTransport | AdapterOutput:
        return plan.merge(
            tuned,
            merging=MergeRule.asked(how, as_numbers(weights), density, seed, plan.alpha(alpha)),
            head=None if head is None else head - 1,
            full=full,
            rank=rank,
            new_tokens=new_tokens,
            dtype=dtype,
            trust_base=trust_base or dry_run,
            output_record=output_record,
        )

    moving.go(models, (*finetuned, base, onto), via, choices, prepare)
