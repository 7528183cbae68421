"""The journal: where a search stands after each sweep, so that an interrupted run can go on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import TypedDict

from transfusion.checkpoint import tensor_digest
from transfusion.errors import AlignmentError, TransfusionError
from transfusion.evidence.gains import View
from transfusion.inputs import parse_json, validate
from transfusion.maps import KINDS, Map
from transfusion.matching.search import Trial
from transfusion.writer import publish_file, write_tensors

_KEY = "transfusion-journal"


class _Noted(TypedDict):
    """A trial in the file."""

    trace: Annotated[list[float], Field(min_length=1)]
    still: bool
    restart: int
    changes: dict[str, int]
    visits: dict[str, list[int]]
    states: list[str]
    gaps: dict[str, float]
    maps: dict[str, list[str]]
    past: dict[str, list[list[Any]]]


class _Story(TypedDict):
    belongs_to: str
    trials: dict[str, _Noted]


class _Maps:
    """Maps under names; one that occurs several times is written once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[str, Map] = {}

    def noted(self, maps: Mapping[str, Map]) -> dict[str, list[str]]:
        """Axes, with the kind and the name of their maps."""
        told: dict[str, list[str]] = {}
        for id, map_ in maps.items():
            tensor = map_.to_tensor()
            name = tensor_digest(tensor).hex()
            self.tensors[name] = tensor
            told[id] = [map_.kind, name]
        return told

    def recalled(self, told: Mapping[str, list[str]], file: Any) -> dict[str, Map]:
        """What was noted, from a file."""
        for kind, name in told.values():
            if name not in self._known:
                tensor = file.get_tensor(name)
                if tensor_digest(tensor).hex() != name:
                    raise AlignmentError("a map in the journal is not the one that was noted")
                self._known[name] = KINDS[kind].from_tensor(tensor)
        return {id: self._known[name] for id, (_, name) in told.items()}


@dataclass
class Journal:
    """A file beside the output. It belongs to one pair of models and one method, or it is not used."""

    path: Path
    belongs_to: str
    """Everything that decides the result, as text."""
    trials: dict[str, Trial] = field(default_factory=dict)

    def note(self, trial: Trial) -> None:
        """Write down where a trial stands."""
        self.trials[trial.name] = trial
        maps = _Maps()
        story = {
            "belongs_to": self.belongs_to,
            "trials": {
                name: {
                    "trace": one.trace,
                    "still": one.still,
                    "restart": one.restart,
                    "changes": one.changes,
                    "visits": one.visits,
                    "states": one.states,
                    "gaps": one.gaps,
                    "maps": maps.noted(one.maps),
                    "past": {
                        id: [[view.sections, maps.noted(view.maps), view.moved] for view in past]
                        for id, past in one.past.items()
                    },
                }
                for name, one in self.trials.items()
            },
        }
        metadata = {_KEY: json.dumps(story)}
        publish_file(self.path, lambda staged: write_tensors(staged, maps.tensors, metadata), force=True)

    def recall(self) -> Mapping[str, Trial]:
        """The trials of an earlier run of the same search; none, if there was another or none."""
        if not isfile(self.path):
            return {}
        try:
            with safe_open(self.path, framework="pt") as opened:
                told = parse_json((opened.metadata() or {})[_KEY], self.path)
                story = validate(told, _Story, self.path, hint="")
                if story["belongs_to"] == self.belongs_to:
                    maps = _Maps()
                    for name, noted in story["trials"].items():
                        self.trials[name] = Trial(
                            name,
                            maps.recalled(noted["maps"], opened),
                            noted["trace"],
                            noted["still"],
                            noted["restart"],
                            Counter(noted["changes"]),
                            noted["visits"],
                            noted["states"],
                            {
                                id: tuple(
                                    View(tuple(sections), maps.recalled(then, opened), moved)
                                    for sections, then, moved in past
                                )
                                for id, past in noted["past"].items()
                            },
                            noted["gaps"],
                        )
        except (
            SafetensorError,
            TransfusionError,
            OSError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ):
            self.trials.clear()
        return dict(self.trials)

    def forget(self) -> None:
        """Remove the file: the search is over."""
        self.path.unlink(missing_ok=True)
