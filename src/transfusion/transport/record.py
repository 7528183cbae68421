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
from transfusion.alignment.provenance import AdviceInfo, EmptyInfo, VocabularyInfo
from transfusion.errors import CheckpointError
from transfusion.files.checkpoint import MEMORY, Checkpoint
from transfusion.files.tensor_files import header_metadata
from transfusion.model.model import Model
from transfusion.runtime.run_record import RUN, RunRecord
from transfusion.runtime.untrusted_files import parse_json, path_inside, read_json, validate
from transfusion.transport.alpha import Alpha
from transfusion.transport.model_card import card, licence_of

if TYPE_CHECKING:
    from transfusion.transport.merge_rules import MergeRule


FILE = "transfusion.json"
HEADER = FILE
"""The entry with the metadata in the header of a LoRA file, which has no folder of its own."""
PI_FILE = "transfusion/pi.safetensors"
"""Where π is kept in the folder of an output, if that run found it. It has a folder of its own, because
some programs load every .safetensors file beside a model's configuration."""
FORMAT = 3
"""The format of the metadata. Formats 1 and 2 had hashes of whole inputs."""


class RecordedInput(Protocol):
    """An input, as far as metadata describes it."""

    @property
    def label(self) -> str: ...
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def fingerprint(self) -> str: ...


class RecordedFinetune(RecordedInput, Protocol):
    """A fine-tune with its α."""

    @property
    def alpha(self) -> Alpha: ...


@dataclass
class OutputRecord:
    """How an output was made, as far as its tensors do not show."""

    verb: str = "transport"
    command: str | None = None
    """As the user typed it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that a rerun needs."""
    output_shift: Mapping[str, Any] | None = None
    """How B's outputs shift, compared with A's, if that was measured."""
    record: RunRecord | None = None
    """The record of the run, started before the work."""
    drift: Mapping[str, Any] | None = None
    """What B changed where an adapter acts, if the weights of both bases can be compared."""

    def of(
        self,
        sources: Sequence[RecordedFinetune],
        base: Model,
        onto: Model,
        alignment: Alignment,
        merging: MergeRule | None = None,
    ) -> dict[str, Any]:
        """Return the inputs of an output, and what a rerun needs."""
        info = alignment.provenance
        merged = merging.as_json() if merging and self.verb == "merge" else {}
        return {
            "transfusion": __version__,
            "format": FORMAT,
            "verb": self.verb,
            "kind": "model",
            "library": onto.family.library,
            "class": class_of(onto.checkpoint.config),
            "command": self.command,
            "finetuned": list(map(_input, sources)),
            "base": _input(base),
            "onto": _input(onto),
            "alignment": {
                "blake3": alignment.digest,
                "method": info.method,
                **asdict(info.policy),
                "options": dict(info.options),
                "seed": info.seed,
                "advice": dict(info.advice),
            },
            **({"vocabulary": dict(info.vocabulary)} if info.vocabulary else {}),
            "alpha": sources[0].alpha.as_json(),
            **merged,  # with an α of its own
            "settings": dict(self.settings),
            **({"output_shift": dict(self.output_shift)} if self.output_shift else {}),
            **({"drift": dict(self.drift)} if self.drift else {}),
            "repeatable": all(one.checkpoint.root != MEMORY for one in (base, onto, *sources)),
        }

    @property
    def keeps_pi(self) -> bool:
        """Whether π is kept with the output: no other file that a user knows of holds it."""
        return "via" not in self.settings

    def texts(self, metadata: Mapping[str, Any]) -> dict[str, str]:
        """Return the metadata file and the model card."""
        if self.keeps_pi:
            metadata = {**metadata, "alignment": {**metadata["alignment"], "file": PI_FILE}}
        inputs = (*metadata["finetuned"], metadata["base"], metadata["onto"])
        licences = {one["name"]: one["licence"] for one in inputs}
        info = {**metadata, RUN: self.record.run()} if self.record else metadata
        return {
            FILE: json.dumps(info, indent=2, ensure_ascii=False) + "\n",
            "README.md": card(metadata, licences),
        }


