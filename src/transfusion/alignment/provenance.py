"""Provenance: where an alignment comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, Required, TypeAlias

from pydantic import ConfigDict, Field, GetPydanticSchema
from pydantic_core import core_schema
from typing_extensions import TypedDict

from transfusion import __version__
from transfusion.architecture.architecture import Policy

PLANNED = "planned"
"""The method of an assumed alignment."""

Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]


TokenCount: TypeAlias = Annotated[int, Field(ge=0, le=2**31)]


EmptyInfo: TypeAlias = Annotated[dict[str, Any], Field(max_length=0)]


class MachineInfo(TypedDict):
    """The machine that a step ran on."""

    processor: str
    cores: int | None
    threads: int
    system: str
    python: str
    torch: str


class RunInfo(TypedDict):
    """The seconds, memory and machine of a step."""

    seconds: Annotated[float, Field(ge=0, le=1e12)]
    memory: Annotated[int, Field(ge=0, le=2**63)]
    machine: MachineInfo


class PredictionInfo(TypedDict):
    """How much of B's activations is predicted for an axis."""

    found: Number
    identity: Number
    null: Number


class MarginInfo(TypedDict):
    """How well a kind of axis agrees in the weights."""

    found: Number
    identity: Number
    null: Number | None
    home: Number
    beyond: Number | None


class AdviceInfo(TypedDict, total=False):
    """Advice in a file, where it was asked for."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    verdict: Required[str]
    text: Required[str]
    instead: str
    identity: Number
    found: Number
    null: Number | None
    share: Number | None
    margins: dict[str, MarginInfo]
    axes: dict[str, PredictionInfo]
    probes: str
    blocks: dict[str, list[list[Number]]]
    paths: dict[str, list[list[TokenCount]]]
    chosen: str
    predicted_by: dict[str, Number]
    not_tried: dict[str, str]
    by_weights: dict[str, Any]
    drift: dict[str, Number]


class MethodOptionsInfo(TypedDict, total=False):
    """The options that are read from a file."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    plain_shortcuts: bool
    functional: dict[str, Any] | None


class VocabularyInfo(TypedDict):
    """Two vocabularies that were compared token by token."""

    source: str
    """The SHA-256 of A's tokens."""
    target: str
    tokens: Annotated[list[TokenCount], Field(min_length=2, max_length=2)]
    """The number of tokens of A, and of B."""
    common: TokenCount
    share: Number
    moved: bool
    """Whether some token has another row in B than in A, or none."""
    dropped: TokenCount
    """The number of tokens of A that B lacks."""
    dropped_first: Annotated[list[str], Field(max_length=16)]
    new: TokenCount
    """The number of tokens of B that A lacks."""
    digits: NotRequired[str]


def _as(schema: Any) -> Any:
    """Let pydantic check a mapping by a schema, and leave it as it is: other keys and their order stay."""
    return GetPydanticSchema(
        lambda _, handler: core_schema.no_info_wrap_validator_function(_checked, handler(schema))
    )


def _checked(value: Any, check: Callable[[Any], Any]) -> Any:
    check(value)
    return value


@dataclass(frozen=True)
class Provenance:
    """Where an alignment comes from: enough to trust it, or to refuse it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    family: str
    architecture: str
    """Digest of the architecture under the policy below."""
    policy: Policy
    method: str
    options: Annotated[Mapping[str, Any], _as(MethodOptionsInfo)]
    seed: int
    source: str
    """A, as the user wrote it."""
    source_fingerprint: str
    target: str
    """B, as the user wrote it."""
    target_fingerprint: str
    objective: tuple[Number, ...] = ()
    """The inner product of π(A) and B: at the start, and after each sweep."""
    advice: Annotated[Mapping[str, Any], _as(AdviceInfo | EmptyInfo)] = field(default_factory=dict)
    """The advice on this pair of models, with its numbers; empty if it was not asked for."""
    gap: Number = 0.0
    """The largest share by which a better assignment of any one axis may exist, given all others: a bound
    from dual prices. Small axes are assigned exactly."""
    version: str = __version__
    vocabulary: Annotated[Mapping[str, Any], _as(VocabularyInfo | EmptyInfo)] = field(default_factory=dict)
    """The vocabularies of A and B, if both were compared; see `VocabularyInfo`."""
    run: Annotated[Mapping[str, Any], _as(RunInfo | EmptyInfo)] = field(default_factory=dict, compare=False)
    """The record of the run: seconds, memory and machine."""
