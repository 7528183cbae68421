"""The journal: the state of a search after each sweep, from which an interrupted run resumes."""

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

from transfusion.alignment.maps import KINDS, Map
from transfusion.errors import AlignmentError, TransfusionError
from transfusion.files.publishing import publish_file, write_tensors
from transfusion.files.tensor_content import tensor_digest
from transfusion.matching.trial import Trial
from transfusion.matching.weights.gains import GainSnapshot
from transfusion.runtime.untrusted_files import parse_json, validate

_KEY = "transfusion-journal"


class _JournalEntry(TypedDict):
    """A trial in the file."""

    trace: Annotated[list[float], Field(min_length=1)]
    still: bool
    restart: int
    changes: dict[str, int]
    visits: dict[str, list[int]]
    states: list[str]
    gaps: dict[str, float]
    maps: dict[str, list[str]]
    history: dict[str, list[list[Any]]]


class _JournalHeader(TypedDict):
    belongs_to: str
    trials: dict[str, _JournalEntry]


class _Maps:
    """Maps by the hash of their content, so that equal maps are written once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[str, Map] = {}

    def to_json(self, maps: Mapping[str, Map]) -> dict[str, list[str]]:
        """Return the kind and the name of the map of each axis."""
        info: dict[str, list[str]] = {}
        for id, map_ in maps.items():
            tensor = map_.to_tensor()
            name = tensor_digest(tensor).hex()
            self.tensors[name] = tensor
            info[id] = [map_.kind, name]
        return info

    def from_json(self, info: Mapping[str, list[str]], file: Any) -> dict[str, Map]:
        """Return the maps that `to_json` named, from a file."""
        for kind, name in info.values():
            if name not in self._known:
                tensor = file.get_tensor(name)
                if tensor_digest(tensor).hex() != name:
                    raise AlignmentError("a map in the journal does not match its hash")
                self._known[name] = KINDS[kind].from_tensor(tensor)
        return {id: self._known[name] for id, (_, name) in info.items()}


@dataclass
class SearchJournal:
    """A file beside the output. It is used only for the same models, method and options."""

    path: Path
    belongs_to: str
    """Everything that determines the result, as text."""
    trials: dict[str, Trial] = field(default_factory=dict)

    def note(self, trial: Trial) -> None:
        """Write the state of a trial."""
        self.trials[trial.name] = trial
        maps = _Maps()
        provenance = {
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
                    "maps": maps.to_json(one.maps),
                    "history": {
                        id: [[view.sections, maps.to_json(view.maps), view.moved] for view in history]
                        for id, history in one.history.items()
                    },
                }
                for name, one in self.trials.items()
            },
        }
        metadata = {_KEY: json.dumps(provenance)}
        publish_file(self.path, lambda staged: write_tensors(staged, maps.tensors, metadata), force=True)

    def recall(self) -> Mapping[str, Trial]:
        """Return the trials of an interrupted run of the same search, if there are any."""
        if not isfile(self.path):
            return {}
        try:
            with safe_open(self.path, framework="pt") as opened:
                info = parse_json((opened.metadata() or {})[_KEY], self.path)
                provenance = validate(info, _JournalHeader, self.path, hint="")
                if provenance["belongs_to"] == self.belongs_to:
                    maps = _Maps()
                    for name, entry in provenance["trials"].items():
                        self.trials[name] = Trial(
                            name,
                            maps.from_json(entry["maps"], opened),
                            entry["trace"],
                            entry["still"],
                            entry["restart"],
                            Counter(entry["changes"]),
                            entry["visits"],
                            entry["states"],
                            {
                                id: tuple(
                                    GainSnapshot(tuple(sections), maps.from_json(then, opened), moved)
                                    for sections, then, moved in history
                                )
                                for id, history in entry["history"].items()
                            },
                            entry["gaps"],
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
        """Remove the file, once the search is done."""
        self.path.unlink(missing_ok=True)
