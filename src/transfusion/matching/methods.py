"""Methods: named presets, each a choice of evidence and of how to search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from transfusion.architecture.architecture import HeadPolicy, InnerPolicy, Policy, Residual
from transfusion.errors import SettingError


class MovesKind(StrEnum):
    """Which maps a method gives."""

    MATCHED = "matched"
    NOTHING = "nothing"
    RANDOM = "random"


class HeadScore(StrEnum):
    """How pairs of heads are scored."""

    SPECTRAL = "spectral"
    """By the distance of their singular values, as in the paper: cheap, whatever the order of the units."""
    EXACT = "exact"
    """By the best assignment of the units inside, for every pair of heads; of huge parents, spectral."""


class SearchStart(StrEnum):
    """How the first sweep treats axes that it has not solved yet."""

    IDENTITY = "identity"
    """As unmoved, as in the paper."""
    PROGRESSIVE = "progressive"
    """Tensors with an unsolved axis do not count, unless there are no others."""
    SPECTRAL = "spectral"
    """As progressive, with heads matched by singular values."""


class BlockOrder(StrEnum):
    """The order in which a sweep visits the blocks."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALTERNATING = "alternating"
    """Forward, then backward, and so on."""
    RANDOM = "random"
    PARALLEL = "parallel"
    """Reordered into few and large groups of blocks that share no tensor, which run in parallel."""


class Acceptance(StrEnum):
    """Which solutions of a block are accepted."""

    ALWAYS = "always"
    RISING = "rising"
    """Only solutions that raise the objective."""


class EvidenceKind(StrEnum):
    """The features by which optimal transport compares units."""

    WEIGHTS = "weights"
    """The weights that produce them."""
    ACTIVATIONS = "activations"
    """Their activations on synthetic inputs; weights, where no module's output shows the units."""


class StreamJoin(StrEnum):
    """How the transport plans of a branch and of the residual stream are combined where they meet."""

    AVERAGE = "average"
    """The mean of both."""
    WEIGHTED = "weighted"
    """Weighted by the norms of the branch and the stream."""
    MATRIX = "matrix"
    """Weighted by the norms of each unit."""
    BRANCH = "branch"
    """The branch's plan alone."""
    SHORTCUT = "shortcut"
    """The stream's plan alone."""


@dataclass(frozen=True)
class FusionOptions:
    """Options of fusion by optimal transport."""

    evidence: EvidenceKind = EvidenceKind.WEIGHTS
    soft: bool = False
    regularisation: float = 0.3
    """The entropic regularisation of soft plans, in standard deviations of the costs."""
    join: StreamJoin = StreamJoin.AVERAGE
    draws: int = 4
    """How many batches of synthetic inputs activations are recorded on."""

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise SettingError(f"draws = {self.draws}: at least one is needed", hint="give 1 or more")


class MlpSolver(StrEnum):
    """How the neurons of an MLP are matched."""

    AUTO = "auto"
    """By a rotation; by an assignment in gated MLPs, where neurons are multiplied with each other."""
    ROTATED = "rotated"
    ASSIGNED = "assigned"


@dataclass(frozen=True)
class FunctionalOptions:
    """Options of functional alignment, which compares activations."""

    probes: int = 320
    """How many inputs both models are run on. A fifth of them is held out to measure the maps."""
    samples: int = 5120
    """How many tokens or patches are recorded for each module."""
    mlp: MlpSolver = MlpSolver.AUTO
    weights: float = 0.01
    """How much the weights that read or write a point of the stream count beside its activations, which may
    not span all directions.
    """
    scaled: bool = True
    """Whether maps also scale A's activations to the size of B's."""
    freely: bool = True
    """Whether units may move between heads, where that predicts B better."""
    calibrate: str | None = None
    """The path of calibration data that replaces the synthetic inputs."""

    def __post_init__(self) -> None:
        for name, value, least in (("probes", self.probes, 8), ("samples", self.samples, 80)):
            if value < least:
                raise SettingError(
                    f"{name} = {value}: too few to fit maps and to measure them",
                    hint=f"give at least {least}",
                )


