"""Visits of blocks, in the order of the sweeps, and which of them can begin.

A visit is one block in one sweep. It depends on the visits before it that share a tensor with it, and on no
others. So it can begin as soon as these are done, even if it belongs to a later sweep, and its result is that
of one visit after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from transfusion.matching.blocks import Block
from transfusion.matching.methods import SearchStart

_Outcome = TypeVar("_Outcome")


@dataclass(frozen=True, eq=False)
class Visit:
    """One block in one sweep."""

    block: Block
    tensors: frozenset[str]
    """The tensors that have an axis of the block."""
    sweep: int
    number: int
    """Its place in the sweep, from 1."""
    total: int
    """How many visits the sweep has."""
    start: SearchStart | None = None
    """How the sweep treats axes that are not solved yet, if it is the first of a trial."""

    @property
    def is_progressive(self) -> bool:
        """Whether tensors with an axis that is not solved yet do not count."""
        return self.start in (SearchStart.PROGRESSIVE, SearchStart.SPECTRAL)

    @property
    def is_last(self) -> bool:
        """Whether the sweep ends with it."""
        return self.number == self.total


@dataclass
class VisitQueue(Generic[_Outcome]):
    """Visits that are waiting, under way, or done before others that precede them."""

    sweeps: Iterator[list[Visit]]
    """The visits of each sweep."""
    ahead: int
    """How many sweeps may be under way beyond the first that has not ended."""
    _visits: deque[Visit] = field(default_factory=deque)
    """All visits from the first that is not done, in their order."""
    _begun: set[Visit] = field(default_factory=set)
    _outcomes: dict[Visit, _Outcome] = field(default_factory=dict)

    def begin(self) -> Visit | None:
        """Return the first visit that can begin, and count it as begun; None if there is none."""
        self._look_ahead()
        held_up: set[str] = set()
        for visit in self._visits:
            if visit in self._outcomes:
                continue
            if visit not in self._begun and held_up.isdisjoint(visit.tensors):
                self._begun.add(visit)
                return visit
            held_up |= visit.tensors
        return None

    def end(self, visit: Visit, outcome: _Outcome) -> Iterator[tuple[Visit, _Outcome]]:
        """Note the outcome of a visit, and yield all that have no unfinished visit before them, in order."""
        self._outcomes[visit] = outcome
        while self._visits and self._visits[0] in self._outcomes:
            first = self._visits.popleft()
            self._begun.discard(first)
            yield first, self._outcomes.pop(first)

    def stop(self) -> None:
        """Begin nothing more, and forget what is under way."""
        self.sweeps = iter(())
        self._visits.clear()

    def _look_ahead(self) -> None:
        while not self._visits or self._visits[-1].sweep < self._visits[0].sweep + self.ahead:
            following = next(self.sweeps, None)
            if following is None:
                return
            self._visits.extend(following)
