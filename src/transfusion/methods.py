"""Methods: named presets, each a choice of what counts as evidence and of how to search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from transfusion.architecture import Heads, Inner, Policy, Residual
from transfusion.errors import SettingError


class Moves(StrEnum):
    """What is moved."""

    MATCHED = "matched"
    NOTHING = "nothing"
    RANDOM = "random"


class Score(StrEnum):
    """By what heads are matched, before or together with the units inside them."""

    SPECTRAL = "spectral"
    """The distance of their singular values: blind to the order inside, cheap, the paper's."""
    EXACT = "exact"
    """The best that the units inside could do, for every pair of heads."""


class Start(StrEnum):
    """What the first sweep makes of axes that it has not visited yet."""

    IDENTITY = "identity"
    """They count as they are, as in the paper."""
    SETTLED = "settled"
    """They do not count, where there is anything else to go by: their order means nothing yet."""
    SPECTRAL = "spectral"
    """As settled, with heads where their singular values put them."""


class Order(StrEnum):
    """In which order a sweep visits the axes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALTERNATING = "alternating"
    """Forward, then backward, and so on."""
    RANDOM = "random"
    WAVES = "waves"
    """Axes that share no tensor together, so that all cores have something to do."""


class Accept(StrEnum):
    """Which proposals are taken."""

    ALWAYS = "always"
    RISING = "rising"
    """Only those that raise the objective."""


class Evidence(StrEnum):
    """What tells units apart."""

    WEIGHTS = "weights"
    """The weights that produce them."""
    ACTIVATIONS = "activations"
    """What they compute from made-up inputs; weights, where no module's output shows them."""


class Join(StrEnum):
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
class Fusion:
    """How two models are fused."""

    evidence: Evidence = Evidence.WEIGHTS
    soft: bool = False
    regularisation: float = 0.3
    """How much soft plans mix, in standard deviations of the costs."""
    join: Join = Join.AVERAGE
    draws: int = 4
    """How many draws of probes speak, for activations."""

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise SettingError(f"draws = {self.draws}: nothing would be computed", hint="give 1 or more")


class Mlp(StrEnum):
    """How the neurons of an MLP are mapped."""

    AUTO = "auto"
    """Turned; assigned where two of them are multiplied with each other."""
    TURNED = "turned"
    ASSIGNED = "assigned"


@dataclass(frozen=True)
class Functional:
    """How two models are compared by what they compute."""

    probes: int = 320
    """How many inputs both models are given; a fifth of them is only to judge by."""
    samples: int = 5120
    """How many tokens or patches among them speak at each place."""
    mlp: Mlp = Mlp.AUTO
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
    score: Score = Score.SPECTRAL
    outputs: bool = False
    """Whether the tensors that read a head (o) take part in matching it and what lies within it."""
    vectors: bool = False
    """Whether biases and norm weights take part in the gain."""
    starts: tuple[Start, ...] = (Start.IDENTITY,)
    """Where to begin; the best after one sweep goes on."""
    order: Order = Order.FORWARD
    accept: Accept = Accept.ALWAYS
    moves: Moves = Moves.MATCHED
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
    fusion: Fusion | None = None
    """For optimal transport, which is no search: how plans are made."""
    functional: Functional | None = None
    """For functional alignment, which is none either: how activations are compared."""

    @property
    def searches(self) -> bool:
        """Whether this method looks for anything."""
        other = self.fusion is not None or (self.functional is not None and not self.follows_advice)
        return self.moves is Moves.MATCHED and not other

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
    def recalled(cls, name: str, options: Mapping[str, Any], policy: Mapping[str, str]) -> Method:
        """The method that a provenance tells of."""
        method = preset(name)
        searching = {name: options[name] for name in _OF_SEARCH if name in options and method.searches}
        inner = {**(options.get("fusion") or {}), **(options.get("functional") or {})}
        return method.changed(**searching, **policy, **inner)

    def options(self) -> dict[str, Any]:
        """What to remember in the provenance."""
        told = {key: value for key, value in asdict(self).items() if key not in ("name", "about", "policy")}
        return {**told, "starts": list(self.starts)}


_GUARDED = Method(
    "guarded",
    "several starts, heads by what their units can do, only what raises the objective",
    score=Score.EXACT,
    outputs=True,
    starts=(Start.SETTLED, Start.IDENTITY),
    order=Order.WAVES,
    accept=Accept.RISING,
    screen=True,
)
_PAPER = Policy(Residual.UNTIED, Inner.TIED)

METHODS = {
    method.name: method
    for method in (
        _GUARDED,
        replace(
            _GUARDED,
            name="auto",
            about="what the evidence says: nothing where B descends from A, guarded, or functional",
            follows_advice=True,
            functional=Functional(),
        ),
        Method("transfusion", "the paper's: heads by singular values, then assignments", _PAPER),
        Method(
            "tied",
            "the paper's with one map for the stream: π(A) is a model",
            Policy(Residual.TIED, Inner.TIED),
        ),
        Method("no-residual", "the paper's without its residual connections", _PAPER, plain_shortcuts=True),
        Method("brute-force", "the paper's, with heads by their best inner alignment", _PAPER, Score.EXACT),
        Method(
            "no-attention",
            "the paper's, with heads in their natural order",
            Policy(Residual.UNTIED, Inner.TIED, Heads.NATURAL),
        ),
        Method(
            "git-rebasin",
            "Git Re-Basin: heads are ignored, one map for the stream, axes in random order",
            Policy(Residual.TIED, Inner.TIED, Heads.FLAT),
            outputs=True,
            order=Order.RANDOM,
        ),
        Method(
            "ot",
            "optimal-transport fusion: one pass, a plan for every axis, heads are ignored",
            Policy(Residual.UNTIED, Inner.FREE, Heads.FLAT),
            fusion=Fusion(),
        ),
        Method(
            "functional",
            "what both models compute from made-up inputs: a rotation for every axis that allows one",
            Policy(Residual.UNTIED, Inner.FREE),
            functional=Functional(),
        ),
        Method("naive", "nothing moves: the task vector is added as it is", moves=Moves.NOTHING),
        Method(
            "random",
            "a random exact move of every free axis, for tests and for planting truths",
            moves=Moves.RANDOM,
        ),
    )
}
DEFAULT = "guarded"


_OF_POLICY: dict[str, type[StrEnum]] = {"residual": Residual, "inner": Inner, "heads": Heads}
_OF_SEARCH = {"score", "starts", "order", "accept", "restarts", "max_sweeps", "outputs", "vectors", "screen"}
_OF_FUSION = {field.name for field in fields(Fusion)}
_OF_FUNCTIONAL = {field.name for field in fields(Functional)}
_WORDS: dict[str, type[StrEnum]] = {
    **_OF_POLICY,
    "score": Score,
    "starts": Start,
    "order": Order,
    "accept": Accept,
    "evidence": Evidence,
    "join": Join,
    "mlp": Mlp,
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
