"""The options of a search, and the method that they choose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from transfusion.architecture.architecture import HeadPolicy, InnerPolicy, Residual
from transfusion.cli.option_checks import one_of, within
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
GradientsOption = Annotated[
    float | None,
    typer.Option(
        "--gradients",
        min=0,
        show_default="0",
        help="How much gradients count beside activations, for tensors that write an axis; 1, for example."
        " For models with logits of the same classes or vocabulary.",
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
    gradients: GradientsOption = None,
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
        gradients=gradients,
    )
