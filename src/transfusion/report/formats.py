"""The formats of results: only what the page shows, checked, and nothing converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from typing_extensions import TypedDict

from transfusion.alignment.provenance import EmptyInfo, Number, PredictionInfo, RunInfo

Count: TypeAlias = Annotated[int, Field(ge=0, le=2**63)]
Place: TypeAlias = Annotated[str, StringConstraints(max_length=4_000, pattern=r"^[^\x00]*$")]
Interval: TypeAlias = Annotated[list[Number], Field(min_length=2, max_length=2)]


class Format(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class AnyResult(Format):
    """The fields of every result."""

    command: str | None = None
    run: RunInfo | EmptyInfo | None = None


class Data(Format):
    """The data of a measurement."""

    data: str
    examples: Count
    question: str
    metric: str
    classes: Count | None = None


class Score(Format):
    value: Number
    interval: Interval | None = None


class Gains(TypedDict):
    task: Number | None
    support: NotRequired[Number | None]


class Scores(Format):
    """The scores of one model on the task and perhaps on the support, and its gains."""

    task: Score
    support: Score | None = None
    gain: Gains | None = None
    gain_interval: dict[str, Interval | None] | None = None

    def of(self, what: str) -> Score | None:
        return self.task if what == "task" else self.support

    def gain_of(self, what: str) -> float | None:
        found: Mapping[str, Any] = self.gain or {}
        return found.get(what)


class Measured(AnyResult):
    """A result with scores, on the task and perhaps on the support."""

    task: Data
    support: Data | None = None

    def data(self) -> dict[str, Data]:
        return {"task": self.task, **({"support": self.support} if self.support else {})}


class ScoredModel(Scores):
    model: Place


class Evaluation(Measured):
    models: Annotated[list[ScoredModel], Field(min_length=1)]
    against: Place | None = None
    ceiling: Place | None = None


class SweepPoint(Scores):
    alpha: Number


class SweepCurve(Format):
    label: str
    best: Number
    points: Annotated[list[SweepPoint], Field(min_length=1)]
    method: str | None = None

    @property
    def at_best(self) -> SweepPoint:
        return min(self.points, key=lambda one: abs(one.alpha - self.best))


class MovedOnto(AnyResult):
    """The models of a result about a moved fine-tune."""

    finetuned: Place | None = None
    base: Place | None = None
    onto: Place | None = None


class Sweep(Measured, MovedOnto):
    at_zero: Scores
    curves: Annotated[list[SweepCurve], Field(min_length=1)]


class FewShotCurve(Format):
    label: str
    plain: Score
    learned: Score
    gain: dict[str, Number]
    coefficients: dict[str, Number]
    losses: list[Number]
    method: str | None = None


class FewShot(MovedOnto):
    task: Data
    shots: Count
    zero: Score
    curves: list[FewShotCurve]


class BarrierPoint(Format):
    alpha: Number
    loss: Number
    accuracy: Number


class BarrierCurve(Format):
    label: str
    points: Annotated[list[BarrierPoint], Field(min_length=1)]
    height: Number | None
    faithful: bool
    method: str | None = None


class Barrier(AnyResult):
    question: str
    examples: Count
    data: str
    curves: list[BarrierCurve]
    a: Place | None = None
    b: Place | None = None


class PiReference(Format):
    blake3: str | None = None
    method: str = "method unknown"


class Proof(AnyResult):
    """The fields of every result of `verify`."""

    a: Place | None = None
    via: Place | None = None
    alignment: PiReference = PiReference()


class Equivalence(Proof):
    equal: bool
    difference: float
    outputs: list[str]
    tolerance: float | None = None
    reason: str | None = None


class Prediction(Proof):
    holds: bool
    found: Number
    identity: Number
    null: Number
    axes: dict[str, PredictionInfo]
    probes: str = ""


class Check(Format):
    passed: bool


class Certificate(Proof):
    passed: bool
    checks: list[Check]


class Aligned(AnyResult):
    written: Place
    method: str


class OutputShift(Format):
    direction: Number | None = None
    size: Number | None = None
    reach: Number | None = None
    probes: str = ""


class BlockDrift(Format):
    """What B changed in the weights of one block that an adapter changes."""

    moved: Number
    strength: Number
    overwritten: Number | None
    contained: Number | None
    alpha: Number


class Drift(BlockDrift):
    blocks: dict[str, BlockDrift]


class Refined(Format):
    start: str
    measure: str
    before: Annotated[dict[str, Number], Field(min_length=1)]
    after: Annotated[dict[str, Number], Field(min_length=1)]
    divergence: Interval
    kept: Number
    steps: Count


class Moved(AnyResult):
    """The fields of a transport or a merge that only a page shows; `read_metadata` has checked the others."""

    output_shift: OutputShift | None = None
    drift: Drift | None = None
    refinement: Refined | None = None
    moved: Count = 0
    unchanged: Count = 0
    new_tokens: Count = 0
    carried: list[str] = []
    dropped: list[str] = []


RUNS = ("transport", "merge")
FORMATS: Mapping[str, type[AnyResult]] = {
    "align": Aligned,
    "barrier": Barrier,
    "evaluate": Evaluation,
    "fewshot": FewShot,
    "merge": Moved,
    "sweep": Sweep,
    "transport": Moved,
    "verify": Equivalence,
}
PROOFS: Mapping[str, type[AnyResult]] = {"holds": Prediction, "passed": Certificate}
"""Further formats of `verify`, by the key that only they have."""
