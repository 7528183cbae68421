"""The fields of results that a page reads, verb by verb. Results are validated with these schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypeAlias

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from transfusion.alignment.provenance import (
    AdviceInfo,
    EmptyInfo,
    Number,
    PredictionInfo,
    RunInfo,
    VocabularyInfo,
)

Count: TypeAlias = Annotated[int, Field(ge=0, le=2**63)]
Place: TypeAlias = Annotated[str, StringConstraints(max_length=4_000, pattern=r"^[^\x00]*$")]


class ResultInfo(TypedDict, total=False):
    """Fields of every result."""

    command: str | None
    run: RunInfo | EmptyInfo | None


class DataSchema(TypedDict):
    """The data of a measurement."""

    data: str
    examples: Count
    question: str
    metric: str
    classes: NotRequired[Count | None]


Interval: TypeAlias = Annotated[list[Number], Field(min_length=2, max_length=2)]


class ScoreSchema(TypedDict):
    value: Number
    interval: NotRequired[Interval | None]


Gain: TypeAlias = dict[str, Number | None] | None


class RowSchema(TypedDict):
    """One model's scores."""

    model: Place
    task: ScoreSchema
    support: NotRequired[ScoreSchema | None]
    gain: NotRequired[Gain]
    gain_interval: NotRequired[dict[str, Interval | None] | None]


class EvaluateSchema(ResultInfo):
    task: DataSchema
    models: Annotated[list[RowSchema], Field(min_length=1)]
    support: NotRequired[DataSchema | None]
    against: NotRequired[Place | None]
    ceiling: NotRequired[Place | None]


class SweepPointSchema(TypedDict):
    alpha: Number
    task: ScoreSchema
    support: NotRequired[ScoreSchema | None]
    gain: dict[str, Number | None]


class SweepCurveSchema(TypedDict):
    label: str
    best: Number
    points: Annotated[list[SweepPointSchema], Field(min_length=1)]
    method: NotRequired[str | None]


class TransportedSchema(ResultInfo, total=False):
    """The models of a sweep or few-shot run."""

    finetuned: Place
    base: Place
    onto: Place


class SweepSchema(TransportedSchema):
    task: DataSchema
    at_zero: dict[str, ScoreSchema]
    curves: Annotated[list[SweepCurveSchema], Field(min_length=1)]
    support: NotRequired[DataSchema | None]


class FewShotCurveSchema(TypedDict):
    label: str
    plain: ScoreSchema
    learned: ScoreSchema
    gain: dict[str, Number]
    coefficients: dict[str, Number]
    losses: list[Number]
    method: NotRequired[str | None]


class FewShotSchema(TransportedSchema):
    task: DataSchema
    shots: Count
    zero: ScoreSchema
    curves: list[FewShotCurveSchema]


class BarrierPointSchema(TypedDict):
    alpha: Number
    loss: Number
    accuracy: Number


class BarrierCurveSchema(TypedDict):
    label: str
    points: Annotated[list[BarrierPointSchema], Field(min_length=1)]
    height: Number | None
    faithful: bool
    method: NotRequired[str | None]


class BarrierSchema(ResultInfo):
    question: str
    examples: Count
    data: str
    curves: list[BarrierCurveSchema]
    a: NotRequired[Place]
    b: NotRequired[Place]


class PiReferenceSchema(TypedDict, total=False):
    blake3: str
    method: str


class VerifySchema(ResultInfo, total=False):
    """Fields of every result of `verify`."""

    a: Place | None
    b: Place | None
    via: Place | None
    alignment: PiReferenceSchema | None


class EquivalenceSchema(VerifySchema):
    equal: bool
    difference: float
    outputs: list[str]
    tolerance: NotRequired[float]
    reason: NotRequired[str | None]


class PredictionSchema(VerifySchema):
    holds: bool
    found: Number
    identity: Number
    null: Number
    axes: dict[str, PredictionInfo]
    probes: NotRequired[str]


class CheckSchema(TypedDict):
    passed: bool


class CertificateSchema(VerifySchema):
    passed: bool
    checks: list[CheckSchema]


class AlignSchema(ResultInfo):
    written: Place
    method: str


class InputSchema(TypedDict):
    name: Place
    fingerprint: str
    path: NotRequired[Place]


class PiSchema(TypedDict):
    method: str
    blake3: NotRequired[str]
    advice: NotRequired[AdviceInfo | EmptyInfo | None]


class SettingsSchema(TypedDict, total=False):
    via: Place | None
    config: Place | None


class OutputShiftSchema(TypedDict, total=False):
    direction: Number | None
    size: Number | None
    probes: str


class BlockDriftSchema(TypedDict):
    """What B changed in the weights of one block that an adapter changes."""

    moved: Number
    strength: Number
    overwritten: Number | None
    contained: Number | None
    alpha: Number


class DriftSchema(BlockDriftSchema):
    """What B changed where an adapter acts."""

    blocks: dict[str, BlockDriftSchema]


class RefinementSchema(TypedDict):
    """What a refinement did."""

    start: str
    measure: str
    before: dict[str, Number]
    after: dict[str, Number]
    kept: Number
    steps: Count


class TransportSchema(ResultInfo):
    """The metadata of a transport or a merge."""

    finetuned: Annotated[list[InputSchema], Field(min_length=1)]
    base: InputSchema
    onto: InputSchema
    alignment: PiSchema
    alpha: NotRequired[Number | dict[str, Number] | None]
    settings: NotRequired[SettingsSchema | None]
    how: NotRequired[str | None]
    kind: NotRequired[str]
    output_shift: NotRequired[OutputShiftSchema | None]
    drift: NotRequired[DriftSchema | None]
    refinement: NotRequired[RefinementSchema]
    repeatable: NotRequired[bool]
    vocabulary: NotRequired[VocabularyInfo]
    moved: NotRequired[Count]
    unchanged: NotRequired[Count]
    new_tokens: NotRequired[Count]
    carried: NotRequired[list[str]]
    dropped: NotRequired[list[str]]


SCHEMAS: Mapping[str, tuple[Any, ...]] = {
    "align": (AlignSchema,),
    "barrier": (BarrierSchema,),
    "evaluate": (EvaluateSchema,),
    "fewshot": (FewShotSchema,),
    "merge": (TransportSchema,),
    "sweep": (SweepSchema,),
    "transport": (TransportSchema,),
    "verify": (EquivalenceSchema, PredictionSchema, CertificateSchema),
}
"""The schemas of each verb's results; a result has one of them."""


def schema_of(verb: str, info: Mapping[str, Any]) -> Any:
    """Return the schema for a result: of several, the one whose distinguishing key the result has."""
    firsts = {EquivalenceSchema: "equal", PredictionSchema: "holds", CertificateSchema: "passed"}
    known = SCHEMAS[verb]
    return next((one for one in known if firsts.get(one) in info), known[0])
