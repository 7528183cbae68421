"""A trial: the state of one search."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import sha256

from transfusion.alignment.maps import Map
from transfusion.matching.weights.gains import GainHistory


@dataclass
class Trial:
    """The state of one search: its maps, and the objective before the first sweep and after each."""

    name: str
    maps: dict[str, Map]
    trace: list[float]
    still: bool = False
    restart: int = 0
    """The number of a further search in random order; 0 for the first."""
    changes: Counter[str] = field(default_factory=Counter, repr=False)
    """How often the map of each axis has changed."""
    visits: dict[str, list[int]] = field(default_factory=dict, repr=False)
    """For every block, the changes of its neighbours at its last visit with all evidence."""
    states: list[str] = field(default_factory=list, repr=False)
    """A hash of all maps after each sweep."""
    history: dict[str, GainHistory] = field(default_factory=dict, repr=False)
    """The history of each axis's gain."""
    gaps: dict[str, float] = field(default_factory=dict, repr=False)
    """For the first axis of each block, the share by which a better assignment may exist at most."""

    @property
    def sweeps(self) -> int:
        return len(self.trace) - 1

    def copy(self) -> Trial:
        """Return a copy that can go on by itself."""
        return replace(
            self,
            maps=dict(self.maps),
            trace=list(self.trace),
            changes=Counter(self.changes),
            visits=dict(self.visits),
            states=list(self.states),
            history=dict(self.history),
            gaps=dict(self.gaps),
        )

    def digest(self) -> str:
        """Return a hash of all maps."""
        total = sha256()
        for id in sorted(self.maps):
            total.update(self.maps[id].values.tobytes())
        return total.hexdigest()
