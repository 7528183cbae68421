"""The arguments and flags that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    MlpSolver,
    SearchStart,
    StreamJoin,
)

SHORTCUTS = ("interpolated", "plain", "rounded")
DTYPES = ("float64", "float32", "float16", "bfloat16")
PRECISE = DTYPES[:2]
NEW_TOKENS = ("refuse", "keep", "drop")
HOWS = ("sum", "mean", "ties", "dare")
ENGINES = ("local", "ray")

ModelArgument = Annotated[str, typer.Argument(show_default=False, help="A folder, a file or a hub id.")]
Output = Annotated[Path, typer.Option("--output", "-o", show_default=False, help="Where to write.")]
MaybeOutput = Annotated[
    Path | None,
    typer.Option("--output", "-o", show_default=False, help="With --propose: where to write the draft."),
]
Propose = Annotated[
    bool,
    typer.Option(
        "--propose", help="Draft a table for the model's class by trials, and certify it; or exit 3."
    ),
]
Vias = Annotated[
    list[str] | None,
    typer.Option("--via", show_default=False, help="A file of π; may be given several times to compare."),
]
Figure = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", show_default=False, help="Where to write: a figure (.png, .svg, .pdf) or .json."
    ),
]
Result = Annotated[
    Path | None,
    typer.Option("--output", "-o", show_default=False, help="Also write the result, as JSON, to this file."),
]
Treatment = Annotated[
    str | None,
    typer.Option(
        "--shortcuts",
        help=f"What turned residual connections carry on the way: {', '.join(SHORTCUTS)}.",
        callback=one_of(SHORTCUTS),
        show_default="interpolated, or as π asks",
    ),
]
Base = Annotated[str | None, typer.Option(show_default=False, help="A: the base that was fine-tuned.")]
Onto = Annotated[str | None, typer.Option(show_default=False, help="B: the base to move it onto.")]
AlphaOption = Annotated[
    str,
    typer.Option(
        "--alpha",
        help="How much of the change to add: a number, a file with one for each layer, or auto: as much as"
        " changes B's outputs on made-up inputs as the fine-tune changed A's.",
    ),
]
AlphaOfMerge = Annotated[
    str,
    typer.Option(
        "--alpha",
        help="How much of the change to add: a number, a file with one for each layer, or auto, which keeps"
        " its size relative to the weights.",
    ),
]
NewTokensOption = Annotated[
    str,
    typer.Option(
        "--new-tokens",
        help=f"Tokens that the fine-tune added: {', '.join(NEW_TOKENS)}.",
        callback=one_of(NEW_TOKENS),
    ),
]
HowOption = Annotated[
    str, typer.Option("--how", help=f"How to combine: {', '.join(HOWS)}.", callback=one_of(HOWS))
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from", show_default=False, help="Repeat the run that this transfusion.json tells of, bit for bit."
    ),
]
TrustBase = Annotated[
    bool, typer.Option("--trust-base", help="Do not check that the fine-tune descends from A.")
]
Via = Annotated[str | None, typer.Option(show_default=False, help="A file of π; without it, align first.")]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help=f"One of {', '.join(METHODS)}.",
        callback=one_of(METHODS),
        show_default=DEFAULT,
    ),
]
ResidualOption = Annotated[
    Residual | None,
    typer.Option(
        help="The residual stream: every point its own map (the paper), one map, or none.",
        show_default="the method's",
    ),
]
InnerOption = Annotated[
    InnerPolicy | None,
    typer.Option(
        help="Inside heads: q·k and v·o each their own map, or one for both (the paper).",
        show_default="the method's",
    ),
]
_SEARCH = "The search, otherwise than the method says"
HeadsOption = Annotated[
    HeadPolicy | None,
    typer.Option(
        help="Heads: matched, in their natural order, or ignored.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
ScoreOption = Annotated[
    HeadScore | None,
    typer.Option(
        help="Heads by their singular values (the paper), or by the best that their units can do.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
StartOption = Annotated[
    list[SearchStart] | None,
    typer.Option(
        help="First sweep: count axes not visited yet as they are (the paper), leave them out, or leave them"
        " out and take heads by their singular values. Give several to race them.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
OrderOption = Annotated[
    BlockOrder | None,
    typer.Option(help="The order of a sweep.", show_default=False, rich_help_panel=_SEARCH),
]
AcceptOption = Annotated[
    Acceptance | None,
    typer.Option(
        help="Take every proposal (the paper), or only what raises the objective.",
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
Sweeps = Annotated[
    int | None, typer.Option(min=1, help="At most so many.", show_default=False, rich_help_panel=_SEARCH)
]
Outputs = Annotated[
    bool | None,
    typer.Option(
        "--outputs/--no-outputs",
        help="Whether output projections take part in matching heads.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
Vectors = Annotated[
    bool | None,
    typer.Option(
        "--vectors/--no-vectors",
        help="Whether biases and norm weights take part in the gain.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
_PLANS = "Optimal transport (--method ot)"
EvidenceOption = Annotated[
    EvidenceKind | None,
    typer.Option(
        help="Tell units apart by the weights that produce them, or by what they compute.",
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
        help="How two plans are joined where a branch returns to the stream.",
        show_default=False,
        rich_help_panel=_PLANS,
    ),
]
_COMPUTED = "What models compute (--method functional, auto)"
CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        show_default="made-up inputs",
        help="Inputs of your own for both models, without labels: a folder of images, a text file, or a file"
        " of tensors.",
        rich_help_panel=_COMPUTED,
    ),
]
ProbesOption = Annotated[
    int | None,
    typer.Option(
        "--probes",
        min=8,
        show_default="320",
        callback=within(1, 2**20),
        help="How many inputs both models are given.",
        rich_help_panel=_COMPUTED,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        min=80,
        show_default="5120",
        callback=within(1, 2**24),
        help="How many activations of every module are compared.",
        rich_help_panel=_COMPUTED,
    ),
]
MlpOption = Annotated[
    MlpSolver | None,
    typer.Option(
        help="The neurons of MLPs: turned, assigned one to one, or auto: turned unless they are gated.",
        show_default="auto",
        rich_help_panel=_COMPUTED,
    ),
]
KeepSupport = Annotated[
    float | None,
    typer.Option(
        "--keep-support",
        show_default="no bound",
        help="Protect what B could do before: take less of the change, so that B's outputs on made-up inputs"
        " move by no more than this share of their own spread.",
    ),
]
AdviceOption = Annotated[
    bool, typer.Option("--advice/--no-advice", help="Whether to compare with a null, and to advise.")
]
Config = Annotated[
    Path | None,
    typer.Option(show_default=False, help="A config.json for weights that come without one."),
]
ArchitectureFile = Annotated[
    Path | None,
    typer.Option(
        "--architecture",
        show_default=False,
        help="A Python file with a table of your own.",
        callback=use_tables,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Compute in this type: {', '.join(PRECISE)}.",
        callback=one_of(PRECISE),
        show_default="float32",
    ),
]
StoredDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Store in this type: {', '.join(DTYPES)}.",
        callback=one_of(DTYPES),
        show_default="B's",
    ),
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")]
Seed = Annotated[int, typer.Option(min=0, help="For everything that is drawn at random.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Threads.", show_default="all cores", callback=within(1, 4096))
]
_WHERE = "Where to work, and with how much"
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="Threads of this process, or workers of a Ray cluster; the result is the same.",
        callback=one_of(ENGINES),
        rich_help_panel=_WHERE,
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Of a Ray cluster that is running.",
        show_default="one is started here",
        rich_help_panel=_WHERE,
    ),
]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=as_size,
        help="Get by with so much, such as 2GB or 512MiB; of Ray, each worker.",
        show_default="as much as all threads need",
        rich_help_panel=_WHERE,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only errors and results.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")]
