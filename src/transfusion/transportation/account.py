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
from transfusion.alignment import Alignment
from transfusion.alpha import Alpha
from transfusion.card import card, licence_of
from transfusion.checkpoint import MEMORY
from transfusion.errors import CheckpointError
from transfusion.inputs import read_json, validate
from transfusion.model import Model
from transfusion.provenance import Advised, Nothing
from transfusion.record import RUN, Record

if TYPE_CHECKING:
    from transfusion.transportation.merging import Merging

FILE = "transfusion.json"


class Told(Protocol):
    """A fine-tune, as far as a story tells of it."""

    alpha: Alpha

    @property
    def label(self) -> str: ...
    @property
    def root(self) -> Path: ...
    @property
    def digest(self) -> str: ...


@dataclass
class Account:
    """How an output came about, as far as its tensors do not tell."""

    verb: str = "transport"
    kind: str = "model"
    command: str | None = None
    """As the user typed it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else is needed to do it again."""
    arrival: Mapping[str, Any] | None = None
    """How much of the change was found in B's outputs, where that was asked."""
    record: Record | None = None
    """Begun before the work, if its time is to be told."""

    def of(
        self,
        sources: Sequence[Told],
        base: Model,
        onto: Model,
        alignment: Alignment,
        merging: Merging | None = None,
    ) -> dict[str, Any]:
        """Where an output comes from, and what is needed to make it again."""
        told = alignment.provenance
        merged = merging.as_json() if merging and self.verb == "merge" else {}
        return {
            "transfusion": __version__,
            "verb": self.verb,
            "kind": self.kind,
            "library": onto.family.library,
            "command": self.command,
            "finetuned": [_input(source.label, source.root, source.digest) for source in sources],
            "base": _input(base.label, base.checkpoint.root, told.source_digest),
            "onto": _input(onto.label, onto.checkpoint.root, told.target_digest),
            "alignment": {
                "sha256": alignment.digest,
                "method": told.method,
                **asdict(told.policy),
                "options": dict(told.options),
                "seed": told.seed,
                "advice": dict(told.advice),
            },
            "alpha": sources[0].alpha.as_json(),
            **merged,  # with an α of its own
            "settings": dict(self.settings),
            **({"arrival": dict(self.arrival)} if self.arrival else {}),
            "repeatable": not any(
                root == MEMORY
                for root in (base.checkpoint.root, onto.checkpoint.root, *(one.root for one in sources))
            ),
        }

    def texts(self, story: Mapping[str, Any]) -> dict[str, str]:
        """The files that tell it: to programs, and to people."""
        inputs = (*story["finetuned"], story["base"], story["onto"])
        licences = {one["name"]: one["licence"] for one in inputs}
        told = {**story, RUN: self.record.run()} if self.record else story
        return {
            FILE: json.dumps(told, indent=2, ensure_ascii=False) + "\n",
            "README.md": card(story, licences, self.command),
        }


def _input(name: str, root: Path, digest: str) -> dict[str, Any]:
    licence = licence_of(root if root.is_dir() else root.parent)
    return {"name": name, "path": str(root.resolve()), "sha256": digest, "licence": licence}


def base_in(root: Path) -> dict[str, Any] | None:
    """The base that an output of this program was made for, as its story tells; None for anything else."""
    try:
        onto = read_story(root / FILE)["onto"]
    except CheckpointError:
        return None
    return {"name": onto["name"], "sha256": onto["sha256"]}


# ── what a file tells ────────────────────────────────────────────────────────────────────────

Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=2**31)]


class Input(TypedDict):
    """A model or an adapter that an output was made of."""

    name: str
    path: str
    sha256: str


class Options(TypedDict, total=False):
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


class Aligned(TypedDict):
    """π, and how it was found."""

    sha256: str
    method: str
    residual: str
    inner: str
    heads: str
    options: Options
    seed: Annotated[int, Field(ge=0)]
    advice: Advised | Nothing


class Settings(TypedDict, total=False):
    """What else the run was given."""

    via: str | None
    config: str | None
    calibrate: str | None
    new_tokens: Literal["refuse", "keep", "drop"] | None
    full: bool | None
    head: Count | None
    rank: Count | None


class Story(TypedDict):
    """The story of a transport or a merge."""

    verb: Literal["transport", "merge"]
    kind: str
    command: str | None
    finetuned: Annotated[list[Input], Field(min_length=1)]
    base: Input
    onto: Input
    alignment: Aligned
    alpha: Number | dict[str, Number]
    settings: Settings
    dtype: str | None
    files: dict[str, str]
    arrival: NotRequired[dict[str, Any] | None]
    repeatable: NotRequired[bool]


class Merged(Story):
    """That of a merge."""

    how: str
    weights: list[Number]
    density: Number | None
    seed: Annotated[int, Field(ge=0)] | None


def read_story(path: Path) -> dict[str, Any]:
    """The story beside an output, with all that is needed to do it again."""
    story = read_json(path)
    hint = f"give the {FILE} that lies beside an output"
    if story.get("verb") not in ("transport", "merge"):
        raise CheckpointError(f"{path}: this is not the story of a transport or a merge", hint=hint)
    validate(story, Merged if story["verb"] == "merge" else Story, path, hint=hint)
    return story
