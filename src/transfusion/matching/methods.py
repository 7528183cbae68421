"""Methods: named presets, each a choice of what counts as evidence and of how to search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from transfusion.architecture.architecture import HeadPolicy, InnerPolicy, Policy, Residual
from transfusion.errors import SettingError


class MovesKind(StrEnum):
    """What is moved."""

    MATCHED = "matched"
    NOTHING = "nothing"
    RANDOM = "random"


class HeadScore(StrEnum):
    """By what heads are matched, before or together with the units inside them."""

    SPECTRAL = "spectral"
    """The distance of their singular values: blind to the order inside, cheap, the paper's."""
    EXACT = "exact"
    """The best that the units inside could do, for every pair of heads."""


class SearchStart(StrEnum):
    """What the first sweep makes of axes that it has not visited yet."""

    IDENTITY = "identity"
    """They count as they are, as in the paper."""
    PROGRESSIVE = "progressive"
    """They do not count, where there is anything else to go by: their order means nothing yet."""
    SPECTRAL = "spectral"
    """As settled, with heads where their singular values put them."""


class BlockOrder(StrEnum):
    """In which order a sweep visits the axes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALTERNATING = "alternating"
    """Forward, then backward, and so on."""
    RANDOM = "random"
    PARALLEL = "parallel"
    """Axes that share no tensor together, so that all cores have something to do."""


class Acceptance(StrEnum):
    """Which proposals are taken."""

    ALWAYS = "always"
    RISING = "rising"
    """Only those that raise the objective."""


class EvidenceKind(StrEnum):
    """What tells units apart."""

    WEIGHTS = "weights"
    """The weights that produce them."""
    ACTIVATIONS = "activations"
    """What they compute from made-up inputs; weights, where no module's output shows them."""


class StreamJoin(StrEnum):
    """How the plans of a branch and of the stream become the plan of the point where they meet."""

    AVERAGE = "average"
    """Half and half."""
    WEIGHTED = "weighted"
    """By how large the branch and the stream are there."""
    MATRIX = "matrix"
    """The same, unit by unit."""
    BRANCH = "branch"
    """The branch's plan alone."""
    SHORTCUT = "shortcut"
    """The stream's plan alone."""


@dataclass(frozen=True)
class FusionOptions:
    """How two models are fused."""

    evidence: EvidenceKind = EvidenceKind.WEIGHTS
    soft: bool = False
    regularisation: float = 0.3
    """How much soft plans mix, in standard deviations of the costs."""
    join: StreamJoin = StreamJoin.AVERAGE
    draws: int = 4
    """How many draws of probes speak, for activations."""

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise SettingError(f"draws = {self.draws}: nothing would be computed", hint="give 1 or more")


class MlpSolver(StrEnum):
    """How the neurons of an MLP are mapped."""

    AUTO = "auto"
    """Turned; assigned where two of them are multiplied with each other."""
    ROTATED = "rotated"
    ASSIGNED = "assigned"


@dataclass(frozen=True)
class FunctionalOptions:
    """How two models are compared by what they compute."""

    probes: int = 320
    """How many inputs both models are given; a fifth of them is only to judge by."""
    samples: int = 5120
    """How many tokens or patches among them speak at each place."""
    mlp: MlpSolver = MlpSolver.AUTO
    weights: float = 0.01
    """How much the weights around a point of the stream say beside its activations, which may not reach
    all of its directions.
    """
    scaled: bool = True
    """Whether maps carry how much larger B's activations are."""
    freely: bool = True
    """Whether units may leave their heads, where that predicts B better."""
    calibrate: str | None = None
    """Where inputs of the user's own are, which both models are given instead."""

    def __post_init__(self) -> None:
        for name, value, least in (("probes", self.probes, 8), ("samples", self.samples, 80)):
            if value < least:
                raise SettingError(
                    f"{name} = {value}: too few to find anything, and to judge it",
                    hint=f"give at least {least}",
                )