@dataclass(frozen=True)
class Method:
    """How an alignment is found. Presets are in `METHODS`."""

    name: str
    about: str
    policy: Policy = field(default_factory=Policy)
    score: HeadScore = HeadScore.SPECTRAL
    outputs: bool = False
    """Whether the tensors that read a head (o) also count for matching the head and its units."""
    vectors: bool = False
    """Whether biases and norm weights count."""
    starts: tuple[SearchStart, ...] = (SearchStart.IDENTITY,)
    """The starts; the best after one sweep is continued."""
    order: BlockOrder = BlockOrder.FORWARD
    accept: Acceptance = Acceptance.ALWAYS
    moves: MovesKind = MovesKind.MATCHED
    follows_advice: bool = False
    """Whether the advice decides: no unit moves where B descends from A, units are permuted where they are
    found again, and else it stops; a refinement goes on with what predicts B best.
    """
    screen: bool = False
    """Whether to test first if units are in place, and to stop if they are."""
    restarts: int = 0
    """Further searches with blocks in random order; the best is kept."""
    max_sweeps: int = 100
    plain_shortcuts: bool = False
    """Whether π(A) runs with plain residual connections, although the maps of the stream differ."""
    fusion: FusionOptions | None = None
    """Options of optimal transport, which does not search."""
    functional: FunctionalOptions | None = None
    """Options of functional alignment; None if activations are not used. `auto` searches before."""

    @property
    def searches(self) -> bool:
        """Whether this method searches for permutations."""
        other = self.fusion is not None or (self.functional is not None and not self.follows_advice)
        return self.moves is MovesKind.MATCHED and not other

    def changed(self, **choices: Any) -> Method:
        """Return the method with other choices, each a value or its name. None changes nothing.

        >>> preset("transfusion").changed(residual="tied", max_sweeps=3).max_sweeps
        3
        """
        given = {name: _chosen(name, value) for name, value in choices.items() if value is not None}
        idle = [name for name in given if name in _OF_SEARCH and self.functional and not self.searches]
        if idle:
            raise SettingError(
                f"{', '.join(idle)}: functional alignment does not search",
                hint="leave it out, or choose a method that compares weights, such as guarded",
            )
        for part, (options, what, names) in _PARTS.items():
            own = {one.name: given.pop(one.name) for one in fields(options) if one.name in given}
            if part == "functional" and choices.get("heads") is not None and self.functional is not None:
                own["freely"] = False  # the policy of heads was given
            if own and getattr(self, part) is None:
                raise SettingError(
                    f"{', '.join(own)}: only for {what}", hint=f"choose the method {names}, or leave it out"
                )
            given |= {part: replace(getattr(self, part), **own)} if own else {}
        return replace(self, **given)

    @classmethod
    def from_json(cls, name: str, options: Mapping[str, Any], policy: Mapping[str, str]) -> Method:
        """Return the method that a provenance names."""
        method = preset(name)
        searching = {name: options[name] for name in _OF_SEARCH if name in options and method.searches}
        inner = {**(options.get("fusion") or {}), **(options.get("functional") or {})}
        if inner.pop("gradients", 0):  # of earlier versions
            raise SettingError("gradients: this version compares none", hint="align the two models again")
        return method.changed(**searching, **policy, **inner)

    def options(self) -> dict[str, Any]:
        """Return the choices that the provenance records."""
        info = {key: value for key, value in asdict(self).items() if key not in ("name", "about", "policy")}
        return {**info, "starts": list(self.starts)}


_GUARDED = Method(
    "guarded",
    "several starts, heads by their best inner assignment, then only steps that raise the objective",
    score=HeadScore.EXACT,
    outputs=True,
    starts=(SearchStart.PROGRESSIVE, SearchStart.IDENTITY),
    order=BlockOrder.PARALLEL,
    accept=Acceptance.RISING,
    screen=True,
)
_PAPER = Policy(Residual.UNTIED, InnerPolicy.TIED)

