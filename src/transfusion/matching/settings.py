"""The settings of `align`, and those that it shares with verbs that align first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion.architecture.architecture import HeadPolicy, InnerPolicy, Residual
from transfusion.errors import SettingError
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
from transfusion.runtime.progress import BARS, SILENT, Progress
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.settings import MODELS, A, B, argument, setting

if TYPE_CHECKING:
    import torch

    from transfusion.model.model import Model, Reference
    from transfusion.model.pair import ConfigArgument

SEARCH = "Search (research)"
FUSION = "Optimal transport (--method ot)"
ACTIVATIONS = "Activations (--method functional)"
PRECISE = ("float64", "float32")


@dataclass(frozen=True, kw_only=True)
class MatchingSettings:
    """How A and B are aligned."""

    method: str | Method | None = setting(
        None,
        "How to align: the name of a preset, or a changed preset. auto, the default, decides; all are listed"
        " below the options.",
        choices=METHODS,
        metavar="NAME",
        shown=DEFAULT,
    )
    residual: Residual | str | None = setting(
        None,
        "Maps of the residual stream: one for every point (untied, the paper), one for all, or none.",
        choices=tuple(Residual),
        shown="the method's",
    )
    inner: InnerPolicy | str | None = setting(
        None,
        "Maps inside heads: one for q·k and one for v·o, or one for both (the paper).",
        choices=tuple(InnerPolicy),
        shown="the method's",
        panel=SEARCH,
    )
    calibrate: str | Path | None = setting(
        None,
        "Inputs of your own for both models, without labels: a folder of images, a text file, or a file of"
        " tensors.",
        kind=Path,
        shown="synthetic inputs",
        panel=ACTIVATIONS,
    )
    seed: int = setting(0, "The seed of everything that is drawn at random.", kind=int, least=0, panel=SEARCH)
    vocabulary_share: float | None = setting(
        None,
        "The least share of tokens that A and B must have in common, if their vocabularies differ.",
        kind=float,
        least=0.0,
        most=1.0,
        shown="0.5",
        panel=MODELS,
    )
    force_unrelated: bool = setting(
        False,
        "Insist where A and B have so little in common that the result would be of no use.",
        kind=bool,
        panel=MODELS,
    )
    config: ConfigArgument = setting(
        None, "The config.json of weights that come without one.", kind=Path, panel=MODELS
    )
    architecture: str | Path | None = setting(
        None, "A file with a table of your own.", kind=Path, panel=MODELS
    )
    resources: Resources = setting(
        LOCAL, "Engine, threads, memory and device.", kind=Resources, recorded=False
    )
    progress: Progress = setting(SILENT, "Follows the run.", shown=BARS, typed=False, recorded=False)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise SettingError(f"seed = {self.seed}: a seed cannot be negative", hint="give 0 or more")

    @property
    def chosen(self) -> Method:
        """The method, with the changes that were asked for."""
        method = self.method if isinstance(self.method, Method) else preset(self.method or DEFAULT)
        return method.changed(residual=self.residual, inner=self.inner)

    @property
    def aligning(self) -> dict[str, Any]:
        """The alignment options that were given."""
        given = {"method": self.method, "residual": self.residual, "inner": self.inner}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class AlignSettings(MatchingSettings):
    """The settings of `align`. Those of the search replace the method's own choices."""

    a: Model | Reference = argument(A, metavar="A")
    b: Model | Reference = argument(B, metavar="B")
    _: KW_ONLY
    output: str | Path | None = setting(
        None, "The file of π to write.", kind=Path, flag="--output,-o", recorded=False
    )
    force: bool = setting(False, "Replace an existing output.", kind=bool, recorded=False)
    dtype: torch.dtype | str = setting(
        "float32", f"The type to compute in: {', '.join(PRECISE)}.", choices=PRECISE, panel=MODELS, shown=True
    )
    advice: bool = setting(
        True,
        "Compare the result with a null, and decide by it. Without, a permutation is taken, whatever it is"
        " worth.",
        kind=bool,
        flag="--advice/--no-advice",
        panel=SEARCH,
    )
    heads: HeadPolicy | str | None = setting(
        None,
        "Attention heads: matched, in their natural order, or ignored.",
        choices=tuple(HeadPolicy),
        panel=SEARCH,
    )
    score: HeadScore | str | None = setting(
        None,
        "Compare heads by their singular values (the paper), or by the best match of their units.",
        choices=tuple(HeadScore),
        panel=SEARCH,
    )
    start: tuple[SearchStart | str, ...] | None = setting(
        None,
        "First sweep: count axes that were not visited yet as they are (identity, the paper), leave them out,"
        " or leave them out and match heads by their singular values. Give several to keep the best.",
        choices=tuple(SearchStart),
        many=True,
        panel=SEARCH,
    )
    order: BlockOrder | str | None = setting(
        None, "The order of the blocks in a sweep.", choices=tuple(BlockOrder), metavar="NAME", panel=SEARCH
    )
    accept: Acceptance | str | None = setting(
        None,
        "Accept every proposal (the paper), or only those that raise the objective.",
        choices=tuple(Acceptance),
        panel=SEARCH,
    )
    restarts: int | None = setting(
        None, "Search again in random orders, and keep the best.", kind=int, least=0, panel=SEARCH
    )
    max_sweeps: int | None = setting(None, "The largest number of sweeps.", kind=int, least=1, panel=SEARCH)
    outputs: bool | None = setting(
        None,
        "Whether output projections count when heads are matched.",
        kind=bool,
        flag="--outputs/--no-outputs",
        panel=SEARCH,
    )
    vectors: bool | None = setting(
        None,
        "Whether biases and norm weights count in the gain.",
        kind=bool,
        flag="--vectors/--no-vectors",
        panel=SEARCH,
    )
    evidence: EvidenceKind | str | None = setting(
        None,
        "Compare units by their weights, or by their activations.",
        choices=tuple(EvidenceKind),
        panel=FUSION,
    )
    soft: bool | None = setting(
        None,
        "Plans that mix units (Sinkhorn), or permutations (EMD).",
        kind=bool,
        flag="--soft/--hard",
        panel=FUSION,
    )
    regularisation: float | None = setting(None, "How much soft plans mix.", kind=float, panel=FUSION)
    join: StreamJoin | str | None = setting(
        None,
        "How two plans are joined where a branch returns to the residual stream.",
        choices=tuple(StreamJoin),
        metavar="NAME",
        panel=FUSION,
    )
    probes: int | None = setting(
        None,
        "The number of inputs of both models.",
        kind=int,
        least=8,
        most=2**20,
        shown="320",
        panel=ACTIVATIONS,
    )
    samples: int | None = setting(
        None,
        "The number of activations of every module that are compared.",
        kind=int,
        least=80,
        most=2**24,
        shown="5120",
        panel=ACTIVATIONS,
    )
    mlp: MlpSolver | str | None = setting(
        None,
        "Neurons of MLPs: rotated, assigned one to one, or auto: rotated unless they are gated.",
        choices=tuple(MlpSolver),
        shown="auto",
        panel=ACTIVATIONS,
    )
    goes_on: bool = setting(
        False,
        "Whether auto compares activations where the weights do not match, instead of stopping: for a result"
        " that is refined.",
        typed=False,
        recorded=False,
    )
    on_step: Callable[[Any], None] = setting(
        lambda step: None, "Called after every block of the search.", typed=False, recorded=False
    )

    @property
    def chosen(self) -> Method:
        """The method, with the changes that were asked for."""
        names = (
            *("heads", "score", "order", "accept", "restarts", "max_sweeps", "outputs", "vectors"),
            *("evidence", "soft", "regularisation", "join", "probes", "samples", "mlp"),
        )
        calibrate = None if self.calibrate is None else str(Path(self.calibrate).resolve())
        choices = {name: getattr(self, name) for name in names}
        return super().chosen.changed(starts=self.start or None, calibrate=calibrate, **choices)