@dataclass(frozen=True)
class Method:
    """How an alignment is found."""

    name: str
    about: str
    policy: Policy = field(default_factory=Policy)
    score: HeadScore = HeadScore.SPECTRAL
    outputs: bool = False
    """Whether the tensors that read a head (o) take part in matching it and what lies within it."""
    vectors: bool = False
    """Whether biases and norm weights take part in the gain."""
    starts: tuple[SearchStart, ...] = (SearchStart.IDENTITY,)
    """Where to begin; the best after one sweep goes on."""
    order: BlockOrder = BlockOrder.FORWARD
    accept: Acceptance = Acceptance.ALWAYS
    moves: MovesKind = MovesKind.MATCHED
    follows_advice: bool = False
    """Whether the evidence decides: nothing moves where the advice is that nothing should, and units are
    turned where that predicts B better than what the search has found.
    """
    screen: bool = False
    """Whether to ask first if units are where they were, and to stop if they are."""
    restarts: int = 0
    """Further searches in random orders; the best is kept."""
    max_sweeps: int = 100
    plain_shortcuts: bool = False
    """Whether π(A) is run with plain residual connections, although the stream's maps differ."""
    fusion: FusionOptions | None = None
    """For optimal transport, which is no search: how plans are made."""
    functional: FunctionalOptions | None = None
    """For functional alignment, which is none either: how activations are compared."""

    @property
    def searches(self) -> bool:
        """Whether this method looks for anything."""
        other = self.fusion is not None or (self.functional is not None and not self.follows_advice)
        return self.moves is MovesKind.MATCHED and not other

    def changed(self, **choices: Any) -> Method:
        """The method with other choices, each a value or the word for it; None changes nothing."""
        given = {name: _chosen(name, value) for name, value in choices.items() if value is not None}
        policy = {name: given.pop(name) for name in list(given) if name in _OF_POLICY}
        fusion = {name: given.pop(name) for name in list(given) if name in _OF_FUSION}
        functional = {name: given.pop(name) for name in list(given) if name in _OF_FUNCTIONAL}
        idle = [name for name in given if name in _OF_SEARCH and self.functional and not self.searches]
        if idle:
            raise SettingError(
                f"{', '.join(idle)}: functional alignment does not search",
                hint="leave it out, or choose a method that compares weights, such as guarded",
            )
        if fusion:
            if self.fusion is None:
                raise SettingError(
                    f"{', '.join(fusion)}: only for optimal transport",
                    hint="choose --method ot, or leave it out",
                )
            given["fusion"] = replace(self.fusion, **fusion)
        if "heads" in policy and self.functional is not None:
            functional["freely"] = False  # it has been said
        if functional:
            if self.functional is None:
                raise SettingError(
                    f"{', '.join(functional)}: only for functional alignment",
                    hint="choose the method functional or auto, or leave it out",
                )
            given["functional"] = replace(self.functional, **functional)
        return replace(self, policy=replace(self.policy, **policy), **given)

    @classmethod
    def from_json(cls, name: str, options: Mapping[str, Any], policy: Mapping[str, str]) -> Method:
        """The method that a provenance tells of."""
        method = preset(name)
        searching = {name: options[name] for name in _OF_SEARCH if name in options and method.searches}
        inner = {**(options.get("fusion") or {}), **(options.get("functional") or {})}
        return method.changed(**searching, **policy, **inner)

    def options(self) -> dict[str, Any]:
        """What to remember in the provenance."""
        info = {key: value for key, value in asdict(self).items() if key not in ("name", "about", "policy")}
        return {**info, "starts": list(self.starts)}


_GUARDED = Method(
    "guarded",
    "several starts, heads by what their units can do, only what raises the objective",
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
            about="what the evidence says: nothing where B descends from A, guarded, or functional",
            follows_advice=True,
            functional=FunctionalOptions(),
        ),
        Method("transfusion", "the paper's: heads by singular values, then assignments", _PAPER),
        Method(
            "tied",
            "the paper's with one map for the stream: π(A) is a model",
            Policy(Residual.TIED, InnerPolicy.TIED),
        ),
        Method("no-residual", "the paper's without its residual connections", _PAPER, plain_shortcuts=True),
        Method(
            "brute-force", "the paper's, with heads by their best inner alignment", _PAPER, HeadScore.EXACT
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
            "optimal-transport fusion: one pass, a plan for every axis, heads are ignored",
            Policy(Residual.UNTIED, InnerPolicy.FREE, HeadPolicy.FLAT),
            fusion=FusionOptions(),
        ),
        Method(
            "functional",
            "what both models compute from made-up inputs: a rotation for every axis that allows one",
            Policy(Residual.UNTIED, InnerPolicy.FREE),
            functional=FunctionalOptions(),
        ),
        Method("naive", "nothing moves: the task vector is added as it is", moves=MovesKind.NOTHING),
        Method(
            "random",
            "a random exact move of every free axis, for tests and for planting truths",
            moves=MovesKind.RANDOM,
        ),
    )
}
DEFAULT = "guarded"


_OF_POLICY: dict[str, type[StrEnum]] = {"residual": Residual, "inner": InnerPolicy, "heads": HeadPolicy}
_OF_SEARCH = {"score", "starts", "order", "accept", "restarts", "max_sweeps", "outputs", "vectors", "screen"}
_OF_FUSION = {field.name for field in fields(FusionOptions)}
_OF_FUNCTIONAL = {field.name for field in fields(FunctionalOptions)}
_WORDS: dict[str, type[StrEnum]] = {
    **_OF_POLICY,
    "score": HeadScore,
    "starts": SearchStart,
    "order": BlockOrder,
    "accept": Acceptance,
    "evidence": EvidenceKind,
    "join": StreamJoin,
    "mlp": MlpSolver,
}


def _chosen(name: str, value: Any) -> Any:
    """A value as a method has it: words as the choices that they name."""
    if name not in _WORDS:
        return value
    if name == "starts":
        return tuple(_word(name, one) for one in ([value] if isinstance(value, str) else value))
    return _word(name, value)


def _word(name: str, value: Any) -> StrEnum:
    """The choice that a word names."""
    try:
        return _WORDS[name](value)
    except ValueError:
        known = ", ".join(_WORDS[name])
        raise SettingError(f"{name} = {value!r} is not a choice", hint=f"choose one of {known}") from None


def preset(name: str) -> Method:
    """The preset of this name."""
    try:
        return METHODS[name]
    except KeyError:
        raise SettingError(
            f"there is no method {name!r}", hint=f"choose one of {', '.join(METHODS)}"
        ) from None
