"""The journal: where a search stands after each sweep, so that an interrupted run can go on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from transfusion.errors import TransfusionError
from transfusion.maps import KINDS, Map
from transfusion.matching.search import Trial
from transfusion.writer import publish_file

_KEY = "transfusion-journal"


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
        tensors = {
            f"{name}/{id}": map_.to_tensor()
            for name, one in self.trials.items()
            for id, map_ in one.maps.items()
        }
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
                    "kinds": {id: map_.kind for id, map_ in one.maps.items()},
                }
                for name, one in self.trials.items()
            },
        }
        publish_file(
            self.path, lambda staged: save_file(tensors, staged, {_KEY: json.dumps(story)}), force=True
        )

    def recall(self) -> Mapping[str, Trial]:
        """The trials of an earlier run of the same search; none, if there was another or none."""
        try:
            with safe_open(self.path, framework="pt") as opened:
                story = json.loads((opened.metadata() or {})[_KEY])
                if story["belongs_to"] == self.belongs_to:
                    for name, told in story["trials"].items():
                        maps: dict[str, Map] = {
                            id: KINDS[kind].from_tensor(opened.get_tensor(f"{name}/{id}"))
                            for id, kind in told["kinds"].items()
                        }
                        self.trials[name] = Trial(
                            name,
                            maps,
                            told["trace"],
                            told["still"],
                            told["restart"],
                            Counter(told["changes"]),
                            told["visits"],
                            told["states"],
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