METHODS = {
    method.name: method
    for method in (
        _GUARDED,
        replace(
            _GUARDED,
            name="auto",
            about="decides by the weights: adds the change as it is, moves it by guarded, or stops",
            follows_advice=True,
            functional=FunctionalOptions(),
        ),
        Method("transfusion", "the paper's method: heads by singular values, then assignments", _PAPER),
        Method(
            "tied",
            "the paper's, with one map for the residual stream: π(A) is a model",
            Policy(Residual.TIED, InnerPolicy.TIED),
        ),
        Method("no-residual", "the paper's without its residual connections", _PAPER, plain_shortcuts=True),
        Method(
            "brute-force", "the paper's, with heads by their best inner assignment", _PAPER, HeadScore.EXACT
        ),
        Method(
            "no-attention",
            "the paper's, with heads in their natural order",
            Policy(Residual.UNTIED, InnerPolicy.TIED, HeadPolicy.NATURAL),
        ),
        Method(
            "git-rebasin",
            "Git Re-Basin: heads are ignored, one map for the stream, axes in random order",
            Policy(Residual.TIED, InnerPolicy.TIED, HeadPolicy.FLAT),
            outputs=True,
            order=BlockOrder.RANDOM,
        ),
        Method(
            "ot",
            "optimal-transport fusion: one pass, a transport plan for every axis, heads are ignored",
            Policy(Residual.UNTIED, InnerPolicy.FREE, HeadPolicy.FLAT),
            fusion=FusionOptions(),
        ),
        Method(
            "functional",
            "activations on synthetic inputs: a rotation for every axis that allows one",
            Policy(Residual.UNTIED, InnerPolicy.FREE),
            functional=FunctionalOptions(),
        ),
        Method("naive", "nothing moves: the task vector is added as it is", moves=MovesKind.NOTHING),
        Method("random", "a random permutation of every free axis, for tests", moves=MovesKind.RANDOM),
    )
}
DEFAULT = "auto"
USES = {
    "For two releases": (DEFAULT, "functional", "guarded", "naive"),
    "The paper": ("transfusion", "tied", "brute-force", "no-attention", "no-residual"),
    "To compare with": ("git-rebasin", "ot", "random"),
}
"""What the methods are for."""

DECIDES = (
    "Start without options. transport compares the weights of A and B first: where B descends from A, it adds"
    " the change as it is; where B's units are A's in another order, it permutes the change; else it stops"
    " before writing."
)
WITH_TRAINING = (
    "transport with `refine=True` goes on: it trains the result to answer like the fine-tune, on synthetic"
    " inputs and without your data."
)
WITHOUT_TRAINING = '`method="functional"` does without training and brings less.'
INSIST = "`force_unrelated` writes the permutation nevertheless."
RECOMMENDATION = f"{DECIDES} {WITH_TRAINING} {WITHOUT_TRAINING}"
"""What to do with two bases of which nothing is known: the same words wherever users look for them."""


_OF_SEARCH = {"score", "starts", "order", "accept", "restarts", "max_sweeps", "outputs", "vectors", "screen"}
_PARTS: dict[str, tuple[Any, str, str]] = {
    "policy": (Policy, "", ""),
    "fusion": (FusionOptions, "optimal transport", "ot"),
    "functional": (FunctionalOptions, "functional alignment", "functional or auto"),
}
"""The parts of a method that have choices of their own: their options, what for, and by which method."""
_CHOICES: dict[str, type[StrEnum]] = {
    "residual": Residual,
    "inner": InnerPolicy,
    "heads": HeadPolicy,
    "score": HeadScore,
    "starts": SearchStart,
    "order": BlockOrder,
    "accept": Acceptance,
    "evidence": EvidenceKind,
    "join": StreamJoin,
    "mlp": MlpSolver,
}


def _chosen(name: str, value: Any) -> Any:
    """Return the value of a choice, from its name if it has names."""
    if name not in _CHOICES:
        return value
    if name == "starts" and not isinstance(value, str):
        return tuple(_chosen(name, one)[0] for one in value)
    try:
        chosen = _CHOICES[name](value)
    except ValueError:
        known = ", ".join(_CHOICES[name])
        raise SettingError(f"{name} = {value!r} is not a choice", hint=f"choose one of {known}") from None
    return (chosen,) if name == "starts" else chosen


def preset(name: str) -> Method:
    """Return the preset of this name."""
    try:
        return METHODS[name]
    except KeyError:
        raise SettingError(
            f"there is no method {name!r}", hint=f"choose one of {', '.join(METHODS)}"
        ) from None
