"""What was done, for the files beside an output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Protocol, Required, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict

from transfusion import __version__
from transfusion.alignment.alignment import Alignment
from transfusion.alignment.provenance import AdviceInfo, EmptyInfo
from transfusion.checkpoint.checkpoint import MEMORY
from transfusion.errors import CheckpointError
from transfusion.model.model import Model
from transfusion.runtime.run_record import RUN, RunRecord
from transfusion.runtime.untrusted_files import read_json, validate
from transfusion.transportation.alpha import Alpha
from transfusion.transportation.model_card import card, licence_of

if TYPE_CHECKING:
    from transfusion.transportation.merge_rules import MergeRule

FILE = "transfusion.json"


class RecordedFinetune(Protocol):
    """A fine-tune, as far as a story tells of it."""

    alpha: Alpha

    @property
    def label(self) -> str: ...
    @property
    def root(self) -> Path: ...
    @property
    def digest(self) -> str: ...


@dataclass
class OutputRecord:
    """How an output came about, as far as its tensors do not tell."""

    verb: str = "transport"
    kind: str = "model"
    command: str | None = None
    """As the user typed it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else is needed to do it again."""
    output_shift: Mapping[str, Any] | None = None
    """How much of the change was found in B's outputs, where that was asked."""
    record: RunRecord | None = None
    """Begun before the work, if its time is to be told."""

    def of(
        self,
        sources: Sequence[RecordedFinetune],
        base: Model,
        onto: Model,
        alignment: Alignment,
        merging: MergeRule | None = None,
    ) -> dict[str, Any]:
        """Where an output comes from, and what is needed to make it again."""
        info = alignment.provenance
        merged = merging.as_json() if merging and self.verb == "merge" else {}
        return {
            "transfusion": __version__,
            "verb": self.verb,
            "kind": self.kind,
            "library": onto.family.library,
            "command": self.command,
            "finetuned": [_input(source.label, source.root, source.digest) for source in sources],
            "base": _input(base.label, base.checkpoint.root, info.source_digest),
            "onto": _input(onto.label, onto.checkpoint.root, info.target_digest),
            "alignment": {
                "sha256": alignment.digest,
                "method": info.method,
                **asdict(info.policy),
                "options": dict(info.options),
                "seed": info.seed,
                "advice": dict(info.advice),
            },
            "alpha": sources[0].alpha.as_json(),
            **merged,  # with an α of its own
            "settings": dict(self.settings),
            **({"output_shift": dict(self.output_shift)} if self.output_shift else {}),
            "repeatable": not any(
                root == MEMORY
                for root in (base.checkpoint.root, onto.checkpoint.root, *(one.root for one in sources))
            ),
        }

    def texts(self, metadata: Mapping[str, Any]) -> dict[str, str]:
        """The files that tell it: to programs, and to people."""
        inputs = (*metadata["finetuned"], metadata["base"], metadata["onto"])
        licences = {one["name"]: one["licence"] for one in inputs}
        info = {**metadata, RUN: self.record.run()} if self.record else metadata
        return {
            FILE: json.dumps(info, indent=2, ensure_ascii=False) + "\n",
            "README.md": card(metadata, licences, self.command),
        }


def _input(name: str, root: Path, digest: str) -> dict[str, Any]:
    licence = licence_of(root if root.is_dir() else root.parent)
    return {"name": name, "path": str(root.resolve()), "sha256": digest, "licence": licence}


def recorded_base(root: Path) -> dict[str, Any] | None:
    """The base that an output of this program was made for, as its story tells; None for anything else."""
    try:
        onto = read_metadata(root / FILE)["onto"]
    except CheckpointError:
        return None
    return {"name": onto["name"], "sha256": onto["sha256"]}


# ── what a file tells ────────────────────────────────────────────────────────────────────────

Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=2**31)]


class InputInfo(TypedDict):
    """A model or an adapter that an output was made of."""

    name: str
    path: str
    sha256: str


class SearchOptionsInfo(TypedDict, total=False):
    """What a search went by."""

    score: str
    order: str
    accept: str
    starts: list[str]
    outputs: bool
    vectors: bool
    screen: bool
    restarts: Annotated[int, Field(ge=0, le=2**31)]
    max_sweeps: Count
    plain_shortcuts: bool
    dtype: Required[Literal["float32", "float64"]]
    fusion: dict[str, Any] | None
    functional: dict[str, Any] | None


class AlignmentInfo(TypedDict):
    """π, and how it was found."""

    sha256: str
    method: str
    residual: str
    inner: str
    heads: str
    options: SearchOptionsInfo
    seed: Annotated[int, Field(ge=0)]
    advice: AdviceInfo | EmptyInfo


class RunSettingsInfo(TypedDict, total=False):
    """What else the run was given."""

    via: str | None
    config: str | None
    calibrate: str | None
    new_tokens: Literal["refuse", "keep", "drop"] | None
    full: bool | None
    head: Count | None
    rank: Count | None


class TransportMetadata(TypedDict):
    """The story of a transport or a merge."""

    verb: Literal["transport", "merge"]
    kind: str
    command: str | None
    finetuned: Annotated[list[InputInfo], Field(min_length=1)]
    base: InputInfo
    onto: InputInfo
    alignment: AlignmentInfo
    alpha: Number | dict[str, Number]
    settings: RunSettingsInfo
    dtype: str | None
    files: dict[str, str]
    output_shift: NotRequired[dict[str, Any] | None]
    repeatable: NotRequired[bool]


class MergeMetadata(TransportMetadata):
    """That of a merge."""

    how: str
    weights: list[Number]
    density: Number | None
    seed: Annotated[int, Field(ge=0)] | None


def read_metadata(path: Path) -> dict[str, Any]:
    """The story beside an output, with all that is needed to do it again."""
    metadata = read_json(path)
    hint = f"give the {FILE} that lies beside an output"
    if metadata.get("verb") not in ("transport", "merge"):
        raise CheckpointError(f"{path}: this is not the story of a transport or a merge", hint=hint)
    validate(metadata, MergeMetadata if metadata["verb"] == "merge" else TransportMetadata, path, hint=hint)
    return metadata
