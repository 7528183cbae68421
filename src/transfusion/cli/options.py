"""The arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.architecture.architecture import HeadPolicy, InnerPolicy, Residual
from transfusion.cli.option_checks import as_size, one_of, use_tables, within
from transfusion.matching.methods import (
    DEFAULT,
    METHODS,
    Acceptance,
    BlockOrder,
    EvidenceKind,
    HeadScore,
    Method,
    MlpSolver,
    SearchStart,
    StreamJoin,
    preset,
)

if TYPE_CHECKING:
    from transfusion.runtime.resources import Resources

DTYPES = ("float64", "float32", "float16", "bfloat16")
PRECISE = DTYPES[:2]
NEW_TOKENS = ("refuse", "keep", "drop")
ENGINES = ("local", "ray")

# ── models ───────────────────────────────────────────────────────────────────────────────────

BaseArgument = Annotated[
    str,
    typer.Argument(
        metavar="A", show_default=False, help="A: the base that was fine-tuned; a folder, a file or a hub id."
    ),
]
NewBaseArgument = Annotated[
    str,
    typer.Argument(
        metavar="B", show_default=False, help="B: the new release of the base; a folder, a file or a hub id."
    ),
]
Finetuned = Annotated[
    str,
    typer.Argument(
        metavar="FINETUNED", show_default=False, help="The fine-tune of A: a model, or a PEFT adapter."
    ),
]
MaybeBase = Annotated[
    str | None,
    typer.Option("--base", metavar="A", show_default=False, help="A: the base that was fine-tuned."),
]
MaybeOnto = Annotated[
    str | None,
    typer.Option("--onto", metavar="B", show_default=False, help="B: the new release to move it onto."),
]
BaseOption = Annotated[
    str, typer.Option("--base", metavar="A", show_default=False, help="A: the base that was fine-tuned.")
]
AdapterBase = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="A",
        show_default="of an adapter, as its configuration says",
        help="A: the base that was fine-tuned.",
    ),
]
OntoOption = Annotated[
    str, typer.Option("--onto", metavar="B", show_default=False, help="B: the new release to move it onto.")
]
Via = Annotated[
    str | None, typer.Option(metavar="PI", show_default=False, help="The file of π; without it, align first.")
]
Vias = Annotated[
    list[str] | None,
    typer.Option(
        "--via", metavar="PI", show_default=False, help="A file of π; give several to compare them."
    ),
]
_MODELS = "Models"
Config = Annotated[
    Path | None,
    typer.Option(
        show_default=False, help="The config.json of weights that come without one.", rich_help_panel=_MODELS
    ),
]
ArchitectureFile = Annotated[
    Path | None,
    typer.Option(
        "--architecture",
        show_default=False,
        help="A Python file with a table of your own.",
        callback=use_tables,
        rich_help_panel=_MODELS,
    ),
]
TrustBase = Annotated[
    bool,
    typer.Option(
        "--trust-base",
        help="Do not check that the fine-tune descends from A.",
        rich_help_panel=_MODELS,
    ),
]
NewTokensOption = Annotated[
    str,
    typer.Option(
        "--new-tokens",
        help=f"Tokens that the fine-tune added: {', '.join(NEW_TOKENS)}.",
        callback=one_of(NEW_TOKENS),
        rich_help_panel=_MODELS,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help=f"The type to compute in: {', '.join(PRECISE)}.",
        callback=one_of(PRECISE),
        rich_help_panel=_MODELS,
    ),
]
StoredDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"The type to store: {', '.join(DTYPES)}.",
        callback=one_of(DTYPES),
        show_default="B's",
        rich_help_panel=_MODELS,
    ),
]

# ── output ───────────────────────────────────────────────────────────────────────────────────

Output = Annotated[
    Path, typer.Option("--output", "-o", show_default=False, help="The file or folder to write.")
]
Result = Annotated[
    Path | None,
    typer.Option("--output", "-o", show_default=False, help="A .json file to write the result to."),
]
Figures = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        show_default=False,
        help="A file to write: a figure (.png, .svg, .pdf) or .json; may be given several times.",
    ),
]
From = Annotated[
    Path | None,
    typer.Option("--from", show_default=False, help="Repeat the run of this transfusion.json, bit for bit."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors and results.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print details.")]

# ── alignment ────────────────────────────────────────────────────────────────────────────────

_SEARCH = "Search (research)"
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="How to align. guarded, the default, is for bases with a common ancestor; auto for bases that"
        f" were trained apart. All: {', '.join(METHODS)}.",
        callback=one_of(METHODS),
        show_default=DEFAULT,
    ),
]
ResidualOption = Annotated[
    Residual | None,
    typer.Option(
        help="Maps of the residual stream: one for every point (the paper), one for all, or none.",
        show_default="the method's",
    ),
]
InnerOption = Annotated[
    InnerPolicy | None,
    typer.Option(
        help="Maps inside heads: one for q·k and one for v·o, or one for both (the paper).",
        show_default="the method's",
        rich_help_panel=_SEARCH,
    ),
]
AdviceOption = Annotated[
    bool,
    typer.Option(
        "--advice/--no-advice",
        help="Compare the result with a null, and say whether to move a task vector by it.",
        rich_help_panel=_SEARCH,
    ),
]
Seed = Annotated[
    int,
    typer.Option(min=0, help="The seed of everything that is drawn at random.", rich_help_panel=_SEARCH),
]
HeadsOption = Annotated[
    HeadPolicy | None,
    typer.Option(
        help="Attention heads: matched, in their natural order, or ignored.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
ScoreOption = Annotated[
    HeadScore | None,
    typer.Option(
        help="Compare heads by their singular values (the paper), or by the best match of their units.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
StartOption = Annotated[
    list[SearchStart] | None,
    typer.Option(
        help="First sweep: count axes that were not visited yet as they are (the paper), leave them out, or"
        " leave them out and match heads by their singular values. Give several to keep the best.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
OrderOption = Annotated[
    BlockOrder | None,
    typer.Option(help="The order of the blocks in a sweep.", show_default=False, rich_help_panel=_SEARCH),
]
AcceptOption = Annotated[
    Acceptance | None,
    typer.Option(
        help="Accept every proposal (the paper), or only those that raise the objective.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
Restarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Search again in random orders, and keep the best.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
MaxSweeps = Annotated[
    int | None,
    typer.Option(
        "--max-sweeps",
        min=1,
        help="The largest number of sweeps.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
Outputs = Annotated[
    bool | None,
    typer.Option(
        "--outputs/--no-outputs",
        help="Whether output projections count when heads are matched.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
Vectors = Annotated[
    bool | None,
    typer.Option(
        "--vectors/--no-vectors",
        help="Whether biases and norm weights count in the gain.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
_PLANS = "Optimal transport (--method ot)"
EvidenceOption = Annotated[
    EvidenceKind | None,
    typer.Option(
        help="Compare units by their weights, or by their activations.",
        show_default=False,
        rich_help_panel=_PLANS,
    ),
]
Soft = Annotated[
    bool | None,
    typer.Option(
        "--soft/--hard",
        help="Plans that mix units (Sinkhorn), or permutations (EMD).",
        show_default=False,
        rich_help_panel=_PLANS,
    ),
]
Regularisation = Annotated[
    float | None,
    typer.Option(help="How much soft plans mix.", show_default=False, rich_help_panel=_PLANS),
]
JoinOption = Annotated[
    StreamJoin | None,
    typer.Option(
        help="How two plans are joined where a branch returns to the residual stream.",
        show_default=False,
        rich_help_panel=_PLANS,
    ),
]
_ACTIVATIONS = "Activations (--method functional, auto)"
CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        show_default="synthetic inputs",
        help="Inputs of your own for both models, without labels: a folder of images, a text file, or a file"
        " of tensors.",
        rich_help_panel=_ACTIVATIONS,
    ),
]
ProbesOption = Annotated[
    int | None,
    typer.Option(
        "--probes",
        min=8,
        show_default="320",
        callback=within(1, 2**20),
        help="The number of inputs of both models.",
        rich_help_panel=_ACTIVATIONS,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        min=80,
        show_default="5120",
        callback=within(1, 2**24),
        help="The number of activations of every module that are compared.",
        rich_help_panel=_ACTIVATIONS,
    ),
]
MlpOption = Annotated[
    MlpSolver | None,
    typer.Option(
        help="Neurons of MLPs: rotated, assigned one to one, or auto: rotated unless they are gated.",
        show_default="auto",
        rich_help_panel=_ACTIVATIONS,
    ),
]


def aligning(
    method: MethodOption = None, residual: ResidualOption = None, inner: InnerOption = None
) -> dict[str, Any]:
    """Return the parameters of `align` that the user gave."""
    given = {"method": method, "residual": residual, "inner": inner}
    return {name: value for name, value in given.items() if value is not None}


def chosen_method(
    method: MethodOption = None,
    heads: HeadsOption = None,
    score: ScoreOption = None,
    start: StartOption = None,
    order: OrderOption = None,
    accept: AcceptOption = None,
    restarts: Restarts = None,
    max_sweeps: MaxSweeps = None,
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
) -> Method:
    """Return the preset with the user's changes."""
    return preset(method or DEFAULT).changed(
        heads=heads,
        score=score,
        starts=start or None,
        order=order,
        accept=accept,
        restarts=restarts,
        max_sweeps=max_sweeps,
        outputs=outputs,
        vectors=vectors,
        evidence=evidence,
        soft=soft,
        regularisation=regularisation,
        join=join,
        calibrate=None if calibrate is None else str(calibrate.resolve()),
        probes=probes,
        samples=samples,
        mlp=mlp,
    )


