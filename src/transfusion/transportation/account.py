"""What was done, for the files beside an output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transfusion import __version__
from transfusion.alignment import Alignment
from transfusion.alpha import Alpha
from transfusion.card import card, licence_of
from transfusion.checkpoint import MEMORY
from transfusion.model import Model
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
        story = json.loads((root / FILE).read_text())
        return {"name": str(story["onto"]["name"]), "sha256": str(story["onto"]["sha256"])}
    except (OSError, ValueError, LookupError, TypeError):
        return None
