"""What a page reads of results, verb by verb; a result that says it otherwise is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypeAlias

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from transfusion.provenance import Advised, Nothing, Number, Predicted, Run

Count: TypeAlias = Annotated[int, Field(ge=0, le=2**63)]
Place: TypeAlias = Annotated[str, StringConstraints(max_length=4_000, pattern=r"^[^\x00]*$")]


class Told(TypedDict, total=False):
    """What every result may say of itself."""

    command: str | None
    run: Run | Nothing | None


class Data(TypedDict):
    """What was measured on."""

    data: str
    examples: Count
    question: str
    metric: str
    classes: NotRequired[Count | None]


class Score(TypedDict):
    value: Number


Gain: TypeAlias = dict[str, Number | None] | None


class Row(TypedDict):
    """One model's scores."""

    model: Place
    task: Score
    support: NotRequired[Score | None]
    gain: NotRequired[Gain]


class Evaluated(Told):
    task: Data
    models: list[Row]
    support: NotRequired[Data | None]
    against: NotRequired[Place | None]
    ceiling: NotRequired[Place | None]


class SweptPoint(TypedDict):
    alpha: Number
    task: Score
    support: NotRequired[Score | None]
    gain: dict[str, Number | None]


class SweptCurve(TypedDict):
    label: str
    best: Number
    points: Annotated[list[SweptPoint], Field(min_length=1)]
    method: NotRequired[str | None]


class Moved(Told, total=False):
    """What was moved onto what."""

    finetuned: Place
    base: Place
    onto: Place


class Swept(Moved):
    task: Data
    at_zero: dict[str, Score]
    curves: Annotated[list[SweptCurve], Field(min_length=1)]
    support: NotRequired[Data | None]


class LearnedCurve(TypedDict):
    label: str
    plain: Score
    learned: Score
    gain: dict[str, Number]
    coefficients: dict[str, Number]
    losses: list[Number]
    method: NotRequired[str | None]


class Learned(Moved):
    task: Data
    shots: Count
    zero: Score
    curves: list[LearnedCurve]


class WayPoint(TypedDict):
    alpha: Number
    loss: Number
    accuracy: Number


class Way(TypedDict):
    label: str
    points: Annotated[list[WayPoint], Field(min_length=1)]
    height: Number | None
    faithful: bool
    method: NotRequired[str | None]


class Barriers(Told):
    question: str
    examples: Count
    data: str
    curves: list[Way]
    a: NotRequired[Place]
    b: NotRequired[Place]


class AboutPi(TypedDict, total=False):
    sha256: str
    method: str


class Proof(Told, total=False):
    """What all proofs may say."""

    a: Place | None
    b: Place | None
    via: Place | None
    alignment: AboutPi | None


class Equality(Proof):
    equal: bool
    difference: float
    outputs: list[str]
    tolerance: NotRequired[float]
    reason: NotRequired[str | None]


class Prediction(Proof):
    holds: bool
    found: Number
    identity: Number
    null: Number
    axes: dict[str, Predicted]
    probes: NotRequired[str]


class Check(TypedDict):
    passed: bool


class Certificate(Proof):
    passed: bool
    checks: list[Check]


class Aligned(Told):
    written: Place
    method: str


class Input(TypedDict):
    name: Place
    sha256: str
    path: NotRequired[Place]


class Pi(TypedDict):
    method: str
    sha256: NotRequired[str]
    advice: NotRequired[Advised | Nothing | None]


class Settings(TypedDict, total=False):
    via: Place | None
    config: Place | None


class Arrival(TypedDict, total=False):
    direction: Number | None
    size: Number | None
    probes: str


class Story(Told):
    """Of a transport or a merge."""

    finetuned: Annotated[list[Input], Field(min_length=1)]
    base: Input
    onto: Input
    alignment: Pi
    alpha: NotRequired[Number | dict[str, Number] | None]
    settings: NotRequired[Settings | None]
    how: NotRequired[str | None]
    kind: NotRequired[str]
    arrival: NotRequired[Arrival | None]
    repeatable: NotRequired[bool]
    moved: NotRequired[Count]
    unchanged: NotRequired[Count]
    new_tokens: NotRequired[Count]
    carried: NotRequired[list[str]]
    dropped: NotRequired[list[str]]


SCHEMAS: Mapping[str, tuple[Any, ...]] = {
    "align": (Aligned,),
    "barrier": (Barriers,),
    "evaluate": (Evaluated,),
    "fewshot": (Learned,),
    "merge": (Story,),
    "sweep": (Swept,),
    "transport": (Story,),
    "verify": (Equality, Prediction, Certificate),
}
"""The verbs whose results are understood, and what a result of each tells: one of these."""


def schema_of(verb: str, told: Mapping[str, Any]) -> Any:
    """The schema that a result is to be held to: of several, the one with a first key of which it has."""
    firsts = {Equality: "equal", Prediction: "holds", Certificate: "passed"}
    known = SCHEMAS[verb]
    return next((one for one in known if firsts.get(one) in told), known[0])