# ── resources ────────────────────────────────────────────────────────────────────────────────

_RESOURCES = "Resources"
Device = Annotated[
    str,
    typer.Option(help="The device to compute on: cpu, cuda, cuda:1, mps.", rich_help_panel=_RESOURCES),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The number of threads, or of Ray workers.",
        show_default="all cores",
        callback=within(1, 4096),
        rich_help_panel=_RESOURCES,
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="Threads of this process, or workers of a Ray cluster; the result is the same.",
        callback=one_of(ENGINES),
        rich_help_panel=_RESOURCES,
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The address of a running Ray cluster.",
        show_default="one is started here",
        rich_help_panel=_RESOURCES,
    ),
]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=as_size,
        help="Memory limit per process (per worker with Ray), for example 2GB or 512MiB.",
        show_default="as much as all threads need",
        rich_help_panel=_RESOURCES,
    ),
]


def writing(
    jobs: Jobs = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    memory: MemoryOption = None,
) -> Resources:
    """Return the resources of a verb that only writes weights."""
    from transfusion.runtime.resources import Resources

    return Resources(engine, jobs, address, memory)


def computing(
    device: Device = "cpu",
    jobs: Jobs = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    memory: MemoryOption = None,
) -> Resources:
    """Return the resources of a verb that aligns."""
    from transfusion.runtime.resources import Resources

    return Resources(engine, jobs, address, memory, device)


def measuring(device: Device = "cpu", jobs: Jobs = None) -> Resources:
    """Return the resources of a verb that runs models."""
    from transfusion.runtime.resources import Resources

    return Resources(jobs=jobs, device=device)
