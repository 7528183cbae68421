"""The journal: where a search stands after each sweep, so that an interrupted run can go on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from transfusion.checkpoint import tensor_digest
from transfusion.errors import TransfusionError
from transfusion.evidence.gains import View
from transfusion.maps import KINDS, Map
from transfusion.matching.search import Trial
from transfusion.writer import publish_file, write_tensors

_KEY = "transfusion-journal"


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
                self._known[name] = KINDS[kind].from_tensor(file.get_tensor(name))
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
        try:
            with safe_open(self.path, framework="pt") as opened:
                story = json.loads((opened.metadata() or {})[_KEY])
                if story["belongs_to"] == self.belongs_to:
                    maps = _Maps()
                    for name, told in story["trials"].items():
                        self.trials[name] = Trial(
                            name,
                            maps.recalled(told["maps"], opened),
                            told["trace"],
                            told["still"],
                            told["restart"],
                            Counter(told["changes"]),
                            told["visits"],
                            told["states"],
                            {
                                id: tuple(
                                    View(tuple(sections), maps.recalled(then, opened), moved)
                                    for sections, then, moved in past
                                )
                                for id, past in told["past"].items()
                            },
                            told["gaps"],
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