def class_of(config: Mapping[str, Any] | None) -> str | None:
    """Return the class of the library that a configuration names."""
    config = config or {}
    name = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
    return name if isinstance(name, str) and name.isidentifier() else None


def _input(one: RecordedInput) -> dict[str, Any]:
    root = one.checkpoint.root
    licence = licence_of(root if root.is_dir() else root.parent)
    return {
        "name": one.label,
        "path": str(root.resolve()),
        "fingerprint": one.fingerprint,
        "licence": licence,
    }


def kept_pi(metadata: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the file of π that a run kept with its output; None if there is none."""
    if metadata["alignment"].get("file") != PI_FILE or not (folder / PI_FILE).exists():
        return None
    return path_inside(folder, folder / PI_FILE)


def recorded_base(root: Path) -> dict[str, Any] | None:
    """Return the base that an output of this program was made for; None for anything else."""
    try:
        onto = read_metadata(root / FILE if root.is_dir() else root)["onto"]
    except CheckpointError:
        return None
    return {"name": onto["name"], "fingerprint": onto["fingerprint"]}


# ── the schema of the metadata ───────────────────────────────────────────────────────────────

Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=2**31)]


class InputInfo(TypedDict):
    """A model or an adapter that an output was made of."""

    name: str
    path: str
    fingerprint: str


class SearchOptionsInfo(TypedDict, total=False):
    """The options of a search."""

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

    blake3: str
    method: str
    residual: str
    inner: str
    heads: str
    options: SearchOptionsInfo
    seed: Annotated[int, Field(ge=0)]
    advice: AdviceInfo | EmptyInfo
    file: NotRequired[Literal["transfusion/pi.safetensors"]]


class RefinementInfo(TypedDict):
    """The settings of a refinement."""

    steps: Count
    keep: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    rank: Count | None
    calibrate: str | None
    seed: Annotated[int, Field(ge=0)]
    threads: NotRequired[Count | None]


class RunSettingsInfo(TypedDict, total=False):
    """The further settings of a run."""

    via: str | None
    config: str | None
    architecture: str | None
    calibrate: str | None
    new_tokens: Literal["refuse", "keep", "drop"] | None
    other_parts: Literal["refuse", "keep", "drop"] | None
    full: bool | None
    head: Annotated[int, Field(ge=0, le=2**31)] | None
    rank: Count | None
    refinement: RefinementInfo | None
    vocabulary_share: Annotated[float, Field(ge=0, le=1)] | None


class TransportMetadata(TypedDict):
    """The metadata of a transport."""

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
    output_shift: NotRequired[dict[str, Any] | None]
    drift: NotRequired[dict[str, Any] | None]
    vocabulary: NotRequired[VocabularyInfo]
    repeatable: NotRequired[bool]


class MergeMetadata(TransportMetadata):
    """The metadata of a merge."""

    how: str
    weights: list[Number]
    density: Number | None
    seed: Annotated[int, Field(ge=0)] | None


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata beside an output, or in its header; refuse what a rerun cannot use."""
    hint = f"give the {FILE} beside an output, or a LoRA file that was moved"
    metadata = _in_header(path, hint) if path.suffix == ".safetensors" else read_json(path)
    if metadata.get("verb") not in ("transport", "merge"):
        raise CheckpointError(f"{path}: this is not the metadata of a transport or a merge", hint=hint)
    if metadata.get("format", 1) != FORMAT:
        raise CheckpointError(
            f"{path}: written in format {metadata.get('format', 1)}, but this version reads format {FORMAT}",
            hint="repeat it with the version that wrote it, or run the recorded command again",
        )
    validate(metadata, MergeMetadata if metadata["verb"] == "merge" else TransportMetadata, path, hint=hint)
    return metadata


def _in_header(path: Path, hint: str) -> dict[str, Any]:
    """Return the metadata in the header of a LoRA file."""
    if (text := header_metadata(path).get(HEADER)) is None:
        raise CheckpointError(f"{path}: it does not say how it was made", hint=hint)
    metadata = parse_json(text, f"{path}: {HEADER} in its header")
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: {HEADER} in its header: a JSON object was expected", hint=hint)
    return metadata
