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

from transfusion.alignment.maps import KINDS, Map
from transfusion.checkpoint.publishing import publish_file, write_tensors
from transfusion.checkpoint.tensor_content import tensor_digest
from transfusion.errors import AlignmentError, TransfusionError
from transfusion.matching.search import Trial
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
    """Maps under names; one that occurs several times is written once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[str, Map] = {}

    def noted(self, maps: Mapping[str, Map]) -> dict[str, list[str]]:
        """Axes, with the kind and the name of their maps."""
        info: dict[str, list[str]] = {}
        for id, map_ in maps.items():
            tensor = map_.to_tensor()
            name = tensor_digest(tensor).hex()
            self.tensors[name] = tensor
            info[id] = [map_.kind, name]
        return info

    def from_json(self, info: Mapping[str, list[str]], file: Any) -> dict[str, Map]:
        """What was noted, from a file."""
        for kind, name in info.values():
            if name not in self._known:
                tensor = file.get_tensor(name)
                if tensor_digest(tensor).hex() != name:
                    raise AlignmentError("a map in the journal is not the one that was noted")
                self._known[name] = KINDS[kind].from_tensor(tensor)
        return {id: self._known[name] for id, (_, name) in info.items()}


@dataclass
class SearchJournal:
    """A file beside the output. It belongs to one pair of models and one method, or it is not used."""

    path: Path
    belongs_to: str
    """Everything that decides the result, as text."""
    trials: dict[str, Trial] = field(default_factory=dict)

    def note(self, trial: Trial) -> None:
        """Write down where a trial stands."""
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
                    "maps": maps.noted(one.maps),
                    "history": {
                        id: [[view.sections, maps.noted(view.maps), view.moved] for view in history]
                        for id, history in one.history.items()
                    },
                }
                for name, one in self.trials.items()
            },
        }
        metadata = {_KEY: json.dumps(provenance)}
        publish_file(self.path, lambda staged: write_tensors(staged, maps.tensors, metadata), force=True)

    def recall(self) -> Mapping[str, Trial]:
        """The trials of an earlier run of the same search; none, if there was another or none."""
        if not isfile(self.path):
            return {}
        try:
            with safe_open(self.path, framework="pt") as opened:
                info = parse_json((opened.metadata() or {})[_KEY], self.path)
                provenance = validate(info, _JournalHeader, self.path, hint="")
                if provenance["belongs_to"] == self.belongs_to:
                    maps = _Maps()
                    for name, noted in provenance["trials"].items():
                        self.trials[name] = Trial(
                            name,
                            maps.from_json(noted["maps"], opened),
                            noted["trace"],
                            noted["still"],
                            noted["restart"],
                            Counter(noted["changes"]),
                            noted["visits"],
                            noted["states"],
                            {
                                id: tuple(
                                    GainSnapshot(tuple(sections), maps.from_json(then, opened), moved)
                                    for sections, then, moved in history
                                )
                                for id, history in noted["history"].items()
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
