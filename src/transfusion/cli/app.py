"""The verbs. Each reads its arguments, calls the function of the same name, and shows the result.

Heavy libraries are imported inside the verbs, so that ``--help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from transfusion import __version__
from transfusion.cli.barrier import barrier
from transfusion.cli.console import Messages, command, out, print_json, results_apart
from transfusion.cli.demo import demo
from transfusion.cli.evaluate import evaluate
from transfusion.cli.option_checks import with_numbers
from transfusion.cli.options import (
    AcceptOption,
    AddressOption,
    AdviceOption,
    ArchitectureFile,
    CalibrateOption,
    Config,
    Device,
    DryRun,
    Dtype,
    EngineOption,
    EvidenceOption,
    Force,
    HeadsOption,
    InnerOption,
    Jobs,
    JoinOption,
    Json,
    MaybeOutput,
    MemoryOption,
    MethodOption,
    MlpOption,
    ModelArgument,
    OrderOption,
    Output,
    Outputs,
    ProbesOption,
    Propose,
    Quiet,
    Regularisation,
    ResidualOption,
    Restarts,
    Result,
    Samples,
    ScoreOption,
    Seed,
    Soft,
    StartOption,
    Sweeps,
    Vectors,
    Verbose,
)
from transfusion.cli.plan import plan
from transfusion.cli.report import report
from transfusion.cli.shared import (
    AlignChoices,
    as_place,
    files_of,
    open_bases,
    report_alignment,
    show,
    show_plan,
    timed,
)
from transfusion.cli.sweep import fewshot, sweep
from transfusion.cli.transport import merge, transport
from transfusion.cli.verify import VerifyRun, certify, draft, predict_activations, prove, turns

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Move a fine-tune onto a new release of its base model: no training, no data.",
    epilog="A model is a local folder or file, or a hub id (org/name or org/name@revision).",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"transfusion {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    model: ModelArgument,
    config: Config = None,
    architecture: ArchitectureFile = None,
    propose: Propose = False,
    output: MaybeOutput = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show what a model's axes are and which may move; or what a file of π moves.

    With --propose: draft a table for a model that has none.
    """
    if propose:
        draft(model, config, output, force, as_json)
        return
    if output is not None:
        raise typer.BadParameter("--output goes with --propose")
    from transfusion.cli import views
    from transfusion.reporting.description import inspect as describe

    description = describe(model, config=config)
    if as_json:
        print_json(description)
    else:
        out.print(views.model(description) if "model" in description else views.alignment(description))


@app.command()
def align(
    a: ModelArgument,
    b: ModelArgument,
    output: Output,
    method: MethodOption = None,
    residual: ResidualOption = None,
    inner: InnerOption = None,
    advice: AdviceOption = True,
    config: Config = None,
    architecture: ArchitectureFile = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    seed: Seed = 0,
    jobs: Jobs = None,
    memory: MemoryOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    heads: HeadsOption = None,
    score: ScoreOption = None,
    start: StartOption = None,
    order: OrderOption = None,
    accept: AcceptOption = None,
    restarts: Restarts = None,
    sweeps: Sweeps = None,
    outputs: Outputs = None,
    vectors: Vectors = None,
    evidence: EvidenceOption = None,
    soft: Soft = None,
    regularisation: Regularisation = None,
    join: JoinOption = None,
    calibrate: CalibrateOption = None,
    probes: ProbesOption = None,
    samples: Samples = None,
    mlp: MlpOption = None,
) -> None:
    """Find how the units of A correspond to those of B, and write it as a file of π."""
    from transfusion.checkpoint.publishing import path_beside, require_writable
    from transfusion.runtime.run_record import RunRecord

    record = RunRecord("align", command())
    messages = Messages(quiet=quiet, verbose=verbose)
    models = open_bases(a, b, config, messages)
    require_writable(output, force=force, inputs=files_of(a, b), folder=False)
    search: dict[str, Any] = {
        "heads": heads,
        "score": score,
        "starts": start or None,
        "order": order,
        "accept": accept,
    }
    search |= {"restarts": restarts, "max_sweeps": sweeps, "outputs": outputs, "vectors": vectors}
    search |= {"evidence": evidence, "soft": soft, "regularisation": regularisation, "join": join}
    search |= {"calibrate": as_place(calibrate), "probes": probes, "samples": samples, "mlp": mlp}
    choices = AlignChoices(
        method, residual, inner, dtype, device, seed, jobs, search, advice, engine, address, memory
    )
    if dry_run:
        show_plan(choices, models, output, as_json)
        return
    pi = choices.align(models, messages, path_beside(output, ".journal"))
    pi = timed(pi, record)
    pi.save(output, force=force)
    report_alignment(pi, output, record, as_json)


@app.command()
def apply(
    pi: Annotated[str, typer.Argument(show_default=False, help="A file of π.")],
    a: ModelArgument,
    output: Output,
    config: Config = None,
    architecture: ArchitectureFile = None,
    jobs: Jobs = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    memory: MemoryOption = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write π(A): the same function as A, its units in B's order."""
    from transfusion.checkpoint.publishing import require_writable
    from transfusion.model.model import Model
    from transfusion.transportation.applied_model import apply as prepare

    require_writable(output, force=force, inputs=files_of(pi, a))
    moved = prepare(pi, Model.open(a, config=config))
    with results_apart():
        moved.save(output, force=force, jobs=jobs, engine=engine, address=address, memory=memory)
    show({"written": str(output)}, as_json, f"π(A) written to {output}")


@app.command()
def verify(
    a: Annotated[str | None, typer.Argument(show_default=False, help="A folder or a hub id.")] = None,
    via: Annotated[str | None, typer.Option(show_default=False, help="A file of π.")] = None,
    architecture: ArchitectureFile = None,
    model: Annotated[
        str | None,
        typer.Option(show_default=False, help="A class to certify the table on: module:Class or Class."),
    ] = None,
    config: Config = None,
    tolerance: Annotated[float, typer.Option(min=0, help="The largest difference that passes.")] = 1e-9,
    onto: Annotated[
        str | None,
        typer.Option(show_default="as π names it", help="B: tell how much of what it computes π predicts."),
    ] = None,
    calibrate: CalibrateOption = None,
    output: Result = None,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Run A and π(A) through their own library in float64 and compare; exit 3 if they differ.

    With --onto B, or for a π that turns units, which is no symmetry: how much of what B computes is predicted
    from A, axis by axis, on inputs that π was not found on; exit 3 if it is no more than chance.

    With --architecture FILE --model CLASS: certify a table of your own on a small model of that class.
    """
    proof = VerifyRun.begun(output, files_of(a, via, architecture), force, as_json)
    if a is not None and via is not None and model is None:
        if onto is not None or turns(via):
            predict_activations(a, onto, via, config, calibrate, proof)
        elif calibrate is not None:
            raise typer.BadParameter("--calibrate goes with --onto")
        else:
            prove(a, via, config, tolerance, proof)
    elif architecture is not None and model is not None and a is None and via is None:
        certify(architecture, model, config, proof)
    else:
        raise typer.BadParameter("give either A --via PI, or --architecture FILE --model CLASS")


for verb in (plan, transport, merge, evaluate, sweep, barrier, fewshot, report, demo):
    app.command()(verb)
for registered in app.registered_commands:
    if registered.callback is not None:
        registered.callback = with_numbers(registered.callback)
